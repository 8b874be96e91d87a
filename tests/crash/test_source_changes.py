"""A source that changes: under the run it is an error and nothing is published, between runs it means starting anew."""

import os
import shutil

import pytest
from crash_site import checkpoint, flip, snapshot
from test_kill import clean, finish, killed

FIRST = "model-00001-of-00002.safetensors"


def touch(path, stat):
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("what", ["truncate", "modify", "replace", "delete"])
@pytest.mark.parametrize("file", [FIRST, "tokenizer.json"])
@pytest.mark.parametrize("moment", [0.2, 0.5, 0.75])
def test_a_change_under_the_run_is_an_error_and_nothing_is_published(site, tmp_path, what, file, moment):
    wanted, done = clean(site)
    shutil.copytree(site.source, tmp_path / "source")
    before = (site.source / file).stat()
    number = int(moment * [name for name, _ in done["calls"]].index("rename"))
    failed = site.run({"actions": {number: [what, str(site.source / file)]}})
    assert failed["code"] == 4, failed["message"]
    assert failed["error"] == "ChangedError"
    assert file in failed["message"]
    assert snapshot(site.destination) is None
    assert site.names() == ["source"], "what was read of a changed source is worth nothing"
    # Put back as it was, even with its old time and where possible its old inode: nothing of the changed bytes remains.
    (site.source / file).write_bytes((tmp_path / "source" / file).read_bytes())
    touch(site.source / file, before)
    finish(site, wanted)


def test_a_source_that_changed_between_runs_is_read_anew(site):
    _, done = clean(site)
    killed(site, int(len(done["calls"]) * 0.8))
    flip(site.source / FIRST)
    wanted, other = clean_beside(site)
    again = finish(site, wanted)
    assert again["kept"] == 0
    assert again["digest"] == other["digest"] != done["digest"]


def clean_beside(site, **options):
    """What an undisturbed run makes now, without touching what was interrupted."""
    place = site.root / "beside"
    done = site.runner(site.source, place, **options)
    wanted = snapshot(place)
    shutil.rmtree(place)
    return wanted, done


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tp": 2}, {"tp": 1}),
        ({"tp": 1}, {"tp": 2}),
        ({"tp": 2}, {"tp": 2, "dtype": "bf16"}),
        ({"tp": 2}, {"tp": 2, "sha256": True}),
        ({"tp": 2, "sha256": True}, {"tp": 2}),
        ({"tp": 2}, {"tp": 2, "resume": False}),
    ],
)
def test_what_another_command_left_is_thrown_away(site, first, second):
    wanted, _ = clean(site, **second)
    _, done = clean(site, **first)
    for fraction in (0.3, 0.7, 0.97):
        killed(site, int(len(done["calls"]) * fraction), **first)
        if snapshot(site.destination) is None:
            assert finish(site, wanted, **second)["kept"] == 0
        site.clear()


def test_another_number_of_threads_goes_on_with_the_same_work(site):
    wanted, done = clean(site)
    killed(site, int(len(done["calls"]) * 0.8))
    assert finish(site, wanted, threads=4)["kept"] > 0


def test_a_source_with_other_side_files_starts_anew(site):
    _, done = clean(site)
    killed(site, int(len(done["calls"]) * 0.8))
    (site.source / "new.txt").write_text("new")
    wanted, _ = clean_beside(site)
    assert "new.txt" in wanted
    finish(site, wanted)


def test_a_copy_of_the_source_elsewhere_may_take_its_place_only_by_starting_anew(site):
    wanted, done = clean(site)
    killed(site, int(len(done["calls"]) * 0.8))
    shutil.rmtree(site.source)
    checkpoint(site.source)
    assert finish(site, wanted)["kept"] == 0
