"""Measures with which share of the weights ranks computed as they hold them, and lists the rest with reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.verify.forward_result import ComputedShare, JoinedWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.running.forward.executor import ModelExecutor
    from shardctl.running.forward.rank_runner import RankRunner
    from shardctl.running.forward.skeleton import TensorSlot
    from shardctl.running.forward.weights import ModelWeights

_UNREACHED: Final = "not computed with: these inputs do not reach it"
_LOOSE: Final = "joined: it is no part of a block, and code of the whole model uses it"


def measure_share(executor: ModelExecutor, shards: ModelWeights) -> ComputedShare | None:
    """Measure the share of weights that ranks computed with; None if no rank computes with a part."""
    ranks = executor.ranks
    if ranks is None:
        return None
    total, reasons = 0, dict[str, dict[str, int]]()
    for slot, reason in _list_reasons(executor, ranks):
        if not shards.fills(slot):
            continue
        size = slot.empty.numel()
        total += size
        if reason:
            reasons.setdefault(reason, {})[slot.names[0]] = size
    joined = [
        JoinedWeights(reason, sum(sizes.values()) / total, tuple(sizes)) for reason, sizes in reasons.items() if total
    ]
    return ComputedShare(1.0 - sum(each.share for each in joined), tuple(joined))


def _list_reasons(executor: ModelExecutor, ranks: RankRunner) -> Iterator[tuple[TensorSlot, str]]:
    """List every slot with why ranks did not compute with their own; an empty text if they did."""
    for slot in executor.skeleton.loose:
        spec = ranks.views.specs.get(slot)
        yield slot, _LOOSE if spec is not None and spec.axes else ""  # else each rank has all of it
    skeleton = executor.skeleton
    used = {id(slot) for unit in skeleton.units if unit.name in executor.reached for slot in unit.slots}
    for unit in skeleton.units:
        apart = ranks.joined.get(unit.name)
        for slot in unit.slots:
            reached = not used.isdisjoint(map(id, skeleton.slots[slot.names[0]]))  # by one of its names, if it is tied
            yield slot, f"joined: {apart}" if apart else ("" if reached else _UNREACHED)
