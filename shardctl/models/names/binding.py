"""Finds the global tensor that each stored name means: handles prefixes, older spellings and ties."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import MissingTensorsError, SourceError, UnsupportedError, format_first_few
from shardctl.models.tables.name_pattern import list_name_patterns
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from shardctl.models.tables.model import Model, ModelTensor
    from shardctl.tensors.manifest import Manifest

_LINEAR_PARAMETER_NAMES: Final = frozenset({"weight", "bias"})
_MAXTEXT_NAME_PREFIXES: Final = ("params.params.decoder.", "params.params.token_embedder.")
"""How names of MaxText's arrays begin (`TrainState` of flax, whose parameters are a tree `params`)."""
_UNGATHERED_SHAPE: Final = (0,)
"""The shape of a parameter whose elements only other ranks' partitions hold."""
_PARAMETER_NAMES: Final = frozenset({"weight", "bias"})
"""What the names of parameters end with; buffers may be empty on purpose (GPTQ's `g_idx`)."""
UNGATHERED_HINT: Final = (
    "ZeRO-3 and FSDP leave such tensors where a model is saved without gathering its parameters: convert the "
    "checkpoint that the engine itself saved, or save again with stage3_gather_16bit_weights_on_model_save or "
    "FULL_STATE_DICT"
)


def bind_names(model: Model, stored: Manifest, *, partial: bool = False) -> Manifest:
    """Return `stored` under the canonical names of `model`, in its order; see `Model.bind`."""
    stored = _divide_even_parts(model, stored)
    plain = _select_plain(model, stored.tensors)
    found: dict[str, dict[str, Tensor]] = {}
    unknown: list[str] = []
    for name, tensor in stored.tensors.items() if len(plain) < len(stored.tensors) else ():
        if name in plain:
            continue
        meant = find_canonical_name(model, name)
        if meant is None:
            unknown.append(name)
            continue
        for part, held in _split_stored_array(model, meant, tensor):
            first = model.aliases.get(part, part)
            names = found.setdefault(first, {first: plain[first]} if first in plain else {})
            if part in names:
                raise SourceError(
                    f"{names[part].name} and {name} are both {part}",
                    hint="one of the two is left over from another model; remove it",
                )
            names[part] = held
    if unknown:
        raise UnsupportedError(
            f"{model.architecture or 'the model'} has no {_choose_noun(unknown)} {format_first_few(unknown)}",
            hint=_hint_at_unknown(model, unknown),
        )
    missing = [] if partial else list_missing_warnings(model, plain.keys() | found.keys(), stored.tensors)
    warnings = (*stored.warnings, *model.warnings, *missing)
    tensors: dict[str, Tensor] = {}
    for name, t in model.tensors.items():
        own = plain.get(name)
        if name in found:
            tensors[name] = _merge_tensor_parts(t, found[name])
        elif own is not None:
            odd = t.ties or own.ties or own.spelling or own.shape != t.shape
            tensors[name] = _merge_tensor_parts(t, {name: own}) if odd else own
    return replace(stored, tensors=tensors, warnings=warnings)


def _select_plain(model: Model, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Select the tensors that the model has by the names under which they are stored: nearly always all."""
    if tensors.keys() <= model.tensors.keys() and tensors.keys().isdisjoint(model.fusions):
        return tensors
    return {n: t for n, t in tensors.items() if n in model.tensors and n not in model.fusions}


def find_canonical_name(model: Model, name: str) -> str | None:
    """Find the name by which the model knows what is stored as `name`, or None if it does not.

    The name itself wins; then it with the base model's prefix, or with that in place of another class's, and then what
    is meant if it is an older spelling. A class without a base model inside has such names without any prefix. One
    prefix too many is unknown: transformers 4 finds nothing under such names. For a tied weight this may be any of its
    names, and the array of a fusion has none but its own.
    """
    if name in model.tensors:
        return name
    for reading in _list_readings(model, name):
        if reading in model.tensors or reading in model.aliases or reading in model.fusions:
            return reading
    return None


def list_held_names(model: Model, meant: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """List the canonical names of the tensors that an array of some shape, known as `meant`, is or holds."""
    fusion = model.fusions.get(meant)
    if fusion is None or (meant in model.tensors and shape != fusion.shape):
        return (model.aliases.get(meant, meant),)
    return fusion.tensors


def has_expected_shape(model: Model, meant: str, shape: tuple[int, ...]) -> bool:
    """Return whether an array known as `meant` has the shape that the config gives it."""
    fusion, tensor = model.fusions.get(meant), model.tensors.get(model.aliases.get(meant, meant))
    return (fusion is not None and shape == fusion.shape) or (tensor is not None and _fits_tensor(tensor, shape))


def find_weight_name(model: Model | None, name: str) -> str:
    """Find the canonical name of a tensor that transformers' class calls `name`: the first of a tie, or `name`."""
    meant = find_canonical_name(model, name) if model is not None else None
    return model.aliases.get(meant, meant) if model is not None and meant is not None else name


def list_older_names(model: Model, name: str) -> tuple[str, ...]:
    """List what `name`, without the base model's prefix, was called by older versions of the class."""
    dotted = f".{name}."
    found = []
    for old, new in model.legacy.items():
        run = f".{new}."
        if dotted.startswith(run) if old.startswith("^") else run in dotted:
            found.append(dotted.replace(run, f".{old.removeprefix('^')}.", 1)[1:-1])
    return tuple(found)


def _split_stored_array(model: Model, meant: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor that is stored in an array meant as `meant`, by the name it is meant as."""
    fusion = model.fusions.get(meant)
    if fusion is None or (meant in model.tensors and tensor.shape != fusion.shape):
        yield meant, tensor
        return
    if tensor.shape != fusion.shape:
        raise _build_shape_error(tensor, fusion.shape)
    for part, held in fusion.taken_apart(tensor):
        yield part, replace(held, spelling=(part,)) if part == tensor.name else held


def list_ungathered_weights(tensors: Mapping[str, Tensor]) -> list[str]:
    """List the weights that were saved without their elements; all tensors, if none of them has an element."""
    empty = [name for name, tensor in tensors.items() if tensor.shape == _UNGATHERED_SHAPE]
    if len(empty) == len(tensors):
        return empty
    return [name for name in empty if name.rpartition(".")[2] in _PARAMETER_NAMES]


def is_maxtext(names: Iterable[str]) -> bool:
    """Return whether arrays of MaxText are among those that have these names."""
    return any(name.startswith(_MAXTEXT_NAME_PREFIXES) for name in names)


def _hint_at_unknown(model: Model, unknown: Sequence[str]) -> str:
    if is_maxtext(unknown):
        return (
            "the arrays are MaxText's, of which those of Qwen2, Qwen3, Qwen3-Next, OLMo 3, gpt-oss and DeepSeek need "
            "the config alone: say what they are in [names] of --rules FILE, or convert them with its "
            "python -m maxtext.checkpoint_conversion.to_huggingface"
        )
    kinds = {_erase_numbers(name) for name in model.tensors}
    if all(_has_kind(model, kinds, name) for name in unknown):
        return "config.json counts fewer layers or experts than there are; reshard --exclude leaves tensors out"
    return "say how such tensors are cut with --rules FILE"


def list_contradictions(model: Model, unknown: Iterable[str]) -> Iterator[str]:
    """List those unknown names that are tensors of the class in other configs, so that this one may be wrong.

    They are of a further layer or expert, or the bias of a module that the class has.
    """
    kinds: set[str] = set()
    for name in unknown:
        module, _, own = name.rpartition(".")
        kinds = kinds or {_erase_numbers(known.name) for known in model.own()}
        beside = (
            [f"{module}.{other}" for other in _LINEAR_PARAMETER_NAMES - {own}] if own in _LINEAR_PARAMETER_NAMES else []
        )
        if _has_kind(model, kinds, name) or any(find_canonical_name(model, other) for other in beside):
            yield name


def _has_kind(model: Model, kinds: Collection[str], name: str) -> bool:
    """Return whether a name is that of a tensor of the class but for the numbers in it."""
    return any(_erase_numbers(reading) in kinds for reading in _list_readings(model, name))


def _erase_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)


def _divide_even_parts(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` with the tensors of an array as long as they are, where they were saved as its even parts.

    transformers 5.23 saves OLMo-Hybrid's three convolutions, which it holds in one array, as thirds of it, however long
    they were; it reads either by joining them again.
    """
    tensors = dict(stored.tensors)
    found: list[str] = []
    for fusion in model.fusions.values():
        first = model.tensors.get(fusion.tensors[0])
        if first is None or len(fusion.tensors) == 1 or len(first.shape) != len(fusion.shape):
            continue
        parts = [t for name in fusion.tensors if (t := stored.tensors.get(name)) is not None]
        if len(parts) < len(fusion.tensors) or all(t.shape == model.tensors[t.name].shape for t in parts):
            continue
        share = -(-fusion.shape[0] // len(parts))
        starts = range(0, fusion.shape[0], share)
        if [t.shape for t in parts] != [(min(share, fusion.shape[0] - n), *fusion.shape[1:]) for n in starts]:
            continue
        chunks = tuple(
            replace(chunk, box=Box((chunk.box.origin[0] + start, *chunk.box.origin[1:]), chunk.box.shape))
            for start, part in zip(starts, parts, strict=True)
            for chunk in part.chunks
        )
        array = replace(parts[0], name=fusion.name, shape=fusion.shape, chunks=chunks)
        tensors |= {name: replace(held, name=name) for name, held in fusion.taken_apart(array)}
        found += fusion.tensors
    if not found:
        return stored
    line = f"read as one array that was saved in even parts: {format_first_few(list_name_patterns(found))}"
    return replace(stored, tensors=tensors, warnings=(*stored.warnings, line))


def _choose_noun(names: Sequence[str]) -> str:
    return "tensor" if len(names) == 1 else "tensors"


def _list_readings(model: Model, name: str) -> Iterator[str]:
    yield name
    inner = [name.removeprefix(f"{p}.") for p in model.prefixes if name.startswith(f"{p}.")]
    for whole, parts in (
        (name, inner),
        (_modernise_name(model.legacy, name), [_modernise_name(model.legacy, each) for each in inner]),
    ):
        yield whole
        if model.prefix:
            yield f"{model.prefix}.{whole}"
            yield from (f"{model.prefix}.{part}" for part in parts)
        else:
            yield from parts


def _modernise_name(legacy: Mapping[str, str], name: str) -> str:
    """Return the name with each older run of parts, at its first place, replaced by the present one.

    >>> _modernise_name({"layer": "layers", "^head": "lm_head"}, "head.layer.0.layer_norm")
    'lm_head.layers.0.layer_norm'
    """
    dotted = f".{name}."
    for old, new in legacy.items():
        start, run = old.startswith("^"), f".{old.removeprefix('^')}."
        if dotted.startswith(run) if start else run in dotted:
            dotted = dotted.replace(run, f".{new}.", 1)
    return dotted[1:-1]


def list_missing_warnings(model: Model, found: Collection[str], stored: Collection[str] = ()) -> list[str]:
    """List warnings about parts that may be missing; raises SourceError for a tensor that may not.

    A base model, which the names in the files (`stored`) tell, may lack all tensors of the head.
    """
    missing = [t for t in model.own() if t.name not in found]
    required = [t.name for t in missing if not t.spare]
    spare = [t.name for t in missing if t.spare]
    if spare and any(t.spare and t.name in found for t in model.own()):
        required += spare
    heads = list_head_names(model)
    if heads and set(required) == heads and not any(name.startswith(f"{model.prefix}.") for name in stored or found):
        new = format_first_few(required)
        return [f"the names are those of a base model: a loader makes {new} of {model.architecture} anew"]
    if required:
        hint = "a shard may be missing, or config.json may belong to another model"
        if len(required) == 1 and model.tensors[required[0]].row.tie:
            hint = (
                "a shard may be missing; or the embedding is also the head, and tie_word_embeddings should be true: "
                "give a config that says so with --config PATH"
            )
        if heads and set(required) == heads:
            hint += "; or architectures should name the base model's class"
        raise MissingTensorsError(
            f"the checkpoint lacks {len(required)} {_choose_noun(required)} of {model.architecture}: "
            f"{format_first_few(required)}",
            hint=hint,
        )
    return [f"the checkpoint has no {format_first_few(spare)}; {model.architecture} starts without it"] if spare else []


def list_head_names(model: Model) -> set[str]:
    """List the tensors that the class must have and its base model does not; none for a base model's class."""
    if not model.prefix:
        return set()
    return {t.name for t in model.own() if not t.spare and not t.name.startswith(f"{model.prefix}.")}


def _merge_tensor_parts(expected: ModelTensor, stored: Mapping[str, Tensor]) -> Tensor:
    """Return one global tensor from all that is stored of it, by the name each was meant as."""
    names = (expected.name, *expected.ties)
    order = {name: place for place, name in enumerate(names)}
    parts = [stored[name] for name in sorted(stored, key=lambda name: order.get(name, len(order)))]
    first = parts[0]
    for part in parts:
        _check_shape(expected, part)
        if part.dtype != first.dtype:
            raise SourceError(f"{part.name} is {part.dtype} but {first.name}, its tie, is {first.dtype}")
    spelling = tuple(part.name for part in parts)
    transposed = any(part.spelling == names for part in parts)
    return Tensor(
        name=expected.name,
        dtype=first.dtype,
        shape=first.shape,
        chunks=tuple(chunk for part in parts for chunk in part.chunks),
        ties=expected.ties,
        spelling=() if spelling == names and not transposed else spelling,
    )


def _check_shape(expected: ModelTensor, stored: Tensor) -> None:
    if not _fits_tensor(expected, stored.shape):
        raise _build_shape_error(stored, expected.shape)


def _fits_tensor(expected: ModelTensor, shape: tuple[int, ...]) -> bool:
    """Return whether a shape is the tensor's, but for dims that the config does not determine."""
    if shape == expected.shape:
        return True
    return len(shape) == len(expected.shape) and all(
        a == b or dim in expected.free for dim, (a, b) in enumerate(zip(shape, expected.shape, strict=True))
    )


def _build_shape_error(stored: Tensor, expected: Sequence[int]) -> SourceError:
    return SourceError(
        f"{stored.name} has shape {list(stored.shape)}, but config.json gives it {list(expected)}",
        hint="config.json may belong to another model" if stored.shape != _UNGATHERED_SHAPE else UNGATHERED_HINT,
    )
