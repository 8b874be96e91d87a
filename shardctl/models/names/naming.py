"""Brings a stored checkpoint under a model's canonical names, whoever wrote it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.names import binding
from shardctl.models.names.binding import find_canonical_name
from shardctl.models.names.flat_parameters import split_flat_parameters
from shardctl.models.names.maxtext_names import bind_maxtext_names
from shardctl.models.names.meta_names import bind_meta_names
from shardctl.models.names.torchtitan_names import bind_trainer_names
from shardctl.models.names.trainer_arrays import bind_arrays
from shardctl.models.names.wrapping import knows_all_names, list_bare_prefixes, read_class_names, remove_prefix
from shardctl.models.tables.fusion import TensorFusion, join_tensors, stack_tensors
from shardctl.tensors.training import format_state_name, split_state_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Manifest, Tensor, TrainingState

_FIRST_ARRAY_SUFFIX: Final = ".experts.w1"
"""How the name of a layer's first array ends."""
_EXPERT_ARRAY_SOURCES: Final = {
    "w1": ("gate_up_proj", 0, 2),
    "w3": ("gate_up_proj", 1, 2),
    "w2": ("down_proj", 0, 1),
}
"""By array: that of transformers, and which of how many parts of each expert it has."""
_NAMING_SCHEME_NOTE: Final = "the experts and routers of DeepSpeed's AutoEP; read as those of transformers"


def bind_manifest(model: Model, stored: Manifest, *, partial: bool = False) -> Manifest:
    """Return the same checkpoint under canonical names, in model order, with ties merged and fused arrays taken apart.

    Flat parameters of FSDP1 are taken apart, wrappers that a trainer put into the names are left out, Meta's names
    and order of rows, torchtitan's and MaxText's arrays, AutoEP's arrays of experts and other trainers' names are
    translated, and optimizer states follow their parameters. Once the class has found all of its tensors, others become
    extra ones.

    Raises:
        SourceError: a tensor is missing (unless `partial` says that some are) or has a wrong shape.
        UnsupportedError: a tensor is not known, or two parts of the checkpoint are the model equally well.
    """
    found = _note_extra_tensors(model, stored, _read_names(model, split_flat_parameters(model, stored)))
    if model.transposed:
        from shardctl.models.names.trainer_names import orient_matrices

        found = orient_matrices(model, found)
    bound = binding.bind_names(model, found, partial=partial)
    return replace(bound, training=_bind_training(model, found.training)) if found.training is not None else bound


def _read_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` under names of the model's class, current or older; what is not known stays as it is."""
    found = read_class_names(model, stored)
    if found is not stored or knows_all_names(model, stored.tensors):
        return found
    for prefix, names in list_bare_prefixes(stored.tensors):
        bare = remove_prefix(model, stored, prefix, names)
        translated = _translate_names(model, bare)
        if translated is not bare:
            return translated
    return stored


def _note_extra_tensors(model: Model, stored: Manifest, found: Manifest) -> Manifest:
    """Return `found` with a warning of the extra tensors in it that were among the weights of `stored`."""
    if len(found.extra) == len(stored.extra):
        return found
    from shardctl.models.names.extra_names import format_extra_tensors, list_reported_extra

    reported = list_reported_extra(model, [each for name, each in found.extra.items() if name not in stored.extra])
    if not reported:
        return found
    line = f"extra tensors, which {model.architecture or 'the model'} does not have: {format_extra_tensors(reported)}"
    return replace(found, warnings=(*found.warnings, line))


def _translate_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` under names of transformers, if all names are another library's; else as it is."""
    found = bind_meta_names(model, bind_trainer_names(model, stored))
    found = _bind_autoep_names(model, bind_maxtext_names(model, found))
    if found is not stored:
        return found
    from shardctl.models.names.trainer_names import bind_tabled_names

    return bind_tabled_names(model, stored)


def _bind_autoep_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` with experts and routers under the model's names, if it has such arrays; else as it is."""
    arrays: dict[str, TensorFusion] = {}
    for name in stored.tensors:
        if name.endswith(_FIRST_ARRAY_SUFFIX):
            arrays |= _build_layer(model, name.removesuffix(_FIRST_ARRAY_SUFFIX))
    return bind_arrays(stored, arrays, _NAMING_SCHEME_NOTE) if arrays else stored


def _build_layer(model: Model, prefix: str) -> dict[str, TensorFusion]:
    """Build the arrays of one layer; none if the model has no such layer."""
    found = {}
    for array, (theirs, part, parts) in _EXPERT_ARRAY_SOURCES.items():
        fusion = model.fusions.get(find_canonical_name(model, f"{prefix}.experts.{theirs}") or "")
        if fusion is None:
            return {}
        names = fusion.tensors[part::parts]
        places = stack_tensors((model.tensors[names[0]].shape,), len(names))
        found[f"{prefix}.experts.{array}"] = TensorFusion(f"{prefix}.experts.{array}", names, places)
    for kind in ("weight", "bias"):
        router = find_canonical_name(model, f"{prefix}.gate.{kind}")
        if router is not None:
            (router,) = model.fusions[router].tensors if router in model.fusions else (router,)
            name = f"{prefix}.router.gate.{kind}"
            found[name] = TensorFusion(name, (router,), join_tensors((model.tensors[router].shape,)))
    return found


def _bind_training(model: Model, stored: TrainingState) -> TrainingState:
    """Return `stored` under canonical names, in the order of the model's tensors; states of fused arrays taken apart.

    A state that has not the shape of a fused array, such as a step, is that of the first of its parts alone.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.states.items():
        state, parameter = split_state_name(name) or ("", name)
        for part, held in _split_optimizer_state(model, parameter, tensor):
            new = format_state_name(state, part)
            found.setdefault(part, {})[new] = replace(held, name=new, spelling=(name,) if new != name else ())
    groups = tuple(
        replace(
            group, parameters=tuple(part for name in group.parameters for part in _find_canonical_names(model, name))
        )
        for group in stored.groups
    )
    states = {new: tensor for part in model.tensors for new, tensor in found.get(part, {}).items()}
    return replace(stored, states=states, groups=groups)


def _split_optimizer_state(model: Model, parameter: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    meant = find_canonical_name(model, parameter)
    fusion = model.fusions.get(meant or "")
    if fusion is not None and tensor.shape == fusion.shape:
        for part, held in fusion.taken_apart(tensor):
            yield model.aliases.get(part, part), held
        return
    yield _find_canonical_names(model, parameter)[0], tensor


def _find_canonical_names(model: Model, parameter: str) -> tuple[str, ...]:
    """Find the tensors that a stored parameter is or holds."""
    meant = find_canonical_name(model, parameter)
    if meant is None:
        return (parameter,)
    fusion = model.fusions.get(meant)
    parts = fusion.tensors if fusion is not None else (meant,)
    return tuple(dict.fromkeys(model.aliases.get(part, part) for part in parts))
