"""Describes the arrays that torchtitan has of a model, for both directions: names, and what is stacked or divided.

It stacks gate, up and down projections of experts, each by itself. What transformers has in one as queries, keys and
values, of linear attention and of vision models, are three arrays. Where a module has queries, keys and values as one
parameter, its weights are saved as three and its optimizer's states as one (`FusedQKVLinear`). Rows of queries and keys
are in transformers' order, except for Llama, of which neighbouring pairs are rotated, as Meta's are.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError, format_first_few
from shardctl.models.names.torchtitan_tables import (
    BALANCE,
    BALANCED,
    DIVIDED,
    EMBEDDING,
    ENDS,
    EXPERTS,
    JOINED,
    PARTS,
    PATCHES,
    PLAIN,
    ROUTED,
    ROUTERS,
    SEEN,
    TURNED,
)
from shardctl.models.names.trainer_arrays import bind_arrays
from shardctl.models.tables.fusion import (
    FusionPlaces,
    TensorFusion,
    cut_rows,
    join_tensors,
    merge_last_dims,
    stack_tensors,
    transpose_tensor,
)
from shardctl.tensors.box import Box
from shardctl.tensors.training import split_state_name
from shardctl.tensors.views import ArrayView

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from shardctl.models.tables.model import Model, ModelTensor
    from shardctl.tensors.manifest import Manifest

TRAINER: Final = "torchtitan"
_PARAMETER_NAMES: Final = ("weight", "bias")
_NAMING_SCHEME_NOTE: Final = "torchtitan's names and arrays; read as those of transformers"
_LAYER_PATTERN: Final = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_EXPERT_PATTERN: Final = re.compile(r"mlp\.experts\.([0-9]+)\.([a-z_]+)\.weight")
_SPLIT_QKV_PATTERN: Final = re.compile(rf"(layers\.[0-9]+\.{re.escape(JOINED)})\.w([qkv])\.(weight|bias)")
_INTERLEAVED_ROTARY_FAMILY: Final = "llama"
"""The family whose heads have neighbouring rows rotated there, and halves in transformers."""


def build_trainer_arrays(model: Model, there: Collection[str] | None = None) -> dict[str, TensorFusion]:
    """Build every array that torchtitan saves of a model's weights, by its name there; of a tie there are several.

    Of tensors that a checkpoint may lack, such as layers that predict, only those that are `there` have one (default:
    all). Raises UnsupportedError for a family whose names are not known here, and for tensors that torchtitan does not
    have.
    """
    if model.family not in PARTS:
        raise UnsupportedError(
            f"torchtitan's names for {model.architecture or 'this model'} are not known here",
            hint=f"known are {', '.join(PARTS)}",
        )
    arrays: dict[str, TensorFusion] = {}
    stacks: dict[str, dict[int, str]] = {}
    unknown = []
    kept = {tensor.name: tensor.optional for tensor in model.tensors.values()}
    kept |= dict.fromkeys(model.aliases, False)
    for name, optional in kept.items():
        if optional and there is not None and name not in there:
            continue
        plain = _strip_text_prefix(name)
        layer = _LAYER_PATTERN.fullmatch(plain)
        expert = _EXPERT_PATTERN.fullmatch(layer[2]) if layer is not None else None
        if layer is not None and expert is not None and expert[2] in EXPERTS:
            array = f"{_name_layer(model, layer[1])}.{ROUTED}.{EXPERTS[expert[2]]}"
            stacks.setdefault(array, {})[int(expert[1])] = name
        elif found := _find_names(model, plain):
            canonical = model.aliases.get(name, name)
            places = _divide_rows(model, model.tensors[canonical], found)
            for array, place in places.items():
                arrays[array] = TensorFusion(array, (canonical,) * len(place.shapes), place)
        elif not optional:
            unknown.append(name)
    if unknown:
        raise UnsupportedError(f"torchtitan has no array for {format_first_few(unknown)} of {model.architecture}")
    for array, members in stacks.items():
        names = tuple(members[number] for number in sorted(members))
        arrays[array] = TensorFusion(array, names, stack_tensors((model.tensors[names[0]].shape,), len(names)))
    return arrays


def join_parameters(model: Model, arrays: Mapping[str, TensorFusion]) -> dict[str, TensorFusion]:
    """Return the arrays of a model's parameters, whose optimizer states are saved: queries, keys and values are one.

    Of each group of heads it has the rows of queries, of the key and of the value, and then those of the next one.
    """
    joined: dict[str, TensorFusion] = {}
    for array, fusion in arrays.items():
        split = _SPLIT_QKV_PATTERN.fullmatch(array)
        if split is None:
            joined[array] = fusion
        elif split[2] == "q":
            names = [arrays[f"{split[1]}.w{part}.{split[3]}"].tensors[0] for part in "qkv"]
            shapes = tuple(model.tensors[name].shape for name in names)
            head = _count_head_rows(model.tensors[names[1]])
            own, places = (
                f"{split[1]}.wqkv.{split[3]}",
                _join_groups(shapes, head, paired=model.family == _INTERLEAVED_ROTARY_FAMILY),
            )
            whose = (
                names[index]
                for index, *_ in _list_group_parts(shapes, head, paired=model.family == _INTERLEAVED_ROTARY_FAMILY)
            )
            joined[own] = TensorFusion(own, tuple(whose), places)
    return joined


def list_joined_names(names: Iterable[str]) -> list[str]:
    """List the parameters that join several of some stored weights.

    >>> list_joined_names(f"layers.0.attention.qkv_linear.w{part}.weight" for part in "qkv")
    ['layers.0.attention.qkv_linear.wqkv.weight']
    """
    found = Counter(
        f"{split[1]}.wqkv.{split[3]}" for name in names if (split := _SPLIT_QKV_PATTERN.fullmatch(name)) is not None
    )
    return [name for name, count in found.items() if count == len("qkv")]


def list_balances(model: Model) -> dict[str, tuple[int, ...]]:
    """List the arrays that balance experts, with their shapes, for which transformers' class has no place."""
    if model.family not in BALANCED:
        return {}
    found = ((_LAYER_PATTERN.fullmatch(_strip_text_prefix(each.name)), each) for each in model.own())
    return {f"layers.{layer[1]}.{BALANCE}": each.shape[:1] for layer, each in found if layer and layer[2] in ROUTERS}


def bind_trainer_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` under the names of transformers, experts apart, if all names are torchtitan's; else as it is."""
    if model.family not in PARTS or EMBEDDING not in stored.tensors:
        return stored
    arrays, left = build_trainer_arrays(model), list_balances(model)
    weights = {name: tensor for name, tensor in stored.tensors.items() if name not in left}
    if not all(name in arrays and arrays[name].declared == tensor.shape for name, tensor in weights.items()):
        return stored
    left = {name: shape for name, shape in left.items() if name in stored.tensors}
    warnings = stored.warnings
    if left:
        which = f"{format_first_few(left)}, which torchtitan adds to the scores of experts to balance them"
        warnings += (f"left behind: {which}; {model.architecture} of transformers adds nothing",)
    found = replace(stored, tensors=weights, warnings=warnings)
    return bind_arrays(found, {**join_parameters(model, arrays), **arrays}, _NAMING_SCHEME_NOTE)


def leave_joined_states(stored: Manifest) -> Manifest:
    """Return `stored` without the states of parameters that join several weights, which only a model's sizes divide."""
    if stored.training is None:
        return stored
    joined = set(list_joined_names(stored.tensors))
    states = {n: each for n, each in stored.training.states.items() if (split_state_name(n) or ("",))[-1] not in joined}
    left = [name for name in stored.training.states if name not in states]
    if not left:
        return stored
    why = f"left behind: {format_first_few(left)}, which only the config of a model divides; give it with --config PATH"
    return replace(stored, training=replace(stored.training, states=states), warnings=(*stored.warnings, why))


def _strip_text_prefix(name: str) -> str:
    """Return the name of a tensor of a text model as if it was by itself; others as they are.

    >>> [_strip_text_prefix(f"{front}layers.0.mlp.up_proj.weight") for front in ("model.language_model.", "model.")]
    ['model.layers.0.mlp.up_proj.weight', 'model.layers.0.mlp.up_proj.weight']
    >>> [_strip_text_prefix(f"language_model.{name}.weight") for name in ("model.norm", "lm_head")]
    ['model.norm.weight', 'lm_head.weight']
    """
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def _name_layer(model: Model, number: str) -> str:
    """Return what the names of a layer begin with; those that predict further tokens are counted by themselves."""
    further = int(number) - model.layers
    return f"layers.{number}" if further < 0 else f"mtp_layers.{further}"


def _find_names(model: Model, name: str) -> tuple[str, ...]:
    """Find what torchtitan calls the arrays of a tensor; several if each has some of its rows, none if it has none."""
    for ours, theirs in ENDS.items():
        if name == f"{ours}weight":
            return (f"{theirs}weight",)
    for pattern, theirs in SEEN.items():
        if (seen := re.fullmatch(pattern, name)) is not None:
            array = seen.expand(theirs)
            return tuple(array.replace("*", part) for part in "qkv") if "*" in array else (array,)
    layer = _LAYER_PATTERN.fullmatch(name)
    if layer is None:
        return ()
    module, _, kind = layer[2].rpartition(".")
    part = PARTS[model.family].get(module) if kind == "weight" or model.family != _INTERLEAVED_ROTARY_FAMILY else None
    own = f"{part}.{kind}" if part is not None and kind in _PARAMETER_NAMES else PLAIN.get(layer[2])
    found = DIVIDED.get(layer[2], (own,) if own is not None else ())
    return tuple(f"{_name_layer(model, layer[1])}.{each}" for each in found)


def _divide_rows(model: Model, tensor: ModelTensor, arrays: tuple[str, ...]) -> dict[str, FusionPlaces]:
    """Return where a tensor is in each of some arrays: all of it in the one, or in each the rows of one section."""
    shape, array = tensor.shape, arrays[0]
    if len(arrays) == 1:
        split = _SPLIT_QKV_PATTERN.fullmatch(array)
        if array.endswith(TURNED):
            return {array: transpose_tensor(shape)}
        if model.family == _INTERLEAVED_ROTARY_FAMILY and split is not None and split[2] != "v":
            return {array: pair_rows(shape, _count_head_rows(tensor))}
        return {array: merge_last_dims(shape) if array == PATCHES else join_tensors((shape,))}
    sizes = [section.size for cut in tensor.spec.cuts[0] for section in cut.sections]
    sizes = sizes if len(sizes) == len(arrays) else [shape[0] // len(arrays)] * len(arrays)
    ends = list(accumulate(sizes))
    places = (cut_rows(shape, end - size, end) for end, size in zip(ends, sizes, strict=True))
    return dict(zip(arrays, places, strict=True))


def _count_head_rows(tensor: ModelTensor) -> int:
    return tensor.spec.cuts[0][0].sections[0].unit


@cache
def pair_rows(shape: tuple[int, ...], head: int) -> FusionPlaces:
    """Return queries or keys of heads of so many rows, whose halves take turns in the array."""
    return _place_parts((shape,), _list_row_parts(0, 0, shape[0], 0, head, paired=True))


@cache
def _join_groups(shapes: tuple[tuple[int, ...], ...], head: int, *, paired: bool) -> FusionPlaces:
    """Return the rows of queries, of a key and of a value of each group of heads; `paired` as in `pair_rows`."""
    return _place_parts(shapes, _list_group_parts(shapes, head, paired=paired))


_Part = tuple[int, int, int, int, int]
"""Which of some tensors, its first row, their number, and the first row and the step of the array."""


def _list_group_parts(shapes: tuple[tuple[int, ...], ...], head: int, *, paired: bool) -> Iterator[_Part]:
    groups = shapes[1][0] // head
    at = 0
    for group in range(groups):
        for index, shape in enumerate(shapes):
            rows = shape[0] // groups
            yield from _list_row_parts(index, group * rows, rows, at, head, paired=paired and index < len("qk"))
            at += rows


def _list_row_parts(index: int, first: int, rows: int, at: int, head: int, *, paired: bool) -> Iterator[_Part]:
    if not paired:
        yield index, first, rows, at, 1
        return
    half = head // 2
    for start in range(0, rows, head):
        for odd in range(2):
            yield index, first + start + odd * half, half, at + start + odd, 2


def _place_parts(shapes: tuple[tuple[int, ...], ...], parts: Iterable[_Part]) -> FusionPlaces:
    views, owners, boxes = [], [], []
    for index, first, rows, at, step in parts:
        shape = shapes[index]
        rest = shape[1:]
        boxes.append(Box((first, *(0,) * len(rest)), (rows, *rest)))
        axes = tuple(range(len(shape)))
        views.append(ArrayView((at, *(0,) * len(rest)), axes, (step, *(1,) * len(rest))))
        owners.append(shape)
    return FusionPlaces.of(views, owners, boxes)
