"""Decides in which arrays tensors are written: each in its own, or the experts of a layer in one."""

from __future__ import annotations

from dataclasses import field, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.base.value import value_class
from shardctl.tensors.record import RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from shardctl.base.dtype import DType
    from shardctl.models.tables.fusion import TensorFusion
    from shardctl.tensors.manifest import Manifest, Tensor

INPUTS_FIRST_EXPERTS: Final = "fused@0.18"
"""The form of an adapter's experts in PEFT 0.18, which has the two matrices of an array the other way round."""
EXPERTS: Final = ("keep", "fused", INPUTS_FIRST_EXPERTS, "split")
"""The forms of experts: as the source had them, as transformers 5 holds them, each with names of its own."""
_NAME_TAIL_LENGTH: Final = 3
"""Words of a name that tell an array that only files have from those of the class."""


@value_class
class FusedPlace:
    """Where in an array that holds several tensors, or parts of some, one of them is."""

    array: str
    """The array's name."""
    fusion: TensorFusion
    position: int
    """The part's, among those of the fusion."""


@value_class
class ArrayForm:
    """The arrays of a checkpoint yet to be written."""

    names: Mapping[str, tuple[str, ...]]
    """By tensor: the arrays of its own, several for a tie; none for one that is not written."""
    places: Mapping[str, tuple[FusedPlace, ...]]
    """By tensor: its places in arrays that it shares or into which it is divided; then its names do not count."""
    trainer: str = ""
    """Whose run resumes from a saved state, as `--names` has it; empty for what torch's `get_state_dict` gives."""
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By tensor: the arrays that its optimizer knows, where these are not those of the weights."""
    zeros: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Arrays of F32 zeros that a run asks for though the model has none of them, with their shapes."""

    def arrays(self, name: str) -> tuple[str, ...]:
        """Return the arrays that hold parts of a tensor, or of a tie the first; one filtered out keeps its own name."""
        places = self.places.get(name)
        return tuple(dict.fromkeys(place.array for place in places)) if places else self.names.get(name, (name,))[:1]

    def list_arrays(self, tensors: Iterable[str]) -> list[str]:
        """List the arrays that hold some tensors, as an optimizer knows them, each once."""
        found = (self.parameters.get(name) or self.arrays(name) for name in tensors)
        return list(dict.fromkeys(chain.from_iterable(found)))


def choose_form(
    have: Manifest, fusions: Mapping[str, TensorFusion], dtypes: Mapping[str, DType], *, experts: str, spelled: bool
) -> ArrayForm:
    """Choose the form that `experts` asks for.

    `spelled` keeps the source's own names, and its form; else both are those of the state dict of transformers' class.
    An array some of whose tensors were filtered out is not written: those that are left have names of their own.
    Raises UnsupportedError if the tensors of an array have several types.
    """
    names = {
        name: (spelled and tensor.spelling) or ((name, *tensor.ties) if tensor.ties else (name,))
        for name, tensor in have.tensors.items()
    }
    places: dict[str, tuple[FusedPlace, ...]] = {}
    put_prefix = _find_prefix(have) if spelled else str
    for fusion in fusions.values():
        found = [have.tensors[name] for name in fusion.tensors if name in have.tensors]
        if not found or (fusion.stored and not spelled):
            continue
        stored = _find_stored_name(fusion, found)
        wanted = put_prefix(fusion.name) if (experts == "fused" or not spelled) and not fusion.stored else stored
        if experts == "split" or len(found) < len(fusion.tensors) or wanted is None:
            if stored is not None or experts == "split":
                names |= {tensor.name: tuple(map(put_prefix, (tensor.name, *tensor.ties))) for tensor in found}
        elif fusion.renames:
            names[found[0].name] = (wanted,)
        elif not any(place.array == wanted for place in places.get(fusion.tensors[0], ())):
            _check_types(wanted, found, dtypes)  # what files and the class have in the same form is one array
            _add_places(places, wanted, fusion)
    _check_distinct(names, places)
    return ArrayForm(names, places)


def choose_trainer_form(
    have: Manifest, arrays: Mapping[str, TensorFusion], dtypes: Mapping[str, DType], trainer: str
) -> ArrayForm:
    """Choose the arrays that a trainer has of a model, of which every tensor must be there.

    Raises UnsupportedError for an array that would lack tensors or would hold several types.
    """
    names: dict[str, tuple[str, ...]] = {}
    places: dict[str, tuple[FusedPlace, ...]] = {}
    for fusion in arrays.values():
        found = [have.tensors[name] for name in fusion.tensors if name in have.tensors]
        if len(found) < len(fusion.tensors):
            lacking = next(name for name in fusion.tensors if name not in have.tensors)
            raise UnsupportedError(f"{fusion.name} cannot be written without {lacking}", hint="leave --exclude out")
        if fusion.renames:
            names[found[0].name] = (*names.get(found[0].name, ()), fusion.name)
        else:
            _check_types(fusion.name, found, dtypes)
            _add_places(places, fusion.name, fusion)
    extra = [name for name in have.tensors if name not in names and name not in places]
    if extra:
        raise UnsupportedError(f"there is no array for {format_first_few(extra)}", hint="leave it out with --exclude")
    return ArrayForm(names, places, trainer)


def choose_hub_form(
    have: Manifest, arrays: Iterable[TensorFusion], unsaved: Collection[str], dtypes: Mapping[str, DType]
) -> ArrayForm:
    """Choose the arrays that are saved for the Hub; `unsaved` tensors have none.

    Tensors of an array that lacks some have names of their own.
    Raises UnsupportedError for an array that would hold several types.
    """
    names = dict[str, tuple[str, ...]]()
    places: dict[str, tuple[FusedPlace, ...]] = {}
    for array in arrays:
        found = [have.tensors[name] for name in array.tensors if name in have.tensors]
        if len(found) < len(array.tensors):
            continue
        if array.renames:
            names[found[0].name] = (array.name,)
        else:
            _check_types(array.name, found, dtypes)
            _add_places(places, array.name, array)
    names = {name: () if name in unsaved else (name,) for name in have.tensors} | names
    _check_distinct(names, places)
    return ArrayForm(names, places)


def join_trainer_forms(form: ArrayForm, trained: ArrayForm, zeros: Mapping[str, tuple[int, ...]]) -> ArrayForm:
    """Return the form of weights with that of the states that a trainer keeps of other arrays, and with `zeros`."""
    own = {*form.names, *form.places}
    return replace(
        form,
        names={**form.names, **{name: arrays for name, arrays in trained.names.items() if name not in own}},
        places={**form.places, **{name: places for name, places in trained.places.items() if name not in own}},
        parameters={name: trained.arrays(name) for name in own},
        zeros=zeros,
    )


def add_state_places(form: ArrayForm, states: Mapping[str, TensorFusion], dtypes: Mapping[str, DType]) -> ArrayForm:
    """Add the arrays that hold optimizer states of several parameters, as their own array holds those.

    Raises UnsupportedError if only some parameters of an array have a state, or if it would hold several types.
    """
    places = dict(form.places)
    for fusion in states.values():
        if fusion.renames:
            continue
        lacking = next((name for name in fusion.tensors if name not in dtypes), None)
        if lacking is not None:
            raise UnsupportedError(
                f"{fusion.name} cannot be written without {lacking}", hint="add --optimizer-states drop"
            )
        first = dtypes[fusion.tensors[0]]
        other = next((name for name in fusion.tensors if dtypes[name] != first), None)
        if other is not None:
            raise UnsupportedError(f"{fusion.name} would hold {first} and {dtypes[other]}, as of {other}")
        _add_places(places, fusion.name, fusion)
    return replace(form, places=places)


def _add_places(places: dict[str, tuple[FusedPlace, ...]], array: str, fusion: TensorFusion) -> None:
    """Add where in an array each part of its tensors is."""
    for position, name in enumerate(fusion.tensors):
        places[name] = (*places.get(name, ()), FusedPlace(array, fusion, position))


def _find_prefix(have: Manifest) -> Callable[[str], str]:
    """Find which word the source's names begin with where ours begin with another (Nemotron-H's `backbone`).

    Returns what puts it before a name. Names stay as they are unless all that begin with the one agree.
    """
    pairs = {
        (ours, theirs)
        for tensor in have.tensors.values()
        for (ours, _, rest), (theirs, _, same) in zip(
            (name.partition(".") for name in (tensor.name, *tensor.ties)),
            (name.partition(".") for name in tensor.spelling or ()),
            strict=False,
        )
        if rest == same and rest
    }
    words = dict(pairs)
    if len(words) < len(pairs):
        return str
    return lambda name: f"{words.get(name.partition('.')[0], name.partition('.')[0])}.{name.partition('.')[2]}"


def _check_distinct(names: Mapping[str, tuple[str, ...]], places: Mapping[str, tuple[FusedPlace, ...]]) -> None:
    """Raise SourceError if two arrays would have one name, as a record says whose spellings are another tensor's."""
    if not places and len(set(chain.from_iterable(names.values()))) == sum(map(len, names.values())):
        return  # nearly always
    owners = {place.array: name for name, some in places.items() for place in some}
    for name, arrays in names.items():
        for array in arrays if name not in places else ():
            other = owners.setdefault(array, name)
            if other != name or arrays.count(array) > 1:
                raise SourceError(
                    f"{name} and {other} would both be written as {array}",
                    hint=f"{RECORD} or the source's own names say so; remove {RECORD} if it is not right",
                )


def _find_stored_name(fusion: TensorFusion, tensors: list[Tensor]) -> str | None:
    """Find the name of the one array in which the original checkpoint had them, or None if it had several.

    An array that differs from its one tensor by being transposed has the same name: a tensor that was stored so has its
    own name as a spelling.
    """
    if fusion.tensors == (fusion.name,):
        return fusion.name if tensors[0].spelling == fusion.tensors else None
    spellings = {tensor.spelling for tensor in tensors}
    if len(spellings) > 1 or len(spelling := spellings.pop()) != 1:
        return None
    (name,) = spelling
    stack_of_one = len(tensors) == 1 and fusion.shape != tensors[0].shape
    if fusion.stored:  # under a prefix that the class has, the names end alike
        return name if name.split(".")[-_NAME_TAIL_LENGTH:] == fusion.name.split(".")[-_NAME_TAIL_LENGTH:] else None
    return None if stack_of_one and not f".{fusion.name}".endswith(f".{name}") else name


def _check_types(name: str, tensors: list[Tensor], dtypes: Mapping[str, DType]) -> None:
    kinds = {dtypes[tensor.name]: tensor.name for tensor in tensors}
    if len(kinds) > 1:
        (one, first), (two, second), *_ = kinds.items()
        raise UnsupportedError(
            f"{name} cannot hold both {first}, which is {one}, and {second}, which is {two}",
            hint="use --experts split",
        )
