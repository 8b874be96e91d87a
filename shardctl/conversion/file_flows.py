"""Counts how many bytes go from which file of the source to which file of the result."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from shardctl.tensors.manifest import ConstantFill

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.tensors.copyplan import CopyPlan, TensorCopy

_MAX_COMPARED_BOX_PAIRS: Final = 2_000_000
"""Pairs of boxes that are compared; beyond that, a person could not read the answer."""


def count_file_flows(plan: CopyPlan) -> Mapping[tuple[str, str], int] | None:
    """Count bytes by pair of files, as they are written; None where there are too many pairs to look at."""
    if sum(len(copy.reads) * len(copy.target.chunks) for copy in plan.copies) > _MAX_COMPARED_BOX_PAIRS:
        return None
    flows: Counter[tuple[str, str]] = Counter()
    for copy in plan.copies:
        _add_flows(copy, flows)
    return dict(sorted(flows.items()))


def _add_flows(copy: TensorCopy, flows: Counter[tuple[str, str]]) -> None:
    for read in copy.reads:
        for chunk in copy.target.chunks:
            if isinstance(read.where, ConstantFill) or isinstance(chunk.where, ConstantFill):
                continue
            shared = read.box.intersect(chunk.box)
            if shared is not None:
                flows[read.where.file, chunk.where.file] += chunk.dtype.nbytes(shared.shape)
