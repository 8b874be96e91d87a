"""The staging area by itself: what it takes for granted, what it looks at twice, and what it leaves behind."""

import json
import os
import shutil
from typing import NamedTuple

import pytest

from shardctl.base.errors import DestinationError
from shardctl.conversion.engine.journal import BandJournal
from shardctl.conversion.engine.staging import PublicationNote, StagingArea
from shardctl.storage import linux
from shardctl.tensors.record import RECORD, CheckpointRecord, encode_record

SIZES = {"a": 1, "sub/b": 2}
MADE = encode_record(CheckpointRecord("0.1", "plan", "hf", "digest", "digest", {}, None, (), "", {}, SIZES))
FILES = {**SIZES, RECORD: len(MADE)}
TREE = "0123456789abcdef"


def fill(staging, content=b"x"):
    for path, size in SIZES.items():
        staging.write(path, content * size)
    staging.write(RECORD, MADE)


def names(tree):
    return sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*"))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def publish(out, content=b"x", **options):
    with StagingArea(out, **options) as staging:
        staging.begin(TREE, keep=False)
        fill(staging, content)
        assert staging.publish(FILES) == ()


def test_a_published_tree_is_all_that_remains(tmp_path, out):
    publish(out)
    assert names(tmp_path) == ["out", "out/a", f"out/{RECORD}", "out/sub", "out/sub/b"]


@pytest.mark.parametrize("harm", [lambda f: f.unlink(), lambda f: f.write_bytes(b"other"), lambda f: os.truncate(f, 0)])
def test_a_tree_that_somebody_changed_is_not_published(out, harm):
    with StagingArea(out) as staging:
        staging.begin(TREE, keep=False)
        fill(staging)
        harm(staging.data / "sub" / "b")
        with pytest.raises(DestinationError, match="sub/b was changed"):
            staging.publish(FILES)
    assert not out.exists()


def test_what_does_not_belong_to_the_tree_is_not_published(out):
    with StagingArea(out) as staging:
        staging.begin(TREE, keep=False)
        fill(staging)
        (staging.data / ".DS_Store").write_bytes(b"")
        staging.publish(FILES)
    assert ".DS_Store" not in names(out)


def test_leftovers_that_cannot_be_removed_are_an_error_and_not_published(out, monkeypatch):
    with StagingArea(out) as staging:
        (staging.root / "old-tree").mkdir()

        def refuse(path, *_args, **_options):
            raise OSError(39, "Directory not empty", str(path))

        monkeypatch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(DestinationError, match="Directory not empty"):
            staging.begin(TREE, keep=False)


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning_and_goes_with_the_next_run(out, monkeypatch):
    publish(out, b"1")
    with StagingArea(out, overwrite=True) as staging:
        staging.begin(TREE, keep=False)
        fill(staging, b"2")
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", lambda *_: (_ for _ in ()).throw(OSError(13, "Permission denied")))
            (warning,) = staging.publish(FILES)
        assert "the result is complete" in warning
    assert (out / "a").read_bytes() == b"2"
    with StagingArea(out, overwrite=True) as staging:
        assert staging.published
        staging.forget()
    assert names(out.parent) == sorted(["out", *(f"out/{name}" for name in names(out))])


def test_a_file_system_whose_inodes_do_not_last_costs_work_only(out, monkeypatch):
    """Then nobody can tell whether the two trees were exchanged, and neither is trusted."""
    publish(out, b"1")
    with StagingArea(out, overwrite=True) as staging:
        staging.begin(TREE, keep=False)
        BandJournal(staging.journal, {}).close()
        fill(staging, b"2")
        monkeypatch.setattr(linux, "exchange_names", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            staging.publish(FILES)
    note = staging.root / "publishing.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "inode": 1}))
    with StagingArea(out, overwrite=True) as staging:
        assert not staging.published
        assert not staging.journal.exists()
        assert names(staging.root) == ["lock"]
    assert (out / "a").read_bytes() == b"1"


def test_a_note_that_was_not_finished_is_none(tmp_path):
    path = tmp_path / "note"
    odd = (
        b'{"way": "sideways", "tree": "t", "inode": 0, "files": []}',
        b'{"way": "move", "tree": "t", "inode": 0, "files": "ab"}',
    )
    for text in (b"", b"{", b"[]", b'{"way": "rename"}', *odd):
        path.write_bytes(text)
        assert PublicationNote.read(path) is None
        assert not path.exists()
    note = PublicationNote("move", "tree", 7, ("a", "b\udcff"))
    note.write(path)
    assert PublicationNote.read(path) == note


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_space_is_asked_for_before_anything_is_written(out, monkeypatch):
    with StagingArea(out) as staging:
        staging.begin(TREE, keep=False)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**6, 0, 5000))
        staging.require_space(5000)
        with pytest.raises(DestinationError, match="needs 9,999 bytes, but its file system has 5,000 free") as raised:
            staging.require_space(9999)
        assert raised.value.exit_code == 6
        (staging.data / "kept").write_bytes(b"x" * 100_000)
        os.sync()
        staging.require_space(100_000)  # of which most is there already
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 0))
        staging.require_space(10**15)  # a file system that does not say


def test_looking_writes_nothing(tmp_path, out):
    StagingArea(out)
    StagingArea(out, overwrite=True)
    assert list(tmp_path.iterdir()) == []
    publish(out)
    with pytest.raises(DestinationError, match="already holds"):
        StagingArea(out)
    assert names(tmp_path) == sorted(["out", *(f"out/{name}" for name in names(out))])


def test_a_run_that_ends_before_its_journal_leaves_nothing(tmp_path, out):
    with StagingArea(out) as staging:
        staging.begin(TREE, keep=False)
        fill(staging)
    assert list(tmp_path.iterdir()) == []
