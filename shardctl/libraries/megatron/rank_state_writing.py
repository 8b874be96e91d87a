"""Plans optimizer states beside the weights of Megatron-LM's ranks, in the order in which its optimizers meet them.

A distributed optimizer loads `distrib_optim.pt` (`load_parameter_state_from_dp_zero` of
`optimizer/distrib_optimizer.py`): each buffer's fp32 weights and states one behind another, for runs whose buckets end
nowhere before the buffer does, as without an overlapped reduction of gradients. Any other finds them among the weights'
file (`load_state_dict` of `Float16OptimizerWithFloat16Params` and `FP32Optimizer`). No file names a parameter.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.libraries.arrays.composing import ComposedArray
from shardctl.libraries.megatron.buffer_layout import place_parameters
from shardctl.libraries.megatron.dist_parameters import BUFFERS
from shardctl.libraries.megatron.dist_states import MASTERS, STATES, STORED, build_group
from shardctl.libraries.megatron.layers import is_tied
from shardctl.libraries.megatron.rank_archive import RankArchive, StoragePart
from shardctl.libraries.megatron.rank_states import EXPERTS, SHARED
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.libraries.torch_save.item_writer import build_tensor_value
from shardctl.libraries.torch_save.pickle_writer import PickleName

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.libraries.torch_save.pickle_writer import Value
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import CheckpointFile, Chunk, TrainingState
    from shardctl.tensors.mesh import Mesh

NamedArray = tuple[str, str, ComposedArray]
"""An array of a rank: the key of its chunk of layers, its name there, and the array."""
_HALF_PRECISION_DTYPES: Final = frozenset({"F16", "BF16"})
_DROP_STATES_HINT: Final = "add --optimizer-states drop"


class RankStateWriter:
    """The states of the optimizers of every rank."""

    def __init__(
        self,
        order: PackRequest,
        mesh: Mesh,
        named: Mapping[int, Sequence[NamedArray]],
        trained: Collection[str],
        *,
        replicated: bool,
    ) -> None:
        """Prepare to write the states of `named`, each rank's arrays in the order of modules.

        Raises UnsupportedError for an array that has no states: it would stand among the others without a name.
        """
        training = order.have.training
        assert training is not None  # noqa: S101 - something is trained
        self._training: TrainingState = training
        self._mesh = mesh
        self._replicated = replicated
        routed = mesh.ep > 1 and any(EXPERTS in name for arrays in named.values() for _, name, _ in arrays)
        self._kinds = (False, True) if routed else (False,)
        self._named = {
            (rank, kind): [
                each
                for each in arrays
                if not each[1].endswith(BUFFERS) and (not routed or (EXPERTS in each[1]) == kind)
            ]
            for rank, arrays in named.items()
            for kind in self._kinds
        }
        for arrays in self._named.values():
            for _, name, array in arrays:
                left = sorted({piece.tensor for piece in array.entry.content.pieces} - set(trained))
                if left:
                    raise UnsupportedError(
                        f"{left[0]} in {name} has no optimizer states, but {TITLE}'s directories have those of "
                        "all weights or of none",
                        hint=_DROP_STATES_HINT,
                    )
        shared = is_tied(order.model) and mesh.degree("pp") > 1
        self._shared = SHARED if shared else ()
        self._firsts: dict[tuple[object, ...], int] = {}
        for rank in named:
            for kind in self._kinds:
                self._firsts.setdefault(self._find_owner(rank, kind=kind), rank)

    def _find_owner(self, rank: int, *, kind: bool) -> tuple[object, ...]:
        at = self._mesh.coordinate(rank)
        return kind, at["pp"], *((at["ep"], at["etp"]) if kind else (at["tp"],))

    def has_masters(self, array: ComposedArray) -> bool:
        """Return whether an array's weights in fp32 are the optimizer's, beside those of the model."""
        return not self._replicated or array.dtype.name in _HALF_PRECISION_DTYPES

    def build_settings(self) -> Value:
        """Build what a distributed optimizer has in the file of weights."""
        states: list[Value] = [
            {"optimizer": {"param_groups": [self._build_group(kind, each) for each in self._list_decays(kind)]}}
            for kind in self._kinds
        ]
        return states if len(states) > 1 else states[0]

    def _build_group(self, kind: bool, decayed: bool) -> dict[str | int, Value]:  # noqa: FBT001 - as `_kinds` has them
        return build_group(self._training, expert=kind, decayed=decayed)

    def _list_decays(self, kind: bool) -> list[bool]:  # noqa: FBT001
        """List the groups that any rank has: matrices, which have weight decay, and vectors."""
        mine = [arrays for (_, each), arrays in self._named.items() if each == kind]
        return [decayed for decayed in (True, False) if any(_list_grouped(arrays, decayed) for arrays in mine)]

    def build_file(self, rank: int, path: str, stored: list[tuple[str, Chunk]]) -> CheckpointFile | None:
        """Build the file of the states of a rank; None if earlier ranks have the same weights."""
        archive = RankArchive(path)
        states = [
            self._add_buffers(archive, self._named[rank, kind])
            if self._firsts[self._find_owner(rank, kind=kind)] == rank
            else None
            for kind in self._kinds
        ]
        if not any(states):
            return None
        return archive.finish(states if len(states) > 1 else states[0], stored)

    def _add_buffers(self, archive: RankArchive, named: Sequence[NamedArray]) -> dict[str | int, Value]:
        """Add a buffer for each chunk of layers and type of parameters."""
        buffers: dict[tuple[str, DType], list[NamedArray]] = {}
        for each in named:
            buffers.setdefault((each[0], each[2].dtype), []).append(each)
        found: dict[str | int, Value] = {"buckets_coalesced": True}
        for number, ((_, dtype), arrays) in enumerate(buffers.items()):
            counts = [array.box.size for _, _, array in arrays]
            starts, size = place_parameters(counts, [name.endswith(self._shared) for _, name, _ in arrays])
            inner: dict[str, Value] = {}
            for state in (MASTERS, *STATES):
                parts = [
                    StoragePart(
                        ComposedArray(array.entry, STORED),
                        start * STORED.unit_bytes,
                        "" if state == MASTERS else state,
                        name=f"{name}.{state}",
                    )
                    for (_, name, array), start in zip(arrays, starts, strict=True)
                ]
                storage = archive.add(size * STORED.unit_bytes, parts[::-1])
                inner[state] = build_tensor_value(STORED, (size,), storage)
            types = PickleName("torch", dtype.torch), PickleName("torch", STORED.torch)
            found[number] = {types: {**inner, "numel_unpadded": size}}
        return found

    def add_replicated(self, archive: RankArchive, rank: int) -> Value:
        """Add what an optimizer that is not distributed has in the file of a rank's weights."""
        states = [self._add_optimizer(archive, self._named[rank, kind], kind) for kind in self._kinds]
        return states if len(states) > 1 else states[0]

    def _add_optimizer(
        self,
        archive: RankArchive,
        named: Sequence[NamedArray],
        kind: bool,  # noqa: FBT001 - as `_kinds` has them
    ) -> Value:
        step = archive.add(STORED.unit_bytes, literal=struct.pack("<f", self._training.step or 0))
        states: dict[str | int, Value] = {}
        groups: list[Value] = []
        masters: list[Value] = []
        for decayed in self._list_decays(kind):
            mine, copied = _list_grouped(named, decayed), []
            first = len(states)
            for name, array in mine:
                states[len(states)] = {state: _add_array(archive, name, array, state) for state in STATES}
                if array.dtype.name in _HALF_PRECISION_DTYPES:
                    copied.append(_add_array(archive, name, array, MASTERS))
            settings = self._build_group(kind, decayed)
            groups.append(settings | {"params": list(range(first, len(states)))})
            masters.append(copied)
        states["common_step"] = build_tensor_value(STORED, (), step)
        inner: Value = {"state": states, "param_groups": groups}
        if any(array.dtype.name in _HALF_PRECISION_DTYPES for each in self._named.values() for _, _, array in each):
            return {"optimizer": inner, "fp32_from_fp16_params": masters}
        return inner


def _list_grouped(named: Sequence[NamedArray], decayed: bool) -> list[tuple[str, ComposedArray]]:  # noqa: FBT001
    """List a rank's matrices, or its vectors and biases, which have no weight decay."""
    return [
        (name, array)
        for _, name, array in named
        if decayed != (len(array.entry.declared) == 1 or name.endswith(".bias"))
    ]


def _add_array(archive: RankArchive, name: str, array: ComposedArray, state: str) -> Value:
    whole = ComposedArray(array.entry, STORED)
    part = StoragePart(whole, state="" if state == MASTERS else state, name=f"{name}.{state}")
    return build_tensor_value(STORED, whole.entry.declared, archive.add(whole.nbytes, [part]))
