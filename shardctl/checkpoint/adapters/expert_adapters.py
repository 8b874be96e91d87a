"""Takes the adapter of all experts of a layer apart into those of each expert, and joins those of each expert.

PEFT has two matrices for an array of experts (`target_parameters`), and with transformers 5 no others. vLLM and SGLang
look for those of each expert's own modules, and pass over others without a word. Until version 0.18, PEFT took every
array as `[experts, in, out]`; arrays of `[experts, out, in]` therefore have their two matrices the other way round.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING, Any, Final

from shardctl import models
from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.base.value import value_class
from shardctl.checkpoint.adapters.adapter_checkpoint import describe_adapter, read_adapter_settings
from shardctl.checkpoint.adapters.merge_targets import (
    INPUTS_FIRST_VERSION,
    OUTPUTS_FIRST_VERSION,
    find_target,
    stacks_by_input,
)
from shardctl.checkpoint.config_only import build_model_from_config
from shardctl.libraries.files.impostors import ADAPTER_CONFIG, ADAPTER_PREFIX
from shardctl.libraries.peft.modules import sort_tensors
from shardctl.libraries.peft.settings import parse_settings
from shardctl.models.adaptation.strided_view import StridedView
from shardctl.storage.bounded_text import CONFIG_TEXT, read_json
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, ConstantFill, OpaqueObject, Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.adapters.merge_targets import MergeTarget
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.libraries.peft.modules import AdaptedModule
    from shardctl.libraries.peft.settings import AdapterSettings
    from shardctl.tensors.views import ArrayView

_MATRIX_NDIM: Final = 2
_EXPERT_STACK_NDIM: Final = 3
_FIRST_MATRIX_SUFFIX: Final = ".lora_A.weight"
_SECOND_MATRIX_SUFFIX: Final = ".lora_B.weight"
_ABOVE_LAYER: Final = re.compile(r"^.*\.[0-9]+\.")
"""What the names of a layer's modules begin with, which differs from layer to layer."""


def split_expert_adapter(checkpoint: OpenedCheckpoint) -> OpenedCheckpoint:
    """Return an adapter whose experts have matrices of their own.

    Raises UsageError where nothing says which model the base is, and for an adapter of no experts, SourceError where
    the adapter does not fit it, UnsupportedError for a base that has its experts in one array on the Hub, too.
    """
    if checkpoint.base_config is None:
        raise UsageError("--experts split needs the config of the adapter's base", hint="give it with --config PATH")
    config = models.drop_quantization_config(checkpoint.base_config)
    model, manifest = build_model_from_config(checkpoint.source, config)
    base = replace(checkpoint, manifest=manifest, model=model, adapter=False)
    settings = read_adapter_settings(checkpoint.source)
    found = sort_tensors(checkpoint.manifest.tensors.values())
    targets: list[MergeTarget] = []
    taken: set[str] = set()
    for module in found.modules.values():
        stacked = [target for target in find_target(base, settings, module) if target.experts]
        targets += stacked
        if stacked:
            taken |= {part.name for part in (module.down, module.up) if part is not None}
    if not targets:
        raise UsageError(
            "--experts split needs an adapter of stacked experts, and this one has none", hint="leave it out"
        )
    split = {tensor.name: tensor for target in targets for tensor in _split_target(target, model.tensors[target.name])}
    values = _change_config(read_json(checkpoint.source, ADAPTER_CONFIG, CONFIG_TEXT), targets)
    return _replace_matrices(checkpoint, taken, split, values)


def _replace_matrices(
    checkpoint: OpenedCheckpoint, taken: Collection[str], made: Mapping[str, Tensor], values: dict[str, Any]
) -> OpenedCheckpoint:
    """Return an adapter with other tensors in the place of those that are `taken`, and another config."""
    own = {name: tensor for name, tensor in checkpoint.manifest.tensors.items() if name not in taken}
    content = (json.dumps(values, indent=2) + "\n").encode()
    objects = (
        *(each for each in checkpoint.manifest.objects if each.name != ADAPTER_CONFIG),
        OpaqueObject(ADAPTER_CONFIG, "synthesise", size=len(content), content=content),
    )
    manifest = replace(checkpoint.manifest, tensors={**own, **made}, objects=objects)
    described = describe_adapter(
        checkpoint.source, manifest, checkpoint.base_config, settings=parse_settings(values, merged=False)
    )
    return replace(
        described,
        stored=checkpoint.stored,
        resources=checkpoint.resources,
        allow_unverified=checkpoint.allow_unverified,
    )


def _split_target(target: MergeTarget, weight: models.ModelTensor) -> Iterator[Tensor]:
    """Yield the two matrices of one expert, which lie in those of all."""
    if len(weight.shape) != _MATRIX_NDIM or target.module.down is None or target.module.up is None:
        raise UnsupportedError(
            f"{target.name} has all experts in one array on the Hub, too, and engines load no matrices of each"
        )
    parts = {"down": StridedView.of(target.module.down), "up": StridedView.of(target.module.up)}
    shape = (weight.shape[0], weight.shape[1])
    left, right = target.find_factors(parts, shape, target.view.origin[0] if target.view is not None else 0)
    module = f"{ADAPTER_PREFIX}{target.name.removesuffix('.weight')}"
    for name, view in ((f"{module}.lora_A.weight", right), (f"{module}.lora_B.weight", left)):
        yield Tensor(name, view.dtype, view.shape, tuple(view.index().chunks))


def _change_config(values: dict[str, Any], targets: list[MergeTarget]) -> dict[str, Any]:
    """Return the adapter's config with the experts' modules in the place of arrays."""
    modules = values.get("target_modules") or []
    if not isinstance(modules, list):
        raise SourceError(
            f"{ADAPTER_CONFIG} has target_modules = {modules!r:.100}, to which no modules can be added",
            hint="write it as a list of names",
        )
    ranks, alphas = dict(values.get("rank_pattern") or {}), dict(values.get("alpha_pattern") or {})
    leaves = {}
    for target in targets:
        leaf = target.name.removesuffix(".weight").rpartition(".")[2]
        leaves[leaf] = target.rank, target.scaling * (sqrt(target.rank) if values.get("use_rslora") else target.rank)
    for leaf, (rank, alpha) in leaves.items():
        if rank != values.get("r"):
            ranks[rf".*\.experts\.[0-9]+\.{leaf}"] = rank
        if alpha != values.get("lora_alpha", 8):
            alphas[rf".*\.experts\.[0-9]+\.{leaf}"] = int(alpha) if float(alpha).is_integer() else alpha
    return {
        **values,
        "target_modules": sorted({*modules, *leaves}),
        "target_parameters": None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }


@value_class
class _ExpertMatrices:
    """The two matrices of one module of one expert, and where its weight lies in the array of all."""

    module: str
    down: StridedView
    up: StridedView
    expert: int
    row: int
    """The first row of its weight in that of the expert."""
    scaling: float


@value_class
class _RankBlock:
    """Vectors of one expert for some ranks of the array, and where they lie along its outputs or inputs."""

    expert: int
    start: int
    """The first of the ranks."""
    width: int
    """How many ranks; those without a vector have zeros."""
    offset: int
    length: int
    vectors: StridedView | None
    """One row for each rank; None for an expert without matrices."""


def fuse_expert_adapter(checkpoint: OpenedCheckpoint, *, inputs_first: bool = False) -> OpenedCheckpoint:
    """Return an adapter whose experts have the two matrices of an array, as PEFT 0.19 and later lay them out.

    With `inputs_first`, the layout is that of PEFT 0.18. The gate and the up projection of an expert have two products,
    which become one of both ranks, with zeros between. An adapter that has the arrays already, in the other layout,
    keeps its products. Raises as `split_expert_adapter`, and UnsupportedError for modules that one product cannot stand
    for.
    """
    if checkpoint.base_config is None:
        raise UsageError("--experts fused needs the config of the adapter's base", hint="give it with --config PATH")
    config = models.drop_quantization_config(checkpoint.base_config)
    model, manifest = build_model_from_config(checkpoint.source, config)
    settings = read_adapter_settings(checkpoint.source)
    found = sort_tensors(checkpoint.manifest.tensors.values())
    places = {
        part: (array, view)
        for array in model.fusions.values()
        if len(array.shape) == _EXPERT_STACK_NDIM
        for part, view in zip(array.tensors, array.places.views, strict=True)
    }
    members: dict[str, list[_ExpertMatrices]] = {}
    taken: set[str] = set()
    for module in found.modules.values():
        array, view = places.get(models.find_weight_name(model, f"{module.module}.weight"), (None, None))
        if array is None or view is None or module.inside:
            continue
        members.setdefault(array.name, []).append(_read_expert(module, view, settings))
        taken |= {part.name for part in (module.down, module.up) if part is not None}
    values = read_json(checkpoint.source, ADAPTER_CONFIG, CONFIG_TEXT)
    if not members:
        base = replace(checkpoint, manifest=manifest, model=model, adapter=False)
        swapped = _swap_stacked_matrices(base, settings, found.modules.values(), inputs_first=inputs_first)
        taken, fused = {tensor.name for tensor in swapped}, {tensor.name: tensor for tensor in swapped}
    else:
        arrays = {name: model.fusions[name] for name in model.fusions if name in members}
        fused = {}
        ranks: dict[str, tuple[int, float]] = {}
        for name, array in arrays.items():
            owner = name.rpartition(".")[0]
            siblings = [other for other in arrays if other.rpartition(".")[0] == owner]
            inside = ".base_layer" * (len(siblings) - 1 - siblings.index(name))
            module_name = f"{ADAPTER_PREFIX}{owner}{inside}"
            rank, tensors = _fuse_matrices(module_name, array.shape, members[name], inputs_first=inputs_first)
            fused |= {tensor.name: tensor for tensor in tensors}
            ranks[name] = rank, members[name][0].scaling
        others = [module.module for module in found.modules.values() if not taken & {module.down and module.down.name}]
        values = _name_arrays(values, ranks, others, list(model.fusions))
    if inputs_first or (settings.version and settings.version < OUTPUTS_FIRST_VERSION):
        version = INPUTS_FIRST_VERSION if inputs_first else OUTPUTS_FIRST_VERSION
        values["peft_version"] = f"{'.'.join(map(str, version))}.0"  # whose layout the matrices have
    return _replace_matrices(checkpoint, taken, fused, values)


def _swap_stacked_matrices(
    base: OpenedCheckpoint, settings: AdapterSettings, modules: Iterable[AdaptedModule], *, inputs_first: bool
) -> list[Tensor]:
    """Return the matrices of arrays of experts in the other layout; raises UsageError if none is in another."""
    swapped: list[Tensor] = []
    for module in modules:
        target = next((each for each in find_target(base, settings, module) if each.experts), None)
        if target is None or target.by_input == inputs_first or stacks_by_input(base):
            continue
        assert module.down is not None and module.up is not None  # noqa: S101, PT018 - sorted before
        parts = {"down": StridedView.of(module.down), "up": StridedView.of(module.up)}
        outputs, inputs = module.up.shape[0], module.down.shape[1]
        if target.by_input:
            outputs, inputs = inputs, outputs
        whole = replace(target, view=None)
        members: list[_ExpertMatrices] = []
        for expert in range(target.experts):
            up, down = whole.find_factors(parts, (outputs, inputs), expert)
            members.append(_ExpertMatrices(module.module, down, up, expert, 0, target.scaling))
        name = module.down.name.removesuffix(_FIRST_MATRIX_SUFFIX)
        _, tensors = _fuse_matrices(name, (target.experts, outputs, inputs), members, inputs_first=inputs_first)
        swapped += tensors
    if not swapped:
        raise UsageError(
            "--experts fused needs an adapter with matrices of each expert, and this one has none, nor arrays of "
            "experts in another layout",
            hint="leave it out",
        )
    return swapped


def _read_expert(module: AdaptedModule, view: ArrayView, settings: AdapterSettings) -> _ExpertMatrices:
    """Read what one module of an expert has; raises UnsupportedError for what an array of experts cannot have."""
    if view.axes != (1, 2) or not view.dense or module.magnitude is not None or module.bias is not None:
        raise UnsupportedError(
            f"{module.module} cannot be a part of an array of experts: it has DoRA's magnitudes or a bias, or the "
            "array has its rows in another order",
            hint="leave --experts out",
        )
    assert module.down is not None and module.up is not None  # noqa: S101, PT018 - sorted before
    down, up = StridedView.of(module.down), StridedView.of(module.up)
    scaling = settings.compute_scaling(module.module, down.shape[0])
    return _ExpertMatrices(module.module, down, up, view.origin[0], view.origin[1], scaling)


def _fuse_matrices(
    module: str, shape: tuple[int, ...], members: list[_ExpertMatrices], *, inputs_first: bool
) -> tuple[int, tuple[Tensor, Tensor]]:
    """Fuse the matrices of all experts; returns the rank of the array, and its two matrices.

    Row `expert * rank + n` of the first and column `n * experts + expert` of the second are those of an expert
    (PEFT `tuners/lora/layer.py`, `ParamWrapper.get_delta_weight`).
    """
    experts, rows, inputs = shape
    ranks: dict[int, int] = {}
    heights: dict[int, int] = {}
    for each in members:
        _check_member(each, members[0], rows, inputs)
        ranks[each.row] = max(ranks.get(each.row, 0), each.down.shape[0])
        heights[each.row] = each.up.shape[0]
    held = {(each.expert, each.row): each for each in members}
    downs: list[_RankBlock] = []
    ups: list[_RankBlock] = []
    start = 0
    for row, width in sorted(ranks.items()):
        for expert in range(experts):
            member = held.get((expert, row))
            down, up = (member.down, member.up.transposed()) if member is not None else (None, None)
            downs.append(_RankBlock(expert, start, width, 0, inputs, down))
            ups.append(_RankBlock(expert, start, width, row, heights[row], up))
        start += width
    first, second = ((ups, rows), (downs, inputs)) if inputs_first else ((downs, inputs), (ups, rows))
    dtype = members[0].down.dtype
    return start, (
        _stack_rows(f"{module}{_FIRST_MATRIX_SUFFIX}", dtype, (experts * start, first[1]), first[0]),
        _stack_columns(f"{module}{_SECOND_MATRIX_SUFFIX}", dtype, (second[1], start * experts), second[0]),
    )


def _stack_rows(name: str, dtype: DType, shape: tuple[int, int], blocks: list[_RankBlock]) -> Tensor:
    """Stack the vectors of each expert as rows, those of one expert next to each other."""
    zero, chunks = ConstantFill(bytes(dtype.unit_bytes)), []
    rank = max(block.start + block.width for block in blocks)
    for block in blocks:
        at, end = block.expert * rank + block.start, block.offset + block.length
        own = block.vectors.shape[0] if block.vectors is not None else 0
        if block.vectors is not None:
            box = Box((at, block.offset), (own, block.length))
            chunks.append(Chunk(box, dtype, block.vectors.where, block.vectors.name))
        for corner, size in (
            ((at + own, block.offset), (block.width - own, block.length)),
            ((at, 0), (block.width, block.offset)),
            ((at, end), (block.width, shape[1] - end)),
        ):
            if all(size):
                chunks.append(Chunk(Box(corner, size), dtype, zero, name))
    return Tensor(name, dtype, shape, tuple(chunks))


def _stack_columns(name: str, dtype: DType, shape: tuple[int, int], blocks: list[_RankBlock]) -> Tensor:
    """Stack the vectors of each expert as columns, of which those of all experts alternate."""
    zero, chunks = ConstantFill(bytes(dtype.unit_bytes)), []
    experts = 1 + max(block.expert for block in blocks)
    for block in blocks:
        end = block.offset + block.length
        if block.expert == 0:  # the zeros above and below are those of all experts, in one box
            for above, count in ((0, block.offset), (end, shape[0] - end)):
                if count:
                    box = Box((above, block.start * experts), (count, block.width * experts))
                    chunks.append(Chunk(box, dtype, zero, name))
        own = block.vectors.shape[0] if block.vectors is not None else 0
        for n in range(block.width):
            box = Box((block.offset, (block.start + n) * experts + block.expert), (block.length, 1))
            vector = block.vectors.take(0, n, 1).transposed() if block.vectors is not None and n < own else None
            chunks.append(Chunk(box, dtype, vector.where if vector else zero, vector.name if vector else name))
    return Tensor(name, dtype, shape, tuple(chunks))


def _check_member(member: _ExpertMatrices, first: _ExpertMatrices, rows: int, inputs: int) -> None:
    """Raise unless the matrices of a module fit an expert, and have the type and the scaling of the first's."""
    down, up = member.down, member.up
    if up.shape[1] != down.shape[0] or down.shape[1] != inputs or member.row + up.shape[0] > rows:
        raise SourceError(
            f"the matrices of {member.module} are {list(down.shape)} and {list(up.shape)}, which do not fit an expert "
            f"of {[rows, inputs]}",
            hint="the adapter may have been trained on another model",
        )
    if member.scaling != first.scaling or {down.dtype, up.dtype} != {first.down.dtype}:
        raise UnsupportedError(
            f"{member.module} has another type or scaling than {first.module}, and one product has one of each",
            hint="leave --experts out",
        )


def _name_arrays(
    values: dict[str, Any], ranks: Mapping[str, tuple[int, float]], others: list[str], arrays: list[str]
) -> dict[str, Any]:
    """Return the adapter's config with arrays in the place of the experts' modules.

    PEFT takes the first pattern that matches, so that those of arrays come first.
    """
    stabilised = bool(values.get("use_rslora"))
    short = {name: _ABOVE_LAYER.sub("", name) for name in ranks}
    everywhere = {name for name in arrays if _ABOVE_LAYER.sub("", name) in short.values()} == set(ranks)
    if not everywhere or len({(short[name], *each) for name, each in ranks.items()}) > len(set(short.values())):
        short = {name: name for name in ranks}
    modules = values.get("target_modules") or []
    kept = modules if isinstance(modules, list) else others
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    for name, (rank, scaling) in ranks.items():
        alpha = scaling * (sqrt(rank) if stabilised else rank)
        rank_pattern[re.escape(short[name])] = rank
        alpha_pattern[re.escape(short[name])] = int(alpha) if float(alpha).is_integer() else alpha
    return {
        **values,
        "target_modules": [each for each in kept if any(f".{other}".endswith(f".{each}") for other in others)],
        "target_parameters": sorted({*(values.get("target_parameters") or ()), *short.values()}),
        "rank_pattern": {**rank_pattern, **(values.get("rank_pattern") or {})},
        "alpha_pattern": {**alpha_pattern, **(values.get("alpha_pattern") or {})},
    }
