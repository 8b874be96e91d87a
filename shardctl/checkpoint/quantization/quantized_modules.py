"""Decides which modules of a model are quantized, and which stay as they are, as LLM Compressor's recipes do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.base.amounts import format_file_size
from shardctl.base.dtype import CASTABLE
from shardctl.base.errors import UnsupportedError, UsageError, format_first_few
from shardctl.base.value import value_class
from shardctl.models.quantization import quantize_model
from shardctl.models.quantization.module_list import match_exact_names
from shardctl.models.submodels.part_models import find_text_half

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.models import Model
    from shardctl.models.rounding.recipes import RoundingRecipe
    from shardctl.tensors.manifest import Tensor

_WEIGHT_SUFFIX: Final = ".weight"
_MATRIX_NDIM: Final = 2
_EXPERT_STACK_NDIM: Final = 3
_DEFAULT_IGNORE_PATTERNS: Final = ("re:.*shared_expert_gate$", "re:.*linear_attn[.].*", "re:.*indexer[.].*")
"""What LLM Compressor ignores in its examples, beside heads and routers."""
_LATENT_PROJECTION_PATTERNS: Final = ("re:.*[.]q_a_proj$", "re:.*[.]kv_a_proj_with_mqa$")
"""Latent projections, which engines put into one matrix; those of kv do not end with a block."""
_IGNORE_PATTERN_HINT: Final = (
    "modules are named as in the ignore list of compressed-tensors: a whole name, or re: and an expression"
)


@value_class
class ModuleSelection:
    """The weights that are quantized, and what the config calls the others."""

    chosen: tuple[str, ...]
    """The names of weights."""
    ignored: tuple[str, ...] = ()
    """Modules that stay as they are."""
    note: str = ""
    warning: str = ""
    """Which experts stay as they are, because no loader takes codes of their arrays."""


def select_modules(
    checkpoint: OpenedCheckpoint,
    model: Model,
    recipe: RoundingRecipe,
    ignore: Sequence[str],
    dtypes: Mapping[str, DType],
) -> ModuleSelection:
    """Select the linear layers of the text model but heads, routers and what is usually ignored or `ignore` names.

    Raises UsageError for an entry of `ignore` that no module has, UnsupportedError for a model of which no layer is
    left, or that has a layer which groups do not divide.
    """
    stored = checkpoint.manifest.tensors
    matrices = {n: t for n, t in stored.items() if len(t.shape) >= _MATRIX_NDIM and dtypes[n].name in CASTABLE}
    _check_entries(ignore, matrices)
    usual = (*_DEFAULT_IGNORE_PATTERNS, *(_LATENT_PROJECTION_PATTERNS if recipe.block[0] > 1 else ()))
    left = match_exact_names((*usual, *ignore))
    proposed = quantize_model(model, {**(checkpoint.config or {}), "quantization_config": recipe.build_config(())})
    inside = _list_text_names(checkpoint, model)
    chosen = tuple(
        name
        for name in proposed.encodings
        if name in matrices
        and name in inside
        and not model.tensors[name].optional
        and not _is_head(model, name)
        and not left(list_modules(matrices[name]))
    )
    if not chosen:
        raise UnsupportedError("no linear layer is left to quantize", hint="shardctl inspect SRC --tensors lists all")
    _check_groups(chosen, stored, recipe)
    taken = set(chosen)
    rest = [tensor for name, tensor in matrices.items() if name not in taken]
    ignored = dict.fromkeys(module for tensor in rest for module in list_linear_modules(model, tensor))
    shown = models.list_name_patterns(tensor.name.removesuffix(_WEIGHT_SUFFIX) for tensor in rest)
    note = f"; left as they are: {format_first_few(shown, len(shown))}, and all vectors" if shown else ""
    return ModuleSelection(chosen, tuple(ignored), note, _describe_stacks(model, rest))


def _describe_stacks(model: Model, rest: Sequence[Tensor]) -> str:
    """Describe the experts of which all of a layer are one array; empty if there are none."""
    stacks = [
        t for t in rest if len(t.shape) == _EXPERT_STACK_NDIM and model.tensors[t.name].row.dims.startswith("expert ")
    ]
    if not stacks:
        return ""
    patterns = models.list_name_patterns(tensor.name for tensor in stacks)
    size = format_file_size(sum(tensor.nbytes for tensor in stacks))
    return (
        f"the experts are not quantized, {size} of {stacks[0].dtype}: {format_first_few(patterns)} are whole "
        "layers of them, and no loader is known that takes codes of compressed-tensors for this model"
    )


def list_modules(tensor: Tensor) -> tuple[str, ...]:
    """List the names of the modules that have a weight: of all that are tied, and as the source spells them."""
    names = (tensor.name, *tensor.ties, *tensor.spelling)
    return tuple(dict.fromkeys(name.removesuffix(_WEIGHT_SUFFIX) for name in names))


def list_linear_modules(model: Model, tensor: Tensor) -> tuple[str, ...]:
    """List the same, but for the embedding itself, which is no linear layer, though a head may be tied to it."""
    known = model.tensors.get(tensor.name)
    first = known is not None and {kind for kind, _ in known.spec.where} >= {"first"}
    embeds = first and known is not None and known.row.dims.startswith("vocab")
    return tuple(name.removesuffix(_WEIGHT_SUFFIX) for name in tensor.ties) if embeds else list_modules(tensor)


def _is_head(model: Model, name: str) -> bool:
    return {kind for kind, _ in model.tensors[name].spec.where} == {"last"}


def _list_text_names(checkpoint: OpenedCheckpoint, model: Model) -> Collection[str]:
    """List the tensors of the text model; all, where there is nothing else."""
    config = checkpoint.config or {}
    if not models.has_text_half(config):
        return checkpoint.manifest.tensors
    return find_text_half(config, checkpoint.manifest, model.fusions).names


def _check_entries(ignore: Sequence[str], matrices: Mapping[str, Tensor]) -> None:
    for entry in ignore:
        named = match_exact_names((entry,))
        if not any(named(list_modules(tensor)) for tensor in matrices.values()):
            raise UsageError(f"--quantize-ignore {entry!r} is no module of this model", hint=_IGNORE_PATTERN_HINT)


def _check_groups(chosen: Sequence[str], stored: Mapping[str, Tensor], recipe: RoundingRecipe) -> None:
    """Raise UnsupportedError for layers whose inputs are no whole groups, which compressed-tensors refuses, too."""
    high, wide = recipe.block
    uneven = [name for name in chosen if high == 1 and wide and stored[name].shape[1] % wide]
    if uneven:
        patterns = models.list_name_patterns(name.removesuffix(_WEIGHT_SUFFIX) for name in uneven)
        example = stored[uneven[0]]
        raise UnsupportedError(
            f"{recipe.name} has groups of {wide} inputs, which do not divide the {example.shape[1]} of {example.name}",
            hint="leave such layers as they are: "
            + " ".join(f"--quantize-ignore '{_build_entry(pattern)}'" for pattern in patterns),
        )


def _build_entry(pattern: str) -> str:
    """Return an entry of an ignore list that means what a pattern of names does."""
    return f"re:{pattern.replace('.', '[.]').replace('*', '[0-9]+')}$" if "*" in pattern else pattern
