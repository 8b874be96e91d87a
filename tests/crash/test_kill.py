"""SIGKILL at every call that changes the file system: nothing looks finished that is not, and a rerun finishes."""

import shutil
import signal
from pathlib import Path

import pytest
from crash_site import checkpoint, flip, snapshot
from faults import DATA
from safetensors.numpy import load_file, save_file


def clean(site, faults=None, **options):
    """What an undisturbed run makes, and the calls it takes."""
    done = site.run(faults, **options)
    assert done["code"] == 0, done["message"]
    wanted = snapshot(site.destination)
    site.clear()
    return wanted, done


def killed(site, number, faults=None, **options):
    assert site.run({**(faults or {}), "kill_at": number}, **options) == {"killed": signal.SIGKILL}


def finish(site, wanted, faults=None, **options):
    """Run the same command again, to the same bytes."""
    done = site.run(faults, **options)
    assert done["code"] == 0, done["message"]
    assert snapshot(site.destination) == wanted
    assert site.names() == ["out", "source"], "something was left over"
    return done


def test_a_new_destination_is_absent_or_complete_and_a_rerun_keeps_what_was_synced(site):
    source = snapshot(site.source)
    wanted, done = clean(site, sha256=True)
    calls, total = done["calls"], done["written"]
    kept = []
    for number, (name, _) in enumerate(calls):
        for torn in (False, True) if name in DATA and number % 4 == 0 else (False,):
            killed(site, number, {"torn": torn}, sha256=True)
            found = snapshot(site.destination)
            assert found in (None, wanted), f"killed at {number} {name}"
            bands = site.journalled()
            again = finish(site, wanted, sha256=True)
            if found is None:
                assert again["kept"] + again["written"] == total
                assert (again["kept"] > 0) == (bands > 0), "the journal was not used"
                kept.append(again["kept"])
            assert snapshot(site.source) == source
            site.clear()
    assert max(kept) == total
    assert sum(0 < k < total for k in kept) > len(calls) // 3, "most kills should leave something to keep"


@pytest.mark.parametrize("no_exchange", [False, True], ids=["exchanged", "two renames"])
def test_an_overwritten_checkpoint_stands_until_the_new_one_is_complete(site, tmp_path, no_exchange):
    kept, options, faults = tmp_path / "kept", {"overwrite": True, "tp": 1}, {"no_exchange": no_exchange}
    site.runner(checkpoint(tmp_path / "before", seed=1), kept)
    old = snapshot(kept)
    shutil.copytree(kept, site.destination)
    wanted, done = clean(site, faults, **options)
    names = [name for name, _ in done["calls"]]
    last_bytes = len(names) - names[::-1].index("pwrite")
    states = []
    for number in [*range(0, last_bytes, 9), *range(last_bytes, len(names))]:
        shutil.copytree(kept, site.destination)
        killed(site, number, faults, **options)
        states.append(snapshot(site.destination))
        if states[-1] is None:  # between the two renames there is no other way
            assert snapshot(site.staging / "old") == old
        else:
            assert states[-1] in (old, wanted), f"killed at {number} {names[number]}"
        finish(site, wanted, faults, **options)
        site.clear()
    assert old in states
    assert wanted in states
    assert states.count(None) == no_exchange


def test_the_same_plan_over_other_values_is_not_taken_for_finished(site, tmp_path):
    """Old and new have the same names, shapes and options, and the same record but for its digests."""
    wanted, _ = clean(site)
    site.runner(checkpoint(tmp_path / "before", seed=1), tmp_path / "kept")
    shutil.copytree(tmp_path / "kept", site.destination)
    exchange = [name for name, _ in site.run(overwrite=True)["calls"]].index("exchange")
    for number in (10, exchange // 2, exchange - 1, exchange):
        shutil.rmtree(site.destination)
        shutil.copytree(tmp_path / "kept", site.destination)
        killed(site, number, overwrite=True)
        assert snapshot(site.destination) == snapshot(tmp_path / "kept")
        finish(site, wanted, overwrite=True)


def test_a_directory_that_cannot_be_renamed_over_is_filled_file_by_file_with_the_record_last(site):
    """A mount point has no beside; `.shardctl` inside it makes the program take any directory for one."""
    inside = site.destination / ".shardctl"
    inside.mkdir(parents=True)
    done = site.run()
    assert done["code"] == 0
    wanted = snapshot(site.destination)
    moves = [n for n, (name, _) in enumerate(done["calls"]) if name == "rename_new"]
    assert [Path(done["calls"][n][1]).name for n in moves[-2:]] == ["config.json", "shardctl.json"]
    for number in range(moves[0] - 4, len(done["calls"])):
        site.clear()
        inside.mkdir(parents=True)
        killed(site, number)
        finished = "shardctl.json" in snapshot(site.destination)
        assert finished == (number > moves[-1])
        finish(site, wanted)


@pytest.mark.parametrize("options", [{"tp": 1}, {"tp": 2, "sha256": True}, {"tp": 2, "dtype": "bf16"}])
def test_half_moved_files_of_one_command_do_not_end_up_in_the_result_of_another(site, options):
    inside = site.destination / ".shardctl"
    wanted, _ = clean(site, **options)
    inside.mkdir(parents=True)
    calls = site.run(dtype="fp16")["calls"]
    moves = [n for n, (name, _) in enumerate(calls) if name == "rename_new"]
    site.clear()
    inside.mkdir(parents=True)
    killed(site, moves[3], dtype="fp16")
    finish(site, wanted, **options)


@pytest.mark.parametrize("fraction", [0.5, 0.8, 0.95])
def test_kept_bytes_that_were_tampered_with_are_written_again(site, fraction):
    wanted, done = clean(site)
    killed(site, int(len(done["calls"]) * fraction))
    assert site.journalled()
    for path in site.staged():
        flip(path)
    finish(site, wanted)


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty", "binary"])
def test_a_damaged_journal_costs_work_and_no_bytes(site, damage):
    wanted, done = clean(site, dtype="bf16")
    killed(site, int(len(done["calls"]) * 0.8), dtype="bf16")
    journal = site.staging / "journal.jsonl"
    data = journal.read_bytes()
    lines = data.split(b"\n")
    if damage == "flipped":  # a digit of what was read, which nothing else can check
        lines[2] = lines[2].replace(b', "', b', "0', 1)
        lines[3] = lines[3][:10] + (b"1" if lines[3][10:11] != b"1" else b"2") + lines[3][11:]
    journal.write_bytes(
        {
            "torn": data[: len(data) * 2 // 3],
            "flipped": b"\n".join(lines),
            "empty": b"",
            "binary": lines[0] + b"\n" + bytes(range(256)) * 9 + b"\n" + b"\n".join(lines[1:]),
        }[damage]
    )
    finish(site, wanted, dtype="bf16")


def test_several_kills_in_a_row_are_survived(site):
    wanted, done = clean(site, threads=3)
    for number in (5, len(done["calls"]) // 2, len(done["calls"]) - 20, len(done["calls"]) // 3):
        site.run({"kill_at": number}, threads=3)
        assert snapshot(site.destination) in (None, wanted)
    finish(site, wanted)


def test_a_cast_counts_its_overflows_over_all_runs(site):
    file = next(site.source.glob("*-00001-*.safetensors"))
    tensors = load_file(file)
    for tensor in tensors.values():
        tensor[...] = 1e5
    save_file(tensors, file, {"format": "pt"})
    wanted, done = clean(site, dtype="fp16", tp=1, allow_overflow=True)
    assert len(done["warnings"]) == len(tensors)
    killed(site, int(len(done["calls"]) * 0.9), dtype="fp16", tp=1, allow_overflow=True)
    assert site.journalled()
    refused = site.run(dtype="fp16", tp=1)
    assert (refused["code"], site.destination.exists()) == (4, False)
    assert "finite values become infinite in F16" in refused["message"]
    again = site.run(dtype="fp16", tp=1, allow_overflow=True)
    assert again["kept"]
    assert (again["warnings"], snapshot(site.destination)) == (done["warnings"], wanted)
