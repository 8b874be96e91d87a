"""A source that changes: under the run it is an error and nothing is published, between runs it means starting anew."""

import os
import shutil

import pytest
from crash_site import checkpoint, flip, snapshot
from faults import edit_in_place
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


@pytest.mark.parametrize("fraction", [0.6, 0.9])
def test_an_edit_in_place_between_runs_is_found_though_size_time_and_inode_are_the_same(site, fraction):
    """Only the status change time tells of it, so the file's bands are compared with what the file holds now."""
    _, done = clean(site)
    killed(site, int(len(done["calls"]) * fraction))
    bands = site.journalled()
    edit_in_place(site.source / FIRST)
    wanted, other = clean_beside(site)
    killed(site, int(len(done["calls"]) * 0.25))  # also where the comparison itself was interrupted
    again = finish(site, wanted)
    assert again["digest"] == other["digest"] != done["digest"]
    assert bands
    assert again["kept"] > 0, "bands that are as they were are kept"


def touch_link(path):
    path.with_name("link").hardlink_to(path)
    path.with_name("link").unlink()


@pytest.mark.parametrize("touch", [lambda path: path.chmod(0o600), touch_link], ids=["chmod", "hard link"])
def test_a_touch_between_runs_costs_a_comparison_and_no_work(site, touch):
    wanted, done = clean(site)
    number, kept = int(len(done["calls"]) * 0.8), []
    for touched in (False, True):
        killed(site, number)
        if touched:
            touch(site.source / FIRST)
        kept.append(finish(site, wanted)["kept"])
        site.clear()
    assert kept[0] == kept[1] > 0


@pytest.mark.parametrize("what", ["edit", "chmod"])
@pytest.mark.parametrize("moment", [0.2, 0.75])
def test_an_edit_in_place_under_the_run_is_compared_before_anything_is_published(site, what, moment):
    _, done = clean(site)
    number = int(moment * [name for name, _ in done["calls"]].index("rename"))
    again = site.run({"actions": {number: [what, str(site.source / FIRST)]}})
    assert again["code"] == 0, again["message"]
    result = snapshot(site.destination)
    site.clear()
    wanted, other = clean_beside(site)
    assert result == wanted
    assert again["digest"] == other["digest"]
    assert (other["digest"] == done["digest"]) == (what == "chmod")


def test_a_source_that_is_touched_again_and_again_is_an_error(site):
    wanted, done = clean(site)
    often = {number: ["chmod", str(site.source / FIRST)] for number in range(3 * len(done["calls"]))}
    failed = site.run({"actions": often})
    assert (failed["code"], failed["error"]) == (4, "TouchedError")
    assert FIRST in failed["message"]
    assert snapshot(site.destination) is None
    finish(site, wanted)


def test_an_edit_in_place_after_the_result_got_its_name_is_not_called_done(site):
    _, done = clean(site)
    killed(site, [name for name, _ in done["calls"]].index("rename") + 1)
    assert snapshot(site.destination) is not None
    edit_in_place(site.source / FIRST)
    failed = site.run()
    assert failed["code"] == 6
    assert "for an earlier state of" in failed["message"]


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
