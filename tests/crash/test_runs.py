"""Two runs for one destination: the second is refused, and a lock that was broken costs work but no bytes."""

import json
import os
from pathlib import Path

import pytest
from crash_site import snapshot
from test_kill import clean, finish, killed


@pytest.fixture
def gate(tmp_path):
    """The file whose arrival lets a run go on."""
    return tmp_path / "gate"


def outcome(run):
    said, _ = run.communicate(timeout=300)
    return json.loads(said)


def test_a_second_run_is_refused_and_the_first_is_not_disturbed(site, gate):
    wanted, _ = clean(site)
    first = site.started(gate)
    for options in ({}, {"tp": 1}, {"overwrite": True}, {"resume": False}):
        refused = site.run(**options)
        assert refused["code"] == 6
        assert f"process {first.pid}" in refused["message"]
    gate.touch()
    assert outcome(first)["code"] == 0
    assert snapshot(site.destination) == wanted


@pytest.mark.parametrize("other", [{"tp": 1}, {"tp": 2, "dtype": "bf16"}])
def test_a_lock_removed_by_hand_never_mixes_two_results(site, gate, other):
    wanted, _ = clean(site, **other)
    first = site.started(gate)
    (site.staging / "lock").unlink()
    assert site.run(**other)["code"] == 0
    gate.touch()
    beaten = outcome(first)
    assert beaten["code"] == 6, beaten["message"]
    assert snapshot(site.destination) == wanted
    finish(site, wanted, **other)


def test_two_results_of_equal_names_and_sizes_are_not_mixed_while_both_are_written(site, gate):
    wanted = {dtype: clean(site, dtype=dtype)[0] for dtype in ("bf16", "fp16")}
    first = site.started(gate, dtype="bf16", descriptors=1)  # it opens its files again and again, by name
    (site.staging / "lock").unlink()
    other = gate.with_name("another")
    second = site.started(other, dtype="fp16")
    gate.touch()
    assert outcome(first)["code"] == 6, "the second threw away what the first had"
    other.touch()
    assert outcome(second)["code"] == 0
    assert snapshot(site.destination) == wanted["fp16"]


def test_results_that_differ_in_their_bytes_are_staged_under_different_names(site):
    def tree(**options):
        _, done = clean(site, **options)
        return next(path for name, path in done["calls"] if name == "rename")

    trees = [tree(), tree(dtype="bf16"), tree(dtype="fp16"), tree(tp=1), tree(sha256=True)]
    (site.source / "tokenizer.json").write_text('{"seed": 1}')
    trees.append(tree())
    assert len(set(trees)) == len(trees)
    assert tree(threads=3) == trees[-1]


def test_two_of_the_same_runs_without_a_lock_make_the_same_bytes(site, gate):
    wanted, _ = clean(site)
    first = site.started(gate)
    (site.staging / "lock").unlink()
    second = site.run()
    assert second["code"] == 0
    gate.touch()
    beaten = outcome(first)
    assert beaten["code"] in {0, 6}, beaten["message"]
    assert snapshot(site.destination) == wanted


OWNERS = {
    "never written": "",
    "torn": '{"host": "x',
    "of a dead process": json.dumps({"host": "elsewhere", "boot": "this", "pid": 2**22 - 1, "start": "1"}),
    "of a process that has its number now": json.dumps({"host": "here", "boot": "this", "pid": 1, "start": "x"}),
    "from before a reboot": json.dumps({"host": "here", "boot": "another", "pid": 1, "start": "1"}),
}


def lock(site, text):
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    text = text.replace('"this"', f'"{boot}"').replace('"here"', f'"{os.uname().nodename}"')
    (site.staging / "lock").write_text(text)


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS.keys())
def test_the_lock_of_the_dead_is_taken(site, owner):
    wanted, done = clean(site)
    killed(site, len(done["calls"]) // 2)
    lock(site, owner)
    finish(site, wanted)


def test_the_lock_of_another_machine_is_respected(site):
    wanted, done = clean(site)
    killed(site, len(done["calls"]) // 2)
    lock(site, json.dumps({"host": "node17", "boot": "another", "pid": 4711, "start": "1"}))
    refused = site.run()
    assert refused["code"] == 6
    assert "process 4711 on node17" in refused["message"]
    assert str(site.staging / "lock") in refused["hint"]
    (site.staging / "lock").unlink()
    finish(site, wanted)


def test_many_runs_at_once_have_one_winner(site):
    wanted, done = clean(site)
    killed(site, len(done["calls"]) // 2)  # with a dead lock for all of them to break
    runs = [site.start({"delay": 0.01}) for _ in range(5)]
    results = [outcome(run) for run in runs]
    winners = [r for r in results if r["code"] == 0 and r["written"]]
    late = [r for r in results if r["code"] == 0 and not r["written"]]  # these came when all was finished
    assert len(winners) == 1, results
    assert [r["code"] for r in results].count(6) == 4 - len(late), results
    assert snapshot(site.destination) == wanted
    assert site.names() == ["out", "source"]
