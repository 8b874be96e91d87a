"""Divides a copy plan among several workers, so that each file of the result has one writer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.base.value import value_class
from shardctl.tensors.box import Box, BoxIndex, make_disjoint, merge_boxes
from shardctl.tensors.copyplan import CopyPlan
from shardctl.tensors.manifest import ConstantFill

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardctl.tensors.copyplan import TensorCopy


@value_class
class WorkerPortion:
    """A box of a tensor that one worker moves."""

    box: Box
    counted: bool
    """Whether its elements count in this worker's digest sums: of what several workers write, one of them counts."""


@value_class
class WorkerShare:
    """What one of several workers does: the files that it writes, and what it reads for them.

    `share_whole_plan` returns the share of a run with one worker: no portions, as every tensor is moved whole. Bytes
    that lie between wanted ones and are read along are not counted by `read_bytes`.
    """

    plan: CopyPlan
    """The whole plan, without what other workers write."""
    portions: Mapping[str, tuple[WorkerPortion, ...]]
    """By tensor the boxes to move, disjoint; a tensor that is missing here is moved whole, and all of it counts."""
    first: frozenset[str]
    """The tensors whose first box is here: what must be looked at once, by somebody, is looked at by this worker."""

    @property
    def read_bytes(self) -> int:
        """Bytes of the source that this worker needs; what lies between them and is read along comes on top."""
        return sum(self._read_bytes(copy) for copy in self.plan.copies)

    def _read_bytes(self, copy: TensorCopy) -> int:
        portions = self.portions.get(copy.source.name)
        if portions is None:
            return copy.read_bytes
        index = BoxIndex([chunk.box for chunk in copy.reads])
        return copy.count_read_bytes(
            common
            for portion in portions
            for position, common in index.find_overlaps(portion.box)
            if not isinstance(copy.reads[position].where, ConstantFill)
        )


def share_whole_plan(plan: CopyPlan) -> WorkerShare:
    """Return all of a plan, for one worker."""
    return WorkerShare(plan, {}, frozenset(plan.have.tensors))


def list_read_files(plan: CopyPlan) -> set[str]:
    """List the files of the source that the tensors of a plan are read from."""
    chunks = (chunk for copy in plan.copies for chunk in copy.reads)
    return {chunk.where.file for chunk in chunks if not isinstance(chunk.where, ConstantFill)}


def divide_files(plan: CopyPlan, count: int) -> tuple[tuple[str, ...], ...]:
    """Divide the files among `count` workers: every file once, the heaviest worker as light as neighbours allow.

    Files that hold the same tensors are neighbours, and neighbours go to one worker: what they share is then read by
    one worker instead of several.
    """
    order = _order_files(plan)
    sizes = [plan.want.files[path].size for path in order]
    bound = _find_lightest_bound(sizes, count)
    groups: list[list[str]] = [[]]
    weight = 0
    for path, size in zip(order, sizes, strict=True):
        if groups[-1] and weight + size > bound:
            groups.append([])
            weight = 0
        groups[-1].append(path)
        weight += size
    return (*map(tuple, groups), *(() for _ in range(count - len(groups))))


def group_files(plan: CopyPlan, most: int) -> tuple[tuple[str, ...], ...]:
    """Return the files that hold tensors, in groups to be written one after another.

    Files that share tensors are in one group, because what they share is then read once, unless it would have more than
    `most` bytes.
    """
    names: dict[str, set[str]] = {path: set() for path in plan.want.files}
    for copy in plan.copies:
        for path in copy.target.files:
            names[path].add(copy.source.name)
    groups: list[list[str]] = []
    shared: set[str] = set()
    weight = 0
    for path in _order_files(plan):
        size = plan.want.files[path].size
        if not names[path]:
            continue
        if not groups or shared.isdisjoint(names[path]) or weight + size > most:
            groups.append([])
            shared, weight = set(), 0
        groups[-1].append(path)
        shared |= names[path]
        weight += size
    return tuple(map(tuple, groups))


def _order_files(plan: CopyPlan) -> list[str]:
    """Return the files in the order in which the source holds their first tensor."""
    first = dict.fromkeys(plan.want.files, len(plan.copies))
    for number, copy in enumerate(plan.copies):
        for path in copy.target.files:
            first[path] = min(first[path], number)
    return sorted(plan.want.files, key=lambda path: (first[path], path))


def _find_lightest_bound(sizes: Sequence[int], count: int) -> int:
    """Find the least bytes that the heaviest of `count` workers can have, if each takes a run of the files."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _count_runs(sizes, middle) <= count:
            high = middle
        else:
            low = middle + 1
    return low


def _count_runs(sizes: Iterable[int], bound: int) -> int:
    runs, weight = 1, 0
    for size in sizes:
        if weight and weight + size > bound:
            runs, weight = runs + 1, 0
        weight += size
    return runs


def build_share(plan: CopyPlan, groups: Sequence[Sequence[str]], number: int) -> WorkerShare:
    """Build the part of `plan` that worker `number` does, when worker i writes the files `groups[i]`."""
    writer = {path: worker for worker, paths in enumerate(groups) for path in paths}
    known: dict[object, tuple[WorkerPortion, ...]] = {}
    copies: list[TensorCopy] = []
    portions: dict[str, tuple[WorkerPortion, ...]] = {}
    first: set[str] = set()
    for copy in plan.copies:
        chunks = copy.target.chunks
        writers = [0 if isinstance(c.where, ConstantFill) else writer[c.where.file] for c in chunks]
        if (writers[0] if writers else 0) == number:
            first.add(copy.source.name)
        if number not in writers and (writers or number):
            continue
        target = replace(copy.target, chunks=tuple(c for c, w in zip(chunks, writers, strict=True) if w == number))
        copies.append(replace(copy, target=target))
        if len(set(writers)) > 1:
            key = (*(chunk.box for chunk in chunks), *writers)
            if key not in known:
                boxes = [_complete_turns(chunk.box, copy.target.turns) for chunk in chunks]
                known[key] = _split_portions(boxes, writers, number)
            portions[copy.source.name] = known[key]
    want = replace(
        plan.want,
        tensors={copy.source.name: copy.target for copy in copies},
        files={path: plan.want.files[path] for path in groups[number]},
    )
    return WorkerShare(CopyPlan(plan.have, want, tuple(copies)), portions, frozenset(first))


def _complete_turns(box: Box, turns: int) -> Box:
    """Return the box with all parts that take turns with it: a digest is of whole turns."""
    return box if turns == 1 else Box((*box.origin[:-1], 0), (*box.shape[:-1], turns))


def _split_portions(boxes: Sequence[Box], writers: Sequence[int], number: int) -> tuple[WorkerPortion, ...]:
    """Split the boxes that a worker writes by whether they count for it: each element counts for its first writer."""
    parts = make_disjoint(boxes)
    index = BoxIndex([box for _, box in parts])
    own = make_disjoint([box for box, writer in zip(boxes, writers, strict=True) if writer == number])
    found: dict[bool, list[Box]] = {True: [], False: []}
    for _, box in own:
        for position, common in index.find_overlaps(box):
            found[writers[parts[position][0]] == number].append(common)
    return tuple(WorkerPortion(box, counted) for counted, group in found.items() for box in merge_boxes(group))
