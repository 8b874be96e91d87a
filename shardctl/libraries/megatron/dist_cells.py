"""Puts the parts of whole arrays into `.distcp` files, where a rank of a mesh would write them.

For both of Megatron-LM's formats of torch's items: `torch_dist`, and what Megatron-FSDP saves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError, UnsupportedError
from shardctl.libraries.dcp.file_writer import DcpFiles
from shardctl.libraries.megatron.dist_arrays import check_stack
from shardctl.libraries.megatron.layers import count_experts
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.libraries.safetensors.hf_writing import USUAL_SHARD
from shardctl.libraries.torch_save.item_writer import encode_object
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardctl.base.dtype import DType
    from shardctl.libraries.megatron.dist_arrays import StackCell
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.naming_scheme import NamingScheme

_EMPTY_EXTRA_STATE: Final = encode_object([None])


class CellWriter:
    """Puts every part of every cell where a rank writes it."""

    def __init__(
        self,
        order: PackRequest,
        dialect: NamingScheme,
        folder: str,
        cells: Iterable[StackCell],
        *,
        is_copy: Callable[[StackCell, str], bool] = lambda _, __: False,
        list_objects: Callable[[StackCell], Iterable[str]] = lambda _: (),
    ) -> None:
        """Prepare to write `cells` into `folder`.

        `is_copy` says whether what a cell holds of a tensor is a copy beside the tensor proper, and `list_objects` the
        keys of empty objects behind it.
        """
        self.order = order
        self.mesh = dialect.mesh
        self.files = DcpFiles(order.max_shard_size or USUAL_SHARD, folder)
        self.stored: list[tuple[str, Chunk]] = []
        self._is_copy = is_copy
        self._list_objects = list_objects
        self._experts = count_experts(order.model)
        self._stage_of = [stage for stage, count in enumerate(dialect.stages) for _ in range(count)]
        arrays: dict[str, list[StackCell]] = {}
        for cell in cells:
            arrays.setdefault(cell.name, []).append(cell)
        for same in arrays.values():
            check_stack(same)
        self.cells = [cell for same in arrays.values() for cell in same]
        self.dtypes = {name: self._find_dtype(same) for name, same in arrays.items()}
        self._ranks: dict[tuple[str, int, int, int], int] = {}
        for rank in range(self.mesh.world):
            at = self.mesh.coordinate(rank)
            self._ranks.setdefault(("tp", at["pp"], 0, at["tp"]), rank)
            self._ranks.setdefault(("etp", at["pp"], at["ep"], at["etp"]), rank)

    def write(self) -> None:
        """Rank by rank, each in the order of the arrays, objects behind the weights of their module."""
        by_rank: dict[int, list[tuple[StackCell, int, int]]] = {}
        for cell in self.cells:
            for rank, index, count in self._list_shares(cell):
                by_rank.setdefault(rank, []).append((cell, index, count))
        for rank in sorted(by_rank):
            self.files.rank(rank)
            written: set[str] = set()
            for cell, index, count in by_rank[rank]:
                self._part(cell, index, count)
                for key in self._list_objects(cell) if not index else ():
                    if key not in written:
                        written.add(key)
                        self.files.object(key, _EMPTY_EXTRA_STATE)

    def _list_shares(self, cell: StackCell) -> Iterator[tuple[int, int, int]]:
        """Yield the ranks that write a part of a cell, each with the part's index among how many."""
        stage = self._stage_of[cell.layer if cell.layer is not None else 0 if cell.first else -1]
        axis, group = "tp", 0
        if cell.expert is not None:
            if self._experts % self.mesh.ep:
                raise PartitionError(f"{self._experts} experts cannot be divided over ep={self.mesh.ep}")
            axis, group = "etp", cell.expert * self.mesh.ep // self._experts
        count = self.mesh.degree(axis) if cell.dim is not None else 1
        for index in range(count):
            yield self._ranks[axis, stage, group, index], index, count

    def _part(self, cell: StackCell, index: int, count: int) -> None:
        """Add what a rank writes of a cell: a box of each piece, because gate and up are apart in the whole array."""
        dtype = self.dtypes[cell.name]
        start = 0
        for piece in cell.pieces:
            part, origin = piece, [0] * len(piece.shape)
            if cell.dim is not None:
                part = piece.share(cell.dim, index, count)
                origin[cell.dim] = index * part.shape[cell.dim]
            origin[0] += start
            start += piece.shape[0]
            box = Box((*cell.place, *origin), (*(1,) * len(cell.place), *part.shape))
            region = self.files.tensor(cell.name, cell.shape, dtype, box, part.padding * dtype.unit_bytes)
            if region is not None:
                where = replace(region, strides=compute_dense_strides(dtype, part.shape))
                stored = part.pulled(Chunk(Box.whole(part.shape), dtype, where, cell.name))
                self.stored += ((n, replace(c, aside=True) if self._is_copy(cell, n) else c) for n, c in stored)

    def _find_dtype(self, same: list[StackCell]) -> DType:
        """Return the one type of an array."""
        kinds: dict[DType, str] = {}
        for cell in same:
            for piece in (each for composite in cell.pieces for each in composite.pieces):
                if piece.tensor not in self.order.have.tensors:
                    raise UnsupportedError(f"{TITLE} needs every tensor, but {piece.tensor} is missing")
                kinds.setdefault(cell.dtype or self.order.dtypes[piece.tensor], piece.tensor)
        if len(kinds) > 1:
            (one, first), (two, second), *_ = kinds.items()
            raise UnsupportedError(
                f"{same[0].name} of {TITLE} cannot hold both {first}, which is {one}, and {second}, which is {two}",
                hint="cast to one type with --dtype",
            )
        dtype = next(iter(kinds))
        if dtype.unit_elements > 1 or not dtype.torch:
            raise UnsupportedError(f"{same[0].name}: {TITLE} cannot be written with weights of {dtype}")
        return dtype
