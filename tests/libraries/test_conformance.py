"""Every reader and every writer gets the same cases, and says in its sample what its library cannot do, and why.

A library that is added to the catalogue without a sample fails here.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import zipfile
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
import torch
from interrupting import InterruptingProgress
from safetensors.torch import load_file, save_file
from samples import LLAMA, READERS, WRITERS, read_result
from stored_bits import bits

from shardctl.api import ReshardOptions, ShardctlError, SourceOptions, digest, reshard
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.cli.program import run
from shardctl.libraries.catalogue import FORMATS, LAYOUT_FILES
from shardctl.libraries.files.extra_tensors import EXTRA_FILE
from shardctl.libraries.registry import detect_format
from shardctl.storage.addresses import open_source
from shardctl.tensors.manifest import Region

DAMAGES = {
    "cut in half": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data.rstrip(b"\n")[:-1],
    "a web page": lambda _: b"<!DOCTYPE html>\n<html><body>Access to this model is restricted</body></html>\n",
    "a Git LFS pointer": lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
}
STRANGERS = {
    "0-d": ("extra.scalar", torch.tensor(1.5)),
    "empty": ("extra.none", torch.zeros(0, 4)),
    "name that climbs": ("../outside", torch.ones(2)),
    "name that climbs later": ("a/../../../outside", torch.ones(2)),
    "name that is a path": ("/tmp/conformance-outside", torch.ones(2)),  # noqa: S108 - nothing is to be there
    "name of a folder": ("..", torch.ones(2)),
    "name with NUL": ("a\0b", torch.ones(2)),
    "name of nothing": ("", torch.ones(2)),
    "name of 300 characters": ("x" * 300, torch.ones(2)),
}
"""Tensors that no model has, by kind."""


def stored(tensors):
    """The type, the shape and the bits of each tensor."""
    return {name: (tensor.dtype, tuple(tensor.shape), bits(tensor)) for name, tensor in tensors.items()}


def tree(folder):
    """The bytes of every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def matches(path, patterns):
    """What is said of the first pattern that fits; None if none does."""
    return next((value for pattern, value in patterns.items() if fnmatchcase(path, pattern)), None)


def save_model(folder, model, tensors, **changes):
    """A checkpoint of Hugging Face with the config of `model`, but for what is changed."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((model / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes the sample of a reader once; it is not to be changed."""

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp(name) / "sample"
        READERS[name].make(folder)
        return folder

    return make


@pytest.fixture
def shardctl(capfd, monkeypatch):
    """Runs a command line; gives the exit code and what was said, on one line."""
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, " ".join((out + err).split())

    return call


def test_every_library_has_a_sample():
    assert list(READERS) == [each.name for each in FORMATS]
    assert list(WRITERS) == list(LAYOUT_FILES)


@pytest.mark.parametrize("name", READERS)
class TestReader:
    def test_what_the_sample_declares_is_about_files_that_it_has(self, made, name):
        sample, paths = READERS[name], tree(made(name))
        declared = sample.ignored | sample.optional | sample.said | sample.slack
        assert [pattern for pattern in declared if not any(fnmatchcase(path, pattern) for path in paths)] == []
        assert any(not matches(path, sample.ignored | sample.optional) for path in paths)

    def test_it_is_detected_by_its_marks_and_no_other_is(self, made, name):
        with_marks = {name, "safetensors"} if _names_safetensors(name) else {name}
        source = open_source(made(name))
        assert {each.name for each in FORMATS if each.detect(source)} == with_marks
        assert detect_format(source).name == name

    def test_it_gives_the_tensors_that_its_library_saved(self, made, tmp_path, name):
        sample = READERS[name]
        reshard(made(name), tmp_path / "hf", ReshardOptions(to="hf"), source_options=sample.source_options)
        assert stored(read_result(tmp_path / "hf")) == stored(sample.weights())
        read = digest(made(name), source_options=sample.source_options)
        assert read.digest == digest(tmp_path / "hf").digest
        assert {key: found.shape for key, found in read.tensors.items()} == {
            key: tuple(tensor.shape) for key, tensor in sample.weights().items()
        }

    def test_a_missing_file_is_an_error_that_names_it(self, made, tmp_path, shardctl, name):
        sample = READERS[name]
        for path, code, said, expected in _damaged(
            made(name), tmp_path, shardctl, sample, lambda path, _: path.unlink()
        ):
            if matches(path, sample.ignored | sample.optional):
                assert (code, said) == (0, expected), f"{path}: {said}"
            else:
                folder = Path(path).parent.as_posix()
                named = matches(path, sample.said) or (folder if path not in said and folder != "." else path)
                assert code == 4, f"{path}: {said}"
                assert named in said

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_damaged_file_is_an_error_that_names_it(self, made, tmp_path, shardctl, name, damage):
        sample = READERS[name]
        harm = DAMAGES[damage]
        for path, code, said, expected in _damaged(
            made(name), tmp_path, shardctl, sample, lambda path, data: path.write_bytes(harm(data))
        ):
            if matches(path, sample.ignored):
                assert (code, said) == (0, expected), f"{path}: {said}"
            elif code == 0:  # what no tensor needs: the last byte of a page, say
                assert damage == "without its last byte", path
                assert said == expected, path
                assert matches(path, sample.slack), path
            else:
                assert code == 4, f"{path}: {said}"
                assert path in said or (matches(path, sample.said) or path) in said

    def test_a_pickle_that_runs_code_is_hostile_and_does_not_run(self, made, tmp_path, shardctl, name):
        sample, mark = READERS[name], tmp_path / "ran"

        def harm(path, data):
            evil = pickle.dumps({"weight": RunsCode(f"touch {mark}")}, protocol=2)
            path.write_bytes(archive(evil) if data.startswith(b"PK") else evil)

        for path, code, said, expected in _damaged(made(name), tmp_path, shardctl, sample, harm, only=is_pickle):
            if matches(path, sample.ignored):
                assert (code, said) == (0, expected), f"{path}: {said}"
            else:
                assert code == 4, f"{path}: {said}"
                assert path in said
                assert "which runs code" in said
            assert not mark.exists(), path

    def test_a_link_that_leaves_the_directory_is_hostile(self, made, tmp_path, shardctl, name):
        sample = READERS[name]

        def harm(path, _):
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")

        for path, code, said, expected in _damaged(made(name), tmp_path, shardctl, sample, harm):
            if code == 0:
                assert matches(path, sample.ignored), path
                assert said == expected, path
            else:
                assert code == 4, f"{path}: {said}"
                assert f"{path} is a link that leaves the checkpoint's directory" in said

    def test_other_safetensors_files_beside_it_are_the_checkpoint(self, made, tmp_path, name):
        if not _names_safetensors(name):
            return
        copy = shutil.copytree(made(name), tmp_path / "copy")
        shutil.copy((WRITERS[name].model if name in WRITERS else LLAMA) / "model.safetensors", copy)
        assert detect_format(open_source(copy)).name == "safetensors"

    def test_replicas_that_differ_are_an_error(self, made, tmp_path, shardctl, name):
        sample = READERS[name]
        with open_checkpoint(made(name), sample.source_options) as checkpoint:
            twice = {
                tensor.name: copies for tensor in checkpoint.manifest.tensors.values() if (copies := _copies(tensor))
            }
        assert bool(twice) != bool(sample.no_replicas)
        if not twice:
            return
        tensor, (_, where) = next(iter(twice.items()))
        copy = shutil.copytree(made(name), tmp_path / "copy")
        data = bytearray((copy / where.file).read_bytes())
        data[where.offset] ^= 1
        (copy / where.file).write_bytes(data)
        code, said = shardctl("digest", copy, *sample.arguments)
        assert code == 4
        assert f"{tensor}: copies differ in 1 element" in said
        assert where.file in said


def _names_safetensors(name):
    return any(each.name == name and each.names_safetensors for each in FORMATS)


def _copies(tensor):
    """Two places of a tensor that hold the same box."""
    seen = {}
    for chunk in tensor.chunks:
        if isinstance(chunk.where, Region):
            first = seen.setdefault(chunk.box, chunk.where)
            if first != chunk.where:
                return first, chunk.where
    return None


class RunsCode:
    """Runs a command of the shell when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def archive(data):
    """A file of `torch.save` with the pickle `data`."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as records:
        records.writestr("archive/data.pkl", data)
        records.writestr("archive/version", "3\n")
    return made.getvalue()


def is_pickle(path):
    """Whether a file is one of `torch.save`, or a pickle; items of `.distcp` files are at offsets of their own."""
    return path.suffix not in {".distcp", ".safetensors"} and path.read_bytes().startswith((b"PK", b"\x80"))


def _damaged(folder, tmp_path, shardctl, sample, harm, only=lambda _: True):
    """Harm one file after another; gives what `digest` said, and what it says of the sound checkpoint.

    Of files that have the same name in many folders, two stand for all.
    """
    copy = shutil.copytree(folder, tmp_path / "copy")
    code, expected = shardctl("digest", copy, *sample.arguments)
    assert code == 0
    paths = sorted(path for path in copy.rglob("*") if path.is_file())
    for path in [path for path in paths if path in [other for other in paths if other.name == path.name][:2]]:
        if not only(path):
            continue
        sound = path.read_bytes()
        harm(path, sound)
        yield (path.relative_to(copy).as_posix(), *shardctl("digest", copy, *sample.arguments), expected)
        path.unlink(missing_ok=True)
        path.write_bytes(sound)


@pytest.mark.parametrize("name", WRITERS)
class TestWriter:
    def test_what_is_written_has_the_same_digest_and_goes_back_to_the_same_bits(self, tmp_path, name):
        sample = WRITERS[name]
        assert_goes_back(sample.model, tmp_path, ReshardOptions(to=name, mesh=sample.mesh))

    def test_two_runs_write_the_same_bytes_and_so_does_one_that_was_interrupted(self, tmp_path, name):
        sample = WRITERS[name]
        reshard_options = ReshardOptions(to=name, mesh=sample.mesh, threads=1)
        for run_name in ("first", "second"):
            reshard(sample.model, tmp_path / run_name / "out", reshard_options)
        interrupted = tmp_path / "interrupted" / "out"
        with pytest.raises(ShardctlError, match="interrupted") as raised:
            reshard(sample.model, interrupted, reshard_options, progress=InterruptingProgress())
        assert raised.value.exit_code == 128 + signal.SIGINT
        assert not interrupted.exists()
        assert reshard(sample.model, interrupted, reshard_options).kept_bytes > 0
        first = tree(tmp_path / "first")
        assert tree(tmp_path / "second") == first
        assert tree(tmp_path / "interrupted") == first

    def test_a_tie_is_kept(self, tmp_path, name):
        sample = WRITERS[name]
        tensors = load_file(sample.model / "model.safetensors")
        del tensors["lm_head.weight"]
        source = save_model(tmp_path / "source", sample.model, tensors, tie_word_embeddings=True)
        assert_goes_back(source, tmp_path, ReshardOptions(to=name, mesh=sample.mesh))

    def test_a_cast_is_that_of_torch(self, tmp_path, name):
        sample = WRITERS[name]
        random = torch.Generator().manual_seed(0)
        tensors = {
            key: torch.randn(tensor.shape, generator=random)
            for key, tensor in load_file(sample.model / "model.safetensors").items()
        }
        source = save_model(tmp_path / "source", sample.model, tensors, dtype="float32")
        reshard(source, tmp_path / "out", ReshardOptions(to=name, mesh=sample.mesh, dtype="bf16"))
        back = read_back(tmp_path / "out", source / "config.json", tmp_path / "back")
        assert stored(back) == stored({key: tensor.bfloat16() for key, tensor in tensors.items()})

    @pytest.mark.parametrize("kind", STRANGERS)
    def test_a_strange_tensor_is_kept_or_refused_by_name_and_nothing_is_written_elsewhere(
        self, tmp_path, shardctl, name, kind
    ):
        sample = WRITERS[name]
        stranger, value = STRANGERS[kind]
        place = tmp_path / "a/b/c"
        if sample.modelless:
            place.mkdir(parents=True)
            (place / "source").mkdir()
            save_file({"known": torch.ones(2, 3), stranger: value}, place / "source/model.safetensors")
        else:
            known = load_file(sample.model / "model.safetensors")
            save_model(place / "source", sample.model, known | {stranger: value})
        mesh = [] if sample.modelless or sample.mesh is None else ["--tp", "2"]
        before = tree(tmp_path)
        code, said = shardctl("reshard", place / "source", place / "out", "--to", name, *mesh)
        refused = matches(kind, sample.refuses)
        assert code == (4 if refused else 0), said
        if refused:
            assert refused in said
            assert not (place / "out").exists()
        else:
            assert digest(place / "out").digest == digest(place / "source").digest
            extra = {} if sample.modelless else {stranger: value}  # a model's class does not have it
            assert stored(load_file(file) if (file := place / "out" / EXTRA_FILE).exists() else {}) == stored(extra)
            shutil.rmtree(place / "out")
        assert tree(tmp_path) == before
        assert not Path("/tmp/conformance-outside").exists()  # noqa: S108


def assert_goes_back(source, tmp_path, reshard_options):
    """Write `source` as is wished, and find the same digest and the same bits."""
    reshard(source, tmp_path / "out", reshard_options)
    assert (
        digest(tmp_path / "out", source_options=SourceOptions(config=source / "config.json")).digest
        == digest(source).digest
    )
    back = read_back(tmp_path / "out", source / "config.json", tmp_path / "back")
    assert stored(back) == stored(load_file(source / "model.safetensors"))


def read_back(folder, config, back):
    """The tensors of a checkpoint, by way of Hugging Face's files."""
    reshard(folder, back, ReshardOptions(to="hf"), source_options=SourceOptions(config=config))
    return load_file(back / "model.safetensors")
