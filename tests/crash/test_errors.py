"""Disks that are full or broken: the error is told, nothing is published, and the same command finishes later."""

import os
import shutil
from itertools import cycle

import pytest
from crash_site import checkpoint, snapshot
from faults import FILLING
from test_kill import clean, finish, killed

NOBODY = 65534


def assert_told(done):
    assert done["code"] in {5, 6}, done["message"]
    assert done["error"] in {"DestinationError", "AccessError"}


def test_any_call_may_fail_and_nothing_looks_finished_that_is_not(site):
    wanted, done = clean(site, sha256=True)
    names = [name for name, _ in done["calls"]]
    taken = names.index("rename")
    for number, code in zip(range(len(names)), cycle(["ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES"]), strict=False):
        failed = site.run({"errors": {number: code}}, sha256=True)
        if failed["code"]:
            assert_told(failed)
        else:
            assert number > taken or names[number] == "mkdir", f"{code} of {names[number]} went unnoticed"
        assert snapshot(site.destination) == (None if failed["code"] and number <= taken else wanted)
        finish(site, wanted, sha256=True)
        site.clear()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_disk_that_fills_up_keeps_what_was_synced_before(site, threads):
    wanted, done = clean(site)
    names = [name for name, _ in done["calls"]]
    for number in range(names.index("reserve"), names.index("rename"), 7):
        failed = site.run({"full_from": number}, threads=threads)
        if threads > 1 and not FILLING.intersection(name for name, _ in failed["calls"][number:]):
            site.clear()
            continue  # calls come in another order each time, and nothing was written after this one
        assert failed["code"] == 6
        assert "No space left on device" in failed["message"]
        assert "same command" in failed["hint"]
        assert snapshot(site.destination) is None
        bands = site.journalled()
        assert (finish(site, wanted, threads=threads)["kept"] > 0) == (bands > 0)
        site.clear()


def test_the_kernel_refuses_a_file_that_is_too_large(site):
    failed = site.run(largest_file=20_000)
    assert failed["code"] == 6
    assert "File too large" in failed["message"]
    finish(site, clean_elsewhere(site))


def clean_elsewhere(site):
    other = site.root / "elsewhere"
    site.runner(site.source, other)
    wanted = snapshot(other)
    shutil.rmtree(other)
    return wanted


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failed_fsync_is_final(site, threads):
    """A second fsync would report success: what the first one lost must not be called synced by anybody."""
    wanted, done = clean(site)
    synced = [n for n, (name, path) in enumerate(done["calls"]) if name == "fsync" and path.endswith(".safetensors")]
    lost = 0
    for number in synced:
        failed = site.run({"errors": {number: "EIO"}}, threads=threads)
        assert_told(failed)
        assert snapshot(site.destination) is None
        name, path = failed["calls"][number]
        if name == "fsync":  # with several threads it may be another call that has this number
            assert [name, path] not in failed["calls"][number + 1 :], "it was tried again"
            lost += 1
        finish(site, wanted, threads=threads)
        site.clear()
    assert lost > len(synced) // 3


def test_short_writes_are_continued(site):
    wanted, done = clean(site, dtype="bf16")
    short = site.run({"short": True}, dtype="bf16")
    assert short["code"] == 0
    assert len(short["calls"]) > 2 * len(done["calls"])
    assert snapshot(site.destination) == wanted


def test_an_exchange_that_fails_half_way_is_undone(site, tmp_path):
    site.runner(checkpoint(tmp_path / "before", seed=1), site.destination)
    old = snapshot(site.destination)
    done = site.run({"no_exchange": True}, overwrite=True)
    wanted = snapshot(site.destination)
    site.clear()
    site.runner(tmp_path / "before", site.destination)
    second = [n for n, (name, _) in enumerate(done["calls"]) if name == "rename"][1]
    assert_told(site.run({"no_exchange": True, "errors": {second: "EIO"}}, overwrite=True))
    assert snapshot(site.destination) == old
    finish(site, wanted, {"no_exchange": True}, overwrite=True)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_modes_follow_the_umask_for_files_and_directories(site, umask):
    assert site.run(umask=umask, sha256=True)["code"] == 0
    for path in [site.destination, *site.destination.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_missing_parents_are_made(site):
    destination = site.root / "a" / "b" / "c"
    assert site.runner(site.source, destination)["code"] == 0
    assert [path.name for path in destination.parent.iterdir()] == ["c"]


def test_a_link_to_a_directory_is_followed(site):
    wanted, _ = clean(site)
    real = site.root / "elsewhere" / "real"
    real.mkdir(parents=True)
    site.destination.symlink_to(real)
    assert site.run()["code"] == 0
    assert site.destination.is_symlink()
    assert snapshot(real) == wanted
    assert site.run(overwrite=True)["code"] == 0
    assert site.destination.is_symlink()
    assert snapshot(real) == wanted
    assert sorted(p.name for p in real.parent.iterdir()) == ["real"]
    site.destination.unlink()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda out: out.write_text("mine"), "is not a directory"),
        (lambda out: (out.mkdir(), (out / "thesis.tex").write_text("mine")), "was not written by shardctl"),
        (lambda out: out.symlink_to("nowhere"), "is a link whose target does not exist"),
    ],
)
def test_what_is_not_ours_is_refused_and_left_alone(site, prepare, message):
    prepare(site.destination)
    before = snapshot(site.root)
    refused = site.run(overwrite=True)
    assert refused["code"] == 6, refused["message"]
    assert message in refused["message"]
    assert refused["calls"] == []
    assert snapshot(site.root) == before


def test_a_finished_checkpoint_is_not_replaced_unasked_even_by_a_resumed_run(site, tmp_path):
    """It may have come there while the run was down."""
    wanted, done = clean(site)
    killed(site, len(done["calls"]) // 2)
    site.runner(checkpoint(tmp_path / "other", seed=1), tmp_path / "out")
    shutil.copytree(tmp_path / "out", site.destination)
    refused = site.run()
    assert refused["code"] == 6, refused["message"]
    assert "--overwrite" in refused["hint"]
    assert snapshot(site.destination) == snapshot(tmp_path / "out")
    finish(site, wanted, overwrite=True)


@pytest.mark.parametrize("moment", [0.3, 0.9])
def test_a_finished_checkpoint_that_arrives_during_the_run_is_not_replaced(site, tmp_path, moment):
    wanted, done = clean(site)
    arriving = site.root / "arriving"
    site.runner(checkpoint(tmp_path / "other", seed=1), arriving)
    before = snapshot(arriving)
    number = int(moment * [name for name, _ in done["calls"]].index("rename"))
    refused = site.run({"actions": {number: ["arrive", str(arriving)]}})
    assert refused["code"] == 6
    assert "--overwrite" in refused["hint"]
    assert snapshot(site.destination) == before
    shutil.rmtree(site.destination)
    assert finish(site, wanted)["written"] == 0, "nothing of the work is lost"


def test_a_destination_that_appears_meanwhile_is_left_alone(site):
    wanted, done = clean(site)
    rename = [name for name, _ in done["calls"]].index("rename")
    site.destination.mkdir()
    (site.destination / "mine").write_text("mine")
    killed_before = site.run()
    assert killed_before["code"] == 6
    shutil.rmtree(site.destination)
    killed(site, rename)
    site.destination.mkdir()
    (site.destination / "mine").write_text("mine")
    assert_told(site.run())
    assert (site.destination / "mine").read_text() == "mine"
    shutil.rmtree(site.destination)
    finish(site, wanted)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
class TestAsSomebodyElse:
    @pytest.fixture
    def site(self, site):
        site.root.chmod(0o755)
        return site

    def test_a_parent_that_cannot_be_written_is_refused_before_anything_is_done(self, site):
        refused = site.run(user=NOBODY)
        assert refused["code"] == 5, refused["message"]
        assert site.names() == ["source"]

    def test_an_empty_directory_of_theirs_is_filled_from_within(self, site):
        wanted, _ = clean(site)
        site.destination.mkdir()
        os.chown(site.destination, NOBODY, NOBODY)
        assert site.run(user=NOBODY)["code"] == 0
        assert snapshot(site.destination) == wanted

    def test_a_full_directory_that_cannot_be_replaced_is_refused_first(self, site):
        site.destination.mkdir()
        os.chown(site.destination, NOBODY, NOBODY)
        site.run(user=NOBODY)
        before = snapshot(site.destination)
        refused = site.run(user=NOBODY, overwrite=True)
        assert refused["code"] == 6, refused["message"]
        assert refused["calls"] == []
        assert snapshot(site.destination) == before

    def test_a_staging_area_laid_by_somebody_else_is_refused(self, site, tmp_path):
        site.root.chmod(0o777)
        victim = tmp_path / "victim"
        victim.write_text("precious")
        tree = site.staging / "data"
        tree.mkdir(parents=True)
        (tree / "config.json").symlink_to(victim)
        site.staging.chmod(0o777)
        os.chown(site.staging, NOBODY, NOBODY)
        refused = site.run()
        assert refused["code"] == 6, refused["message"]
        assert "not made by this user" in refused["message"]
        assert victim.read_text() == "precious"

    def test_a_source_that_may_not_be_read_is_said(self, site):
        (site.source / "model-00002-of-00002.safetensors").chmod(0o600)
        site.root.chmod(0o777)
        refused = site.run(user=NOBODY)
        assert refused["code"] == 5, refused["message"]
        assert site.names() == ["source"]
