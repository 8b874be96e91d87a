"""Lets ranks work together: in turn in this process, or each in a process of its own."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from shardctl.base.errors import CoverageError, UnsupportedError
from shardctl.base.value import state_class, value_class
from shardctl.running.forward.places import list_alike_ranks, list_places
from shardctl.running.forward.rendezvous import ProcessMeeting, RankMeeting

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.tensors.mesh import Mesh

Torch = Any
_BROADCAST_ERROR_TYPES = (CoverageError, UnsupportedError)
"""What one rank finds wrong and all others are told, so that nobody waits for what never comes."""


class RankTeam:
    """Ranks that are all in this process: each does its part in turn."""

    def open_meeting(self, count: int) -> RankMeeting:
        """Return where `count` ranks that compute together meet."""
        return RankMeeting(count)

    def held(self, rank: int, read: Callable[[], Torch], ranks: tuple[int, ...] | None) -> Torch:  # noqa: ARG002 - ranks are here
        """Return what `rank` reads from its own files, for `ranks` or for all."""
        return read()

    def broadcast_from_first(self, compute: Callable[[], Torch]) -> Torch:
        """Return what only the first process computes, for all."""
        return compute()

    def collect(self, mine: Torch) -> list[Torch]:
        """Return what every process has."""
        return [mine]


@state_class
class ProcessTeam(RankTeam):
    """Ranks of which this process is one; every process does the same steps in the same order.

    Tensors of devices are sent through the memory of the host, bit for bit. Nobody reads another's files: what a rank
    holds is sent by that rank. Each computes with its own part, and ranks that compute together exchange results.
    """

    rank: int
    mesh: Mesh
    device: str
    beat: Callable[[], None]
    """Tells who watches that work goes on."""
    _groups: dict[tuple[int, ...], Torch] = field(default_factory=dict)
    _beside: tuple[int, ...] = ()
    """One rank of each place, this one among them, which compute together."""

    def __post_init__(self) -> None:
        import torch.distributed as dist

        together = list(zip(*list_places(self.mesh).values(), strict=True))
        (self._beside,) = [ranks for ranks in together if self.rank in ranks]
        at = [self.mesh.coordinate(rank) for rank in range(self.mesh.world)]
        alike = [list_alike_ranks(self.mesh, each, expert=expert) for each in at for expert in (False, True)]
        for ranks in [*together, *alike, self._list_ranks()]:
            if ranks not in self._groups:  # every process makes every group, in the same order
                self._groups[ranks] = dist.new_group(list(ranks))

    def open_meeting(self, count: int) -> RankMeeting:
        """Return where `count` ranks that compute together meet."""
        return ProcessMeeting(count, self._beside.index(self.rank), self._exchange)

    def held(self, rank: int, read: Callable[[], Torch], ranks: tuple[int, ...] | None) -> Torch:
        """Return what `rank` reads from its own files, for `ranks` or for all."""
        mine = _attempt_compute(read) if rank == self.rank else None
        return self._share(rank, self._list_ranks() if ranks is None else ranks, mine)

    def broadcast_from_first(self, compute: Callable[[], Torch]) -> Torch:
        """Return what only the first process computes, for all."""
        return self._share(0, self._list_ranks(), _attempt_compute(compute) if self.rank == 0 else None)

    def collect(self, mine: Torch) -> list[Torch]:
        """Return what every process has."""
        return [self._share(owner, self._list_ranks(), mine) for owner in self._list_ranks()]

    def _exchange(self, mine: Torch) -> list[Torch]:
        return [self._share(owner, self._beside, mine) for owner in self._beside]

    def _list_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.mesh.world))

    def _share(self, owner: int, ranks: tuple[int, ...], mine: object) -> Torch:
        """Give `mine` of the owner to all of `ranks`; raise what the owner raised."""
        import torch
        import torch.distributed as dist

        self.beat()
        group, tensors = self._groups[ranks], list[Torch]()
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


@value_class
class _TensorForm:
    """Where in an output a tensor stands."""

    shape: tuple[int, ...]
    kind: Torch
    where: str


@value_class
class _DictForm:
    """A dictionary, or one of the outputs of transformers, which are like them."""

    kind: Callable[..., Torch]
    entries: dict[str, object]


def _attempt_compute(compute: Callable[[], Torch]) -> object:
    try:
        return compute()
    except _BROADCAST_ERROR_TYPES as error:
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
