"""Lets ranks work together: in turn in this process, or each in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardctl.errors import CoverageError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardctl.mesh import Mesh

Torch = Any
_TOLD = (CoverageError, UnsupportedError)
"""What one rank finds wrong and all others are told, so that nobody waits for what never comes."""


class RankTeam:
    """Ranks that are all in this process: each does its part in turn."""

    def each(self, count: int, compute: Callable[[int], Torch]) -> list[Torch]:
        """Return what every rank along tp computes, by its index."""
        return [compute(index) for index in range(count)]

    def held(self, rank: int, read: Callable[[], Torch], index: int | None) -> Torch:  # noqa: ARG002 - ranks are here
        """Return what `rank` reads from its own files, for those with the tp index `index` or for all."""
        return read()

    def lead(self, compute: Callable[[], Torch]) -> Torch:
        """Return what only the first process computes, for all."""
        return compute()


@dataclass(slots=True)
class ProcessTeam(RankTeam):
    """Ranks of which this process is one; every process does the same steps in the same order.

    Tensors of devices are sent through the memory of the host, bit for bit. Nobody reads another's files: what a rank
    holds is sent by that rank. Each computes with its own part, and the ranks along tp then exchange what they have.
    """

    rank: int
    mesh: Mesh
    device: str
    beat: Callable[[], None]
    """Tells who watches that work goes on."""
    _groups: dict[tuple[int, ...], Torch] = field(default_factory=dict)
    _beside: list[int] = field(default_factory=list)
    """The ranks along tp that share this one's other coordinates, by their tp index."""
    _alike: list[list[int]] = field(default_factory=list)
    """The ranks with each tp index."""

    def __post_init__(self) -> None:
        import torch.distributed as dist

        places = [dict(self.mesh.coordinate(rank)) for rank in range(self.mesh.world)]
        along = range(self.mesh.degree("tp"))
        self._alike = [[rank for rank, at in enumerate(places) if at["tp"] == index] for index in along]
        teams: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(places):
            teams.setdefault(tuple(at[name] for name, _ in self.mesh.axes if name != "tp"), []).append(rank)
        for ranks in [*self._alike, *teams.values(), list(range(self.mesh.world))]:
            if tuple(ranks) not in self._groups:  # every process makes every group, in the same order
                self._groups[tuple(ranks)] = dist.new_group(ranks)
        (self._beside,) = [ranks for ranks in teams.values() if self.rank in ranks]

    def each(self, count: int, compute: Callable[[int], Torch]) -> list[Torch]:
        """Return what every rank along tp computes, by its index.

        A weight that tp does not cut is everyone's own business.
        """
        if count == 1:
            return [compute(0)]
        mine = self._beside.index(self.rank)
        found = _attempt_compute(lambda: compute(mine))
        return [self._share(owner, self._beside, found) for owner in self._beside]

    def held(self, rank: int, read: Callable[[], Torch], index: int | None) -> Torch:
        """Return what `rank` reads from its own files, for those with the tp index `index` or for all."""
        ranks = list(range(self.mesh.world)) if index is None else self._alike[index]
        return self._share(rank, ranks, _attempt_compute(read) if rank == self.rank else None)

    def lead(self, compute: Callable[[], Torch]) -> Torch:
        """Return what only the first process computes, for all."""
        return self._share(0, list(range(self.mesh.world)), _attempt_compute(compute) if self.rank == 0 else None)

    def _share(self, owner: int, ranks: Sequence[int], mine: object) -> Torch:
        """Give `mine` of the owner to all of `ranks`; raise what the owner raised."""
        import torch
        import torch.distributed as dist

        self.beat()
        group, tensors = self._groups[tuple(ranks)], list[Torch]()
        told = [_pack_tensors(mine, tensors) if owner == self.rank else None]
        dist.broadcast_object_list(told, owner, group, torch.device("cpu"))
        form = told[0]
        if isinstance(form, BaseException):
            raise form
        forms = _list_tensor_forms(form)
        own = owner == self.rank
        sent = [tensor.cpu() for tensor in tensors] if own else [_allocate_tensor(each) for each in forms]
        for tensor in sent:
            if tensor.numel():
                dist.broadcast(tensor.reshape(-1).view(torch.uint8), owner, group)
        if not own:
            tensors = [
                tensor if each.where == "cpu" else tensor.to(self.device)
                for each, tensor in zip(forms, sent, strict=True)
            ]
        return _unpack_tensors(form, iter(tensors))


@dataclass(frozen=True, slots=True)
class _TensorForm:
    """Where in an output a tensor stands."""

    shape: tuple[int, ...]
    kind: Torch
    where: str


@dataclass(frozen=True, slots=True)
class _DictForm:
    """A dictionary, or one of the outputs of transformers, which are like them."""

    kind: Callable[..., Torch]
    entries: dict[str, object]


def _attempt_compute(compute: Callable[[], Torch]) -> object:
    try:
        return compute()
    except _TOLD as error:
        return error


def _pack_tensors(value: Torch, tensors: list[Torch]) -> object:
    """Return the form of a value, its tensors put into a list in order."""
    import torch

    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().contiguous())
        return _TensorForm(tuple(value.shape), value.dtype, value.device.type)
    if type(value) in {tuple, list}:
        return type(value)(_pack_tensors(each, tensors) for each in value)
    if isinstance(value, dict):
        return _DictForm(type(value), {key: _pack_tensors(each, tensors) for key, each in value.items()})
    return value


def _allocate_tensor(form: _TensorForm) -> Torch:
    import torch

    return torch.empty(form.shape, dtype=form.kind)


def _list_tensor_forms(form: object) -> list[_TensorForm]:
    if isinstance(form, _TensorForm):
        return [form]
    each = form.entries.values() if isinstance(form, _DictForm) else form if isinstance(form, tuple | list) else ()
    return [found for part in each for found in _list_tensor_forms(part)]


def _unpack_tensors(form: object, tensors: Any) -> Torch:  # noqa: ANN401 - an iterator of tensors
    if isinstance(form, _TensorForm):
        return next(tensors)
    if isinstance(form, tuple | list):
        return type(form)(_unpack_tensors(each, tensors) for each in form)
    if isinstance(form, _DictForm):
        return form.kind(**{key: _unpack_tensors(each, tensors) for key, each in form.entries.items()})
    return form
