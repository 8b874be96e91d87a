"""Shares: whatever the files and the workers, together they write what one run writes, and count each element once."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import U16, Files, Layout, budget, filled, layouts, rows, shapes, values_of

from shardctl.conversion.engine import engine
from shardctl.conversion.engine.engine import execute_plan
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import CopyPlan, join_manifests
from shardctl.tensors.digest import DigestSums, compute_box_sums
from shardctl.tensors.manifest import CheckpointFile, ConstantFill, Manifest, Region, Tensor
from shardctl.tensors.manifest import Chunk as Stored
from shardctl.tensors.shares import WorkerPortion, build_share, divide_files


def shared(plan, groups, files, block=64):
    """What every worker writes, one after another, and the sum of their digests."""
    written, sums = {}, DigestSums.zero(U16)
    for number in range(len(groups)):
        mine = build_share(plan, groups, number)
        target = Files()
        outcome = execute_plan(mine.plan, Files(files), target, budget(block), portions=mine.portions)
        assert set(target.created) == set(groups[number]), "a file has one writer"
        written |= target.files
        sums += outcome.output_sums.get("t", DigestSums.zero(U16))
        assert outcome.source_sums == outcome.output_sums
    return {path: bytes(data) for path, data in written.items()}, sums


@settings(max_examples=200)
@given(shapes, st.integers(4, 300), st.integers(1, 3), st.data())
def test_workers_write_what_one_run_writes_and_count_each_element_once(shape, block, count, data):
    have, want = data.draw(layouts(shape, U16)), data.draw(layouts(shape, U16))
    values = values_of(shape)
    files, plan = filled(have, values), join_manifests(have, want)
    groups = data.draw(st.sampled_from([divide_files(plan, count), [(path,) for path in sorted(want.files)]]))
    target = Files()
    one = execute_plan(plan, Files(files), target, budget(block))
    written, sums = shared(plan, groups, files, block)
    assert written == {path: bytes(data) for path, data in target.files.items()}
    assert sums == one.output_sums["t"] == compute_box_sums(values.tobytes(), U16, Box.whole(shape), shape)


def cut(shape, dim, parts, name="rank{}"):
    layout = Layout(U16)
    step = shape[dim] // parts
    for rank in range(parts):
        origin, extent = [0] * len(shape), list(shape)
        origin[dim], extent[dim] = rank * step, step
        layout.add(Box(tuple(origin), tuple(extent)), name.format(rank))
    return layout.manifest(shape)


@pytest.mark.parametrize("gap", [0, 55, 56])
def test_a_worker_reads_only_what_its_files_need_and_small_gaps(monkeypatch, gap):
    """Its columns are 8 bytes of each row of 64."""
    monkeypatch.setattr(engine, "GAP", gap)
    values = values_of((16, 32))
    have = rows((16, 32))
    for dim in (0, 1):
        plan = join_manifests(have, cut((16, 32), dim, 8))
        groups = divide_files(plan, 8)
        assert sum(build_share(plan, groups, number).read_bytes for number in range(8)) == 16 * 32 * 2
        source = Files(filled(have, values))
        mine = build_share(plan, groups, 3)
        execute_plan(mine.plan, source, Files(), budget(4096), portions=mine.portions)
        gaps = 15 * 56 if dim == 1 and gap == 56 else 0
        assert source.reads == {"f": 16 * 32 * 2 // 8 + gaps}


def test_neighbouring_ranks_of_one_worker_are_read_together():
    plan = join_manifests(rows((16, 32)), cut((16, 32), 1, 8))
    mine = build_share(plan, divide_files(plan, 2), 1)
    assert mine.portions == {"t": (WorkerPortion(Box((0, 16), (16, 16)), counted=True),)}


def test_a_replica_counts_for_its_first_writer():
    layout = Layout(U16)
    for rank in range(4):
        layout.add(Box.whole((10, 10)), f"rank{rank}")
    plan = join_manifests(rows((10, 10)), layout.manifest((10, 10)))
    groups = divide_files(plan, 4)
    counted = [build_share(plan, groups, number).portions["t"] for number in range(4)]
    assert counted == [(WorkerPortion(Box.whole((10, 10)), counted=number == 0),) for number in range(4)]
    assert [bool(build_share(plan, groups, number).first) for number in range(4)] == [True, False, False, False]


def many(sizes):
    """A plan over one tensor a file, in the order of the source's files."""
    tensors, files = {}, {}
    for number, size in enumerate(sizes):
        path = f"out{number}"
        chunk = Stored(Box.whole((size,)), U16, Region(path, 0, (2,)))
        tensors[path] = Tensor(path, U16, (size,), (chunk,))
        files[path] = CheckpointFile(path, 2 * size)
    manifest = Manifest("x", tensors, files)
    return join_manifests(manifest, manifest)


@given(st.lists(st.integers(0, 1000), max_size=12), st.integers(1, 5))
def test_every_file_has_one_worker_and_no_other_cut_is_lighter(sizes, count):
    groups = divide_files(many(sizes), count)
    assert len(groups) == count
    assert Counter(path for group in groups for path in group) == Counter(f"out{n}" for n in range(len(sizes)))
    heaviest = max(sum(sizes[int(path[3:])] for path in group) for group in groups)

    def best(rest, workers):
        if workers == 1 or not rest:
            return sum(rest)
        return min(max(sum(rest[:n]), best(rest[n:], workers - 1)) for n in range(len(rest) + 1))

    if len(sizes) < 7:
        order = sorted(range(len(sizes)), key=lambda n: [c.source.name for c in many(sizes).copies].index(f"out{n}"))
        assert heaviest == best([sizes[n] for n in order], count)


def test_files_of_the_same_tensors_go_to_one_worker():
    """Ranks with several files each: a worker that takes a rank would read every tensor for a part of it."""
    tensors, files = {}, {}
    for index in range(2):
        chunks = []
        for rank in range(2):
            path = f"rank{rank}-file{index}"
            chunks.append(Stored(Box((0, 4 * rank), (4, 4)), U16, Region(path, 0, (8, 2))))
            files[path] = CheckpointFile(path, 32)
        tensors[f"t{index}"] = Tensor(f"t{index}", U16, (4, 8), tuple(chunks))
    stored = {
        name: Tensor(name, U16, (4, 8), (Stored(Box.whole((4, 8)), U16, Region("f", 64 * n, (16, 2))),))
        for n, name in enumerate(tensors)
    }
    plan = join_manifests(Manifest("x", stored, {"f": CheckpointFile("f", 128)}), Manifest("x", tensors, files))
    assert divide_files(plan, 2) == (("rank0-file0", "rank1-file0"), ("rank0-file1", "rank1-file1"))
    assert not build_share(plan, divide_files(plan, 2), 0).portions, "nothing is divided"


def test_files_without_tensors_have_a_worker_too():
    manifest = many([4, 4])
    want = Manifest(
        "x", manifest.want.tensors, {**manifest.want.files, "index": CheckpointFile("index", 5, ((0, b"index"),))}
    )
    plan = CopyPlan(manifest.have, want, manifest.copies)
    assert sorted(path for group in divide_files(plan, 3) for path in group) == ["index", "out0", "out1"]


def test_what_no_file_holds_counts_for_the_first_worker():
    stored = Stored(Box((0, 0), (3, 4)), U16, Region("f", 0, (8, 2)))
    padding = Stored(Box((3, 0), (2, 4)), U16, ConstantFill(b"\x07\x01"))
    have = Manifest("x", {"t": Tensor("t", U16, (5, 4), (stored, padding))}, {"f": CheckpointFile("f", 24)})
    plan = join_manifests(
        have, Manifest("x", have.tensors, {"f": CheckpointFile("f", 24), "g": CheckpointFile("g", 0)})
    )
    values = values_of((5, 4))
    values[3:] = 0x0107
    _, sums = shared(plan, [("g",), ("f",)], {"f": values[:3].tobytes(), "g": b""})
    assert sums == compute_box_sums(values.tobytes(), U16, Box.whole((5, 4)), (5, 4))
