"""Several workers and what kills them: any order, any interruption, the bytes and the digest that one machine makes."""

import json
import os
import shutil
import signal

import pytest
from crash_site import checkpoint, flip, snapshot
from faults import DATA
from test_kill import clean
from test_runs import outcome

COUNT = 3
JOB = {"tp": 2, "sha256": True, "shard": 12_000}


@pytest.fixture
def wanted(site):
    return clean(site, **JOB)[0]


def work(site, number, faults=None, **options):
    return site.run(faults, worker=[number, COUNT], **{**JOB, **options})


def all_work(site, order=range(COUNT), **options):
    for number in order:
        done = work(site, number, **options)
        assert done["code"] == 0, done["message"]


def finished(site, wanted):
    done = site.run(finish=True)
    assert done["code"] == 0, done["message"]
    assert snapshot(site.destination) == wanted
    assert site.names() == ["out", "source"], "something was left over"
    return done


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_workers_in_any_order_make_what_one_machine_makes(site, wanted, order):
    all_work(site, order)
    assert snapshot(site.destination) is None, "nothing has its name before it is finished"
    assert finished(site, wanted)["workers"] == COUNT
    assert finished(site, wanted)["workers"] == 0, "to finish twice is harmless"


def test_workers_at_the_same_time(site, wanted):
    runs = [site.start({"delay": 0.002}, worker=[number, COUNT], **JOB) for number in range(COUNT)]
    assert [outcome(run)["code"] for run in runs] == [0] * COUNT
    finished(site, wanted)


def test_a_worker_killed_at_any_call_goes_on_where_it_was(site):
    source, options = snapshot(site.source), {"tp": 2, "sha256": True}
    wanted, _ = clean(site, **options)
    first, second = {**options, "worker": [0, 2]}, {**options, "worker": [1, 2]}
    done = site.run(**second)
    calls, total = done["calls"], done["written"]
    kept = []
    for number in range(0, len(calls), 2):
        site.clear()
        fault = {"kill_at": number, "torn": calls[number][0] in DATA}
        assert site.run(fault, **second) == {"killed": signal.SIGKILL}
        assert site.run(finish=True)["code"] in {3, 4, 6}, "a part that is not there is not finished"
        assert snapshot(site.destination) is None
        again = site.run(**second)
        assert again["code"] == 0, again["message"]
        kept.append(total if again["before"] else again["kept"])
        if number % 10 == 0:
            assert site.run(**first)["missing"] == []
            finished(site, wanted)
    assert max(kept) == total
    assert sum(0 < k < total for k in kept) > len(kept) // 8, "a rerun should keep what was there"
    assert snapshot(site.source) == source


def test_finish_killed_at_any_call_is_finished_by_the_next(site, wanted):
    all_work(site)
    shutil.copytree(site.staging, site.root.parent / f"{site.root.name}-kept", symlinks=True)
    kept = site.root.parent / f"{site.root.name}-kept"
    try:
        calls = finished(site, wanted)["calls"]
        for number in range(len(calls)):
            site.clear()
            shutil.copytree(kept, site.staging)
            assert site.run({"kill_at": number}, finish=True) == {"killed": signal.SIGKILL}
            found = snapshot(site.destination)
            assert found in (None, wanted), f"killed at {number} {calls[number]}"
            finished(site, wanted)
    finally:
        shutil.rmtree(kept)


def test_a_disk_that_is_full_when_workers_finish_is_told_and_keeps_their_parts(site, wanted):
    all_work(site)
    kept = site.root.parent / f"{site.root.name}-kept"
    shutil.copytree(site.staging, kept, symlinks=True)
    try:
        calls = finished(site, wanted)["calls"]
        for number in [n for n, (name, _) in enumerate(calls) if name in {"open", "mkdir", *DATA}]:
            site.clear()
            shutil.copytree(kept, site.staging)
            failed = site.run({"full_from": number}, finish=True)
            assert failed["code"] == 6, calls[number]
            assert "No space left on device" in failed["message"]
            assert "same command" in failed["hint"]
            finished(site, wanted)
    finally:
        shutil.rmtree(kept)


def test_finish_says_who_is_missing_and_changes_nothing(site, wanted):
    assert site.run(finish=True)["code"] == 4
    for number, absent in ((1, "0/3, 2/3"), (0, "2/3")):
        assert work(site, number)["code"] == 0
        said = site.run(finish=True)
        assert said["code"] == 3
        assert said["message"].endswith(absent)
    work(site, 2)
    finished(site, wanted)


def test_finish_waits_for_nobody_who_is_at_work(site, tmp_path, wanted):
    work(site, 0)
    work(site, 2)
    slow = site.started(tmp_path / "gate", {"journalled": 1}, worker=[1, COUNT], **JOB)
    refused = site.run(finish=True)
    assert refused["code"] == 6
    assert f"process {slow.pid}" in refused["message"]
    again = work(site, 1)
    assert again["code"] == 6, "a worker has one process"
    assert f"process {slow.pid}" in again["message"]
    (tmp_path / "gate").touch()
    assert outcome(slow)["code"] == 0
    finished(site, wanted)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"dtype": "bf16"}, "another plan"),
        ({"tp": 1}, "another plan"),
        ({"sha256": False}, "another choice of --hash"),
        ({"worker": [0, 2]}, "another number of workers: 3, not 2"),
    ],
)
def test_two_plans_for_one_destination_are_refused(site, wanted, other, said):
    work(site, 0)
    refused = site.run(**{**JOB, "worker": [1, COUNT], **other})
    assert refused["code"] == 6
    assert said in refused["message"]
    all_work(site)
    finished(site, wanted)


def test_workers_and_a_machine_by_itself_do_not_meet(site, wanted):
    work(site, 0)
    for options in (JOB, {"tp": 1}, {**JOB, "resume": False}):
        refused = site.run(**options)
        assert refused["code"] == 6
        assert "is being written by several workers" in refused["message"]
    all_work(site)
    finished(site, wanted)
    again = work(site, 0)
    assert (again["code"], again["written"]) == (0, 0)
    finished(site, wanted)


def test_a_source_that_changed_between_two_workers_is_refused(site):
    work(site, 0)
    checkpoint(site.root / "other", seed=1)
    for path in (site.root / "other").glob("*.safetensors"):
        shutil.copy(path, site.source / path.name)
    refused = work(site, 1)
    assert refused["code"] == 6
    assert "another state of the source" in refused["message"]


def test_what_an_interrupted_machine_left_makes_way_for_workers(site, wanted):
    calls = len(site.run(dtype="bf16")["calls"])
    site.clear()
    site.run({"kill_at": calls // 2}, dtype="bf16")
    all_work(site)
    finished(site, wanted)


@pytest.mark.parametrize("damage", ["part", "data"])
def test_a_part_that_was_damaged_is_missing_and_its_worker_mends_it(site, wanted, damage):
    all_work(site)
    if damage == "part":
        flip(site.staging / "worker-00000.part")
    else:
        largest = max(site.staged(), key=lambda path: path.stat().st_size)
        os.truncate(largest, 100)
    said = site.run(finish=True)
    assert said["code"] == 3
    all_work(site)
    finished(site, wanted)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", "[" * 100_000, '{"schema": "shardctl.workers/1", "tree": 3, "workers": "3"}']
)
def test_a_plan_that_was_damaged_is_told_by_everyone(site, content):
    all_work(site, [0])
    (site.staging / "workers.json").write_text(content)
    for said in (work(site, 1), site.run(finish=True)):
        assert said["code"] == 6, said["message"]
        assert "workers.json is damaged" in said["message"]
        assert said["hint"] == f"remove {site.staging}, and run them all again"


def test_an_overwritten_checkpoint_stands_until_finish(site, wanted, tmp_path):
    site.runner(checkpoint(tmp_path / "before", seed=1), site.destination)
    old = snapshot(site.destination)
    refused = work(site, 0)
    assert refused["code"] == 6
    all_work(site, overwrite=True)
    assert snapshot(site.destination) == old
    finished(site, wanted)


def test_a_mount_point_is_filled_by_finish(site, wanted):
    (site.destination / ".shardctl").mkdir(parents=True)
    all_work(site)
    finished(site, wanted)


def test_more_workers_than_files_have_nothing_to_do_and_are_wanted_all_the_same(site, wanted):
    for number in range(9):
        assert site.run(worker=[number, 9], **JOB)["code"] == 0
    finished(site, wanted)


def test_a_worker_started_anew_forgets_what_it_had(site, wanted):
    all_work(site)
    again = work(site, 1, resume=False)
    assert (again["before"], again["kept"]) == (False, 0)
    assert json.loads((site.staging / "workers.json").read_text())["workers"] == COUNT
    finished(site, wanted)


def test_a_worker_that_died_on_another_machine_is_replaced_by_its_own_launcher_only(site, wanted):
    all_work(site, (0, 2))
    elsewhere = {"host": "node17", "boot": "another", "pid": 4711, "start": "1", "run": "slurm 7"}
    (site.staging / "worker-00001.lock").write_text(json.dumps(elsewhere))
    for run in ("", "slurm 8"):
        refused = work(site, 1, run=run)
        assert refused["code"] == 6
        assert "process 4711 on node17" in refused["message"]
        assert str(site.staging / "worker-00001.lock") in refused["hint"]
    assert site.run(finish=True)["code"] == 6
    assert work(site, 1, run="slurm 7")["code"] == 0
    finished(site, wanted)
