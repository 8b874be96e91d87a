"""Finds tensors in a saved file of Megatron-LM that are states of one rank's weights, and holds them against these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.value import state_class
from shardctl.libraries.megatron.dist_parameters import UnknownOrderError
from shardctl.libraries.megatron.dist_samples import compare_samples
from shardctl.libraries.torch_save.reading import check_total_size
from shardctl.libraries.torch_save.tensors import as_tensor
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.libraries.megatron.rank_file import MegatronRankFile
    from shardctl.libraries.torch_save.tensors import SavedFile, StorageView
    from shardctl.storage import Source

MASTER: Final = "param"
"""What the optimizer's own weights are called among the states."""


@state_class
class StateReader:
    """Finds the parts of one saved file that are states of one rank's weights."""

    source: Source
    file: MegatronRankFile
    saved: SavedFile
    boxes: int
    """Of weights, whose first values are compared, about so many."""
    compared: int = 0
    """Values that were."""

    def name_state(self, array: str, state: str) -> str:
        """Name what a file has of a state, which has no name there."""
        return f"{self.file.stored[array]}.{state}"

    def build_view(self, node: object, name: str) -> StorageView:
        """Build what a node says of a tensor; raises UnknownOrderError if it is none."""
        view = as_tensor(node, f"{self.saved.path}: {name}")
        if view is None:
            raise UnknownOrderError(f"{self.saved.path} has no tensor {name}")
        check_total_size(self.source, self.saved.path, [view])
        return view

    def build_tensor(self, name: str, view: StorageView, shape: tuple[int, ...], start: int = 0) -> Tensor:
        """Build a tensor of `shape` whose elements follow each other in `view` from element `start`."""
        region = self.saved.region(view, name)
        where = Region(
            region.file, region.offset + start * view.dtype.unit_bytes, compute_dense_strides(view.dtype, shape)
        )
        return Tensor(name, view.dtype, shape, (Chunk(Box.whole(shape), view.dtype, where, name),))

    def compare_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Compare samples of fp32 weights with the weights; raises UnknownOrderError where they are not the same."""
        weights = {}
        for name in masters:
            view, stored = self.file.views[name], self.file.stored[name]
            chunk = Chunk(Box.whole(view.shape), view.dtype, self.file.saved.region(view, stored), stored)
            weights[name] = Tensor(name, view.dtype, view.shape, (chunk,))
        self.compared += compare_samples(self.source, masters, weights, self.boxes)
