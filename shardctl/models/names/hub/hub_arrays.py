"""Builds the arrays that `save_pretrained` writes of a model from those of its state dict.

It does what `revert_weight_conversion` does (transformers, core_model_loading.py) with descriptions of arrays: first at
most one conversion for each array, then all renames.

>>> from shardctl.base.dtype import BY_NAME
>>> from shardctl.tensors.manifest import Tensor
>>> config = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
>>> head = Tensor("lm_head.weight", BY_NAME["F32"], (8, 4), ())
>>> [array.name for array in build_hub_arrays(None, [head], config)]
['embed_out.weight']
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardctl.base.errors import UnsupportedError, format_first_few
from shardctl.models.families import load_family
from shardctl.models.names.binding import find_canonical_name
from shardctl.models.names.hub.composed_array import HubArray, TensorSlice
from shardctl.models.names.hub.conversion_table import NameRenamer, find_conversions, list_unsaved_names
from shardctl.models.names.hub.saving_operations import PADDING, OperationContext, apply_operation
from shardctl.models.names.hub.tied_names import find_tied_names
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.fusion import FusionPlaces, TensorFusion, join_tensors
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, ConstantFill

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.models.names.hub.conversion_table import NameConversions, NameTransform
    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Manifest, Tensor


_LM_HEAD_PREFIX: Final = "lm_head."
"""How names of the head begin, which lies outside the base model."""


class _ConvertedArray(NamedTuple):
    """An array that a conversion makes: `tensors` are numbers among those of the arrays that it is made of."""

    pattern: str
    tensors: tuple[int, ...]
    places: FusionPlaces


class _ArrayGroup(NamedTuple):
    """Arrays that one conversion takes together, by the pattern that each matched."""

    transform: NameTransform
    arrays: dict[str, list[TensorFusion]]


def build_hub_arrays(
    model: Model | None,
    tensors: Iterable[Tensor],
    config: Mapping[str, Any],
    *,
    unstack: bool = True,
    as_on_hub: bool = False,
) -> list[TensorFusion]:
    """Build the arrays that transformers' class of a config saves of some tensors.

    Without a model, the names of the tensors are those of the class's state dict. Without `unstack`, experts that the
    class has in one array stay in it. With `as_on_hub`, the names are those that transformers 4 and engines load, too.
    Raises UnsupportedError if transformers could not save them, or would write two arrays under one name.
    """
    architecture = ModelConfig(config).architecture()
    conversions = find_conversions(architecture, config, as_on_hub=as_on_hub)
    unsaved = list_unsaved_names(architecture, config)
    on_hub = _find_hub_modules(model)
    state: list[TensorFusion] = []
    kept: list[TensorFusion] = []
    for array in list_state_arrays(model, tensors, config):
        if array.name not in unsaved:
            (kept if on_hub and array.name.startswith(on_hub) else state).append(array)
    stacks = [] if unstack else [array for array in state if conversions.unstacks_experts(array.name)]
    return [
        *save_arrays((array for array in state if array not in stacks), conversions, config),
        *_name_hub_arrays(kept, conversions),
        *_name_stacks(model, stacks, conversions),
    ]


def pad_saved_tensors(stored: Manifest, config: Mapping[str, Any]) -> Manifest:
    """Return `stored`, whose names are those of a class, with the rows of zeros that the class adds when it saves.

    Inkling 2 computes scores for the tokens that it has, and saves a row for each of `vocab_size`.
    """
    conversions = find_conversions(ModelConfig(config).architecture(), config).saving_arrays
    padding = [each for each in conversions if PADDING in (name for name, _ in each.operations)]
    rows = (config.get("text_config") or config).get("vocab_size")
    if not padding or not isinstance(rows, int):
        return stored
    found = {}
    for name, tensor in stored.tensors.items():
        if tensor.shape and tensor.shape[0] < rows and any(each.match(name) for each in padding):
            zero = ConstantFill(bytes(tensor.dtype.nbytes((1,))))
            box = Box((tensor.shape[0], *(0,) * (len(tensor.shape) - 1)), (rows - tensor.shape[0], *tensor.shape[1:]))
            chunks = (*tensor.chunks, Chunk(box, tensor.dtype, zero))
            found[name] = replace(tensor, shape=(rows, *tensor.shape[1:]), chunks=chunks)
    if not found:
        return stored
    line = f"padded with zeros to {rows:,} rows, as transformers saves it: {format_first_few(found)}"
    return replace(stored, tensors={**stored.tensors, **found}, warnings=(*stored.warnings, line))


def take_saved_arrays_apart(stored: Manifest, state: Iterable[Tensor], config: Mapping[str, Any]) -> Manifest:
    """Return `stored`, which has arrays that a class saves of its `state`, under the names and shapes of that state.

    Arrays that are one tensor as it is stay as they are.
    """
    arrays = {array.name: array for array in build_hub_arrays(None, state, config) if not array.renames}
    tensors = {name: tensor for name, tensor in stored.tensors.items() if name not in arrays}
    parts: dict[str, list[Tensor]] = {}
    for name in stored.tensors.keys() & arrays.keys():
        if stored.tensors[name].shape == arrays[name].shape:
            for part, held in arrays[name].taken_apart(stored.tensors[name]):
                parts.setdefault(part, []).append(held)
        else:
            tensors[name] = stored.tensors[name]
    for name, some in parts.items():
        tensors[name] = replace(some[0], name=name, chunks=tuple(chunk for each in some for chunk in each.chunks))
    return replace(stored, tensors=tensors) if parts else stored


def list_state_arrays(model: Model | None, tensors: Iterable[Tensor], config: Mapping[str, Any]) -> list[TensorFusion]:
    """List the arrays in which transformers' class holds some tensors, of a tie once; some may hold others, too."""
    tensors = list(tensors)
    names = {tensor.name for tensor in tensors}
    fusions = (fusion for fusion in (model.fusions.values() if model is not None else ()) if not fusion.stored)
    shared = [fusion for fusion in fusions if not names.isdisjoint(fusion.tensors)]
    inside = {name for fusion in shared for name in fusion.tensors}
    tied = {}
    if model is None and any(tensor.ties for tensor in tensors):
        tied = find_tied_names(config, [name for tensor in tensors for name in (tensor.name, *tensor.ties)])
    for tensor in tensors:
        if tensor.name not in inside:
            name = next((each for each in (tensor.name, *tensor.ties) if each not in tied), tensor.name)
            shared.append(TensorFusion(name, (tensor.name,), join_tensors((tensor.shape,))))
    return shared


def _find_hub_modules(model: Model | None) -> tuple[str, ...]:
    """Find how canonical names begin that, with their arrays, are those of the Hub."""
    family = load_family(model.family) if model is not None else None
    return family.hub_modules if family is not None else ()


def _name_hub_arrays(arrays: Iterable[TensorFusion], conversions: NameConversions) -> Iterator[TensorFusion]:
    """Name arrays that are stored as on the Hub as transformers names them when it has loaded and saved them."""
    loading, saving = NameRenamer(conversions.loading_renames), NameRenamer(conversions.saving_renames)
    base = next((f"{each.base_prefix}." for each in conversions.loading if each.base_prefix), "")
    for array in sorted(arrays, key=lambda each: _sort_naturally(each.name)):
        name = loading.rename(array.name)
        if not name.startswith((base, _LM_HEAD_PREFIX)):  # transformers adds the base model's prefix when it loads
            name = base + name
        yield replace(array, name=saving.rename(name))


def _name_stacks(
    model: Model | None, stacks: Iterable[TensorFusion], conversions: NameConversions
) -> Iterator[TensorFusion]:
    """Name the arrays that hold all experts as the class does, under the prefix that the Hub's other names have."""
    renamer = NameRenamer(conversions.saving_renames)
    for array in stacks:
        name = renamer.rename(array.name)
        known = model is None or find_canonical_name(model, name) == array.name
        yield replace(array, name=name) if known else array


def save_arrays(
    state: Iterable[TensorFusion], conversions: NameConversions, config: Mapping[str, Any]
) -> list[TensorFusion]:
    """Convert and rename the arrays of a state dict; see `build_hub_arrays`."""
    converters = conversions.saving_arrays
    by_pattern = {source: each for each in converters for source in each.sources}  # as in transformers, the last counts
    renamer, groups = NameRenamer(conversions.saving_renames), dict[str, _ArrayGroup | TensorFusion]()
    for array in sorted(state, key=lambda each: _sort_naturally(each.name)):
        found = next(((each, match) for each in converters if (match := each.match(array.name))), None)
        if found is None:
            _add_array(groups, renamer.rename(array.name), array)
            continue
        source = found[0].sources[found[1].alternative]
        group = groups.setdefault(found[1].renamed, _ArrayGroup(by_pattern[source], {}))
        if not isinstance(group, _ArrayGroup):
            raise _build_clash_error(array.name, group.name, found[1].renamed)
        group.arrays.setdefault(source, []).append(array)
    saved: dict[str, TensorFusion] = {}
    known: dict[object, list[_ConvertedArray]] = {}
    for name, group in groups.items():
        if isinstance(group, TensorFusion):
            _add_array(saved, name, group)
            continue
        for made in _convert_group(name, group, config, known):
            _add_array(saved, renamer.rename(made.name), made)
    return [TensorFusion(name, array.tensors, array.places) for name, array in saved.items()]


def _add_array(arrays: dict[str, Any], name: str, array: TensorFusion) -> None:
    if name in arrays:
        raise _build_clash_error(array.name, getattr(arrays[name], "name", name), name)
    arrays[name] = array


def _build_clash_error(one: str, other: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"transformers would save {one} and {other} both as {name}, and lose one of them",
        hint="keep the names of the source with --names keep",
    )


def _convert_group(
    name: str, group: _ArrayGroup, config: Mapping[str, Any], known: dict[object, list[_ConvertedArray]]
) -> Iterator[TensorFusion]:
    """Yield the arrays that a conversion makes of a group; layers whose arrays are alike are converted once."""
    transform, arrays = group
    key = (id(transform), tuple((pattern, tuple(id(a.places) for a in some)) for pattern, some in arrays.items()))
    if key not in known:
        known[key] = _convert_places(transform, arrays, config)
    tensors = [tensor for some in arrays.values() for array in some for tensor in array.tensors]
    full = name.replace("*.", "0.")
    around = next((full.partition(made.pattern) for made in known[key] if made.pattern in full), None)
    for made in known[key]:
        new = made.pattern if around is None else f"{around[0]}{made.pattern}{around[2]}"
        yield TensorFusion(new, tuple(tensors[number] for number in made.tensors), made.places)


def _convert_places(
    transform: NameTransform, arrays: Mapping[str, Sequence[TensorFusion]], config: Mapping[str, Any]
) -> list[_ConvertedArray]:
    """Apply the operations of a transform."""
    collected: dict[str, list[HubArray]] = {}
    shapes: list[tuple[int, ...]] = []
    for pattern, some in arrays.items():
        for array in some:
            collected.setdefault(pattern, []).append(_compose_array(array.places, len(shapes)))
            shapes += array.places.shapes
    context = OperationContext(transform.sources, transform.to, config)
    for name, settings in transform.operations:
        collected = apply_operation(name, settings, collected, context)
    return [_build_converted(pattern, array, shapes) for pattern, (array, *_) in collected.items()]


def _compose_array(places: FusionPlaces, first: int) -> HubArray:
    """Describe an array by its slices, whose tensors are numbered from `first`."""
    slices = (
        TensorSlice(first + number, box, view)
        for number, (box, view) in enumerate(zip(places.boxes, places.views, strict=True))
    )
    return HubArray(places.shape, tuple(slices))


def _build_converted(pattern: str, array: HubArray, shapes: Sequence[tuple[int, ...]]) -> _ConvertedArray:
    numbers = tuple(each.tensor for each in array.slices)
    views = [each.view for each in array.slices]
    places = FusionPlaces.of(views, [shapes[number] for number in numbers], [each.box for each in array.slices])
    if places.shape != array.shape:
        raise UnsupportedError(f"{pattern} has rows that no tensor fills, which cannot be written")
    return _ConvertedArray(pattern, numbers, places)


def _sort_naturally(name: str) -> list[tuple[object, ...]]:
    """Return the key by which transformers sorts names: numbers, at the ends of words too, by their value."""
    key: list[tuple[object, ...]] = []
    for word in name.split("."):
        text = word.rstrip("0123456789")
        number = word[len(text) :]
        if word.isdigit():
            key.append((0, int(word)))
        else:
            key.append((1, text, int(number)) if number else (1, text))
    return key
