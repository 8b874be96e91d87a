"""The Hugging Face index: what it may say, and what it may not reach."""

from __future__ import annotations

import json
import os

import pytest

from shardctl.base.errors import HostileError, SourceError
from shardctl.libraries.files.index import read_index
from shardctl.libraries.registry import scan_checkpoint
from shardctl.storage.local import LocalSource

NAME = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def two_places(name, same_name, shards=SHARDS) -> str:
    return f'{{"weight_map":{{"{name}":"{shards[0]}","{same_name}":"{shards[1]}"}}}}'


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    for shard in SHARDS:
        (path / shard).write_bytes(b"not looked into")
    return path


def index_of(folder, content):
    (folder / NAME).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_index(LocalSource(folder), NAME)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_that_names_no_file_is_refused(folder, kind):
    for shard in SHARDS:
        (folder / shard).rename(folder / shard.replace("safetensors", kind).replace("model", "pytorch_model"))
    stem = "model" if kind == "safetensors" else "pytorch_model"
    (folder / f"{stem}.{kind}.index.json").write_text('{"metadata": {}, "weight_map": {}}')
    with pytest.raises(SourceError, match="has an empty `weight_map`"):
        scan_checkpoint(LocalSource(folder))


@pytest.mark.parametrize("targets", [(SHARDS[1],), (SHARDS[0], SHARDS[1])], ids=["itself", "in a circle"])
def test_a_shard_that_is_a_link_to_itself_is_an_error(folder, targets):
    for shard, target in zip(SHARDS[::-1], targets, strict=False):
        (folder / shard).unlink()
        (folder / shard).symlink_to(target)
    with pytest.raises(SourceError, match=r"which model\.safetensors\.index\.json names, is neither a regular file"):
        index_of(folder, {"weight_map": {"b": SHARDS[1]}})


def test_an_index_as_transformers_writes_it(folder):
    index = index_of(folder, {"metadata": {"total_size": 12}, "weight_map": {"b": SHARDS[1], "a": SHARDS[0]}})
    assert index.weight_map == {"b": SHARDS[1], "a": SHARDS[0]}
    assert list(index.weight_map) == ["b", "a"]
    assert index.total_size == 12
    assert index.shards == SHARDS
    assert index.warnings == ()


@pytest.mark.parametrize(
    ("content", "total", "warned"),
    [
        ({"weight_map": {}}, None, False),
        ({"metadata": {}, "weight_map": {}}, None, False),
        ({"metadata": {"total_size": 8.0}, "weight_map": {}}, 8, False),
        ({"metadata": {"total_size": 0, "total_parameters": 3, "mm": [{}]}, "weight_map": {}, "x": [1]}, 0, False),
        ({"metadata": {"total_size": "8"}, "weight_map": {}}, None, True),
        ({"metadata": {"total_size": -8}, "weight_map": {}}, None, True),
        ({"metadata": {"total_size": True}, "weight_map": {}}, None, True),
        ({"metadata": None, "weight_map": {}}, None, True),
        (' \n{"weight_map" : { } }\n', None, False),
        (two_places("a", "a", SHARDS[:1] * 2), None, False),
    ],
    ids=str,
)
def test_metadata_may_be_missing_or_odd(folder, content, total, warned):
    index = index_of(folder, content)
    assert index.total_size == total
    assert bool(index.warnings) == warned


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("<html><body>401</body></html>", "is a web page"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        ("[]", "expected a JSON object"),
        ("{}", "has no `weight_map`"),
        ('{"metadata":{}}', "has no `weight_map`"),
        ('{"weight_map":[]}', "expected a JSON object"),
        ('{"weight_map":{"a":1}}', "the file of tensor 'a': expected a string"),
        ('{"weight_map":{"a":null}}', "the file of tensor 'a': expected a string"),
        ('{"weight_map":{"a":["x"]}}', "the file of tensor 'a': expected a string"),
        (two_places("a", "a"), f"'a' is placed in both {SHARDS[0]} and {SHARDS[1]}"),
        (two_places("a", "\\u0061"), "'a' is placed in both"),
        ('{"weight_map":{},"weight_map":{}}', "'weight_map' appears twice"),
        ('{"weight_map":{"\\ud800":"x"}}', "lone surrogate"),
        ('{"weight_map":{}', "expected ','"),
        ('{"weight_map":{}}x', "expected the end"),
        ('{"metadata":' + "[" * 100_000 + ',"weight_map":{}}', "nested too deep"),
        ('{"metadata":{"a":1,"a":2},"weight_map":{}}', "'a' appears twice"),
        ("{" + ",".join(f'"k{i}":0' for i in range(99)) + "}", "more than 64 members"),
        ('{"metadata":"' + "x" * 2_000_000 + '","weight_map":{}}', "longer than 1,000,000"),
    ],
    ids=lambda value: value[:40],
)
def test_a_malformed_index_is_refused(folder, content, message):
    with pytest.raises(SourceError) as raised:
        index_of(folder, content)
    assert message in raised.value.message
    assert NAME in raised.value.message
    assert len(raised.value.message) < 500


def test_an_index_that_is_not_text_is_refused(folder):
    (folder / NAME).write_bytes(b'{"weight_map":{"\xff":1}}')
    with pytest.raises(SourceError, match="not UTF-8 text: byte 16 is 0xff"):
        read_index(LocalSource(folder), NAME)


@pytest.mark.parametrize(
    "name",
    [
        "..", "../secret.safetensors", "/etc/passwd", "sub/../../secret.safetensors", "sub/../model.safetensors",
        "..\\secret.safetensors", "\\\\host\\share", "C:secret.safetensors", "c:\\x", "sub/c:x",
        "https://example.com/x.safetensors",
    ],
)  # fmt: skip
def test_a_shard_that_leaves_the_directory_is_hostile(folder, name):
    (folder.parent / "secret.safetensors").write_bytes(b"secret")
    (folder / "sub").mkdir()
    (folder / "sub" / "model.safetensors").write_bytes(b"")
    with pytest.raises(HostileError, match="may lie outside of its directory"):
        index_of(folder, {"weight_map": {"a": name}})


@pytest.mark.parametrize("name", ["", ".", "a\0b", "n" * 300, "sub/", "sub/."])
def test_a_name_that_no_file_has_is_hostile(folder, name):
    with pytest.raises(HostileError, match="cannot be the name of a file"):
        index_of(folder, {"weight_map": {"a": name}})


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("./model.safetensors", "model.safetensors"),
        ("sub/model.safetensors", "sub/model.safetensors"),
        (".//sub/./model.safetensors", "sub/model.safetensors"),
    ],
)
def test_a_shard_inside_of_the_directory_is_found(folder, name, inside):
    (folder / inside).parent.mkdir(exist_ok=True)
    (folder / inside).write_bytes(b"")
    assert index_of(folder, {"weight_map": {"a": name, "b": SHARDS[0]}}).weight_map == {"a": inside, "b": SHARDS[0]}


def test_a_folder_that_is_a_link_out_of_the_directory_is_hostile(folder):
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere" / "x.safetensors").write_bytes(b"secret")
    (folder / "sub").symlink_to(folder.parent / "elsewhere")
    with pytest.raises(HostileError, match="is a link that leaves the checkpoint's directory"):
        index_of(folder, {"weight_map": {"a": "sub/x.safetensors"}})


def test_a_missing_shard_is_named(folder):
    (folder / SHARDS[1]).unlink()
    with pytest.raises(SourceError, match=f"{SHARDS[1]} is missing, though {NAME} names it") as raised:
        index_of(folder, {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}})
    assert raised.value.exit_code == 4


@pytest.mark.parametrize("suffix", [".incomplete", ".aria2", ".part"])
def test_an_unfinished_download_is_named(folder, suffix):
    (folder / (SHARDS[1] + suffix)).write_bytes(b"")
    with pytest.raises(SourceError, match="is not completely downloaded"):
        index_of(folder, {"weight_map": {"b": SHARDS[1]}})


def test_what_is_no_regular_file_is_refused_without_opening_it(folder):
    (folder / SHARDS[0]).unlink()
    os.mkfifo(folder / SHARDS[0])
    with pytest.raises(SourceError, match="neither a regular file nor a link to one"):
        index_of(folder, {"weight_map": {"a": SHARDS[0]}})
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).mkdir()
    with pytest.raises(SourceError, match="neither a regular file nor a link to one"):
        index_of(folder, {"weight_map": {"a": SHARDS[0]}})
    (folder / SHARDS[0]).rmdir()
    (folder / SHARDS[0]).symlink_to("nothing")
    with pytest.raises(SourceError, match="neither a regular file nor a link to one"):
        index_of(folder, {"weight_map": {"a": SHARDS[0]}})
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).symlink_to("/dev/zero")
    with pytest.raises(HostileError, match="is a link that leaves the checkpoint's directory"):
        index_of(folder, {"weight_map": {"a": SHARDS[0]}})


@pytest.mark.parametrize(
    "outside", ["secret.safetensors", "blobs/secret", "elsewhere/" + "a" * 64, "blobs/ff/" + "a" * 64, "blobs/aa/x"]
)
def test_a_link_that_leaves_the_directory_is_refused(folder, outside):
    target = folder.parent / outside
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"secret")
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).symlink_to(target)
    with pytest.raises(HostileError, match="is a link that leaves the checkpoint's directory"):
        index_of(folder, {"weight_map": {"a": SHARDS[0]}})


def test_a_link_within_the_directory_is_followed(folder):
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).symlink_to(SHARDS[1])
    assert index_of(folder, {"weight_map": {"a": SHARDS[0]}}).shards == (SHARDS[0],)


@pytest.mark.parametrize("digest", ["0123456789abcdef" * 4, "0123456789" * 4])
@pytest.mark.parametrize("shared", [False, True], ids=["own-blobs", "shared-blobs"])
def test_the_links_of_the_hugging_face_cache_are_followed(tmp_path, digest, shared):
    repo = tmp_path / "hub" / "models--owner--name"
    snapshot = repo / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    blob = repo / "blobs" / digest
    if shared:
        store = tmp_path / "hub" / "blobs" / "01" / ("01" * 32)
        store.parent.mkdir(parents=True)
        store.write_bytes(b"weights")
        blob.symlink_to(os.path.relpath(store, blob.parent))
    else:
        blob.write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{digest}")
    (repo / "blobs" / ("ab" * 20)).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    (snapshot / NAME).symlink_to("../../blobs/" + "ab" * 20)
    assert read_index(LocalSource(snapshot), NAME).shards == ("model.safetensors",)


def test_an_index_of_unreadable_size_is_refused(folder):
    with (folder / NAME).open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(SourceError, match="100,000,001 bytes"):
        read_index(LocalSource(folder), NAME)


def test_a_tensor_must_be_in_the_shard_that_is_named(folder):
    index = index_of(folder, {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}})
    with pytest.raises(SourceError, match=f"'b' in {SHARDS[1]}, which does not hold it; {SHARDS[0]} does"):
        index.check({SHARDS[0]: {"a": 4, "b": 4}, SHARDS[1]: {"c": 4}})
    with pytest.raises(SourceError, match=f"'b' in {SHARDS[1]}, which does not hold it(\\n|$)"):
        index.check({SHARDS[0]: {"a": 4}, SHARDS[1]: {}})


def test_what_the_index_does_not_say_is_warned_of(folder):
    index = index_of(folder, {"metadata": {"total_size": 9}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1]}})
    warnings = index.check({SHARDS[0]: {"a": 4, "b": 4}, SHARDS[1]: {"b": 4, "c": 4, "d": 4}})
    assert warnings == (
        f"{SHARDS[0]} holds tensor 'b', which {NAME} places in another file",
        f"{SHARDS[1]} holds tensor 'c' and 1 others, which {NAME} does not name",
        f"{NAME} says 9 bytes of tensors; those that it names have 8",
    )
    right = index_of(folder, {"metadata": {"total_size": 8}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1]}})
    assert right.check({SHARDS[0]: {"a": 4}, SHARDS[1]: {"b": 4}}) == ()
