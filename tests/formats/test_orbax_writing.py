"""What is written for Orbax: plain zarr chunks that tensorstore reads, and that are read again without it."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from safetensors.torch import load_file

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.orbax import plain_arrays
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.storage.local import LocalSource
from shardctl.storage.orbax import OrbaxSource
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

SOURCE = Path(__file__).parents[2] / "fixtures/trtllm/llama_pp3/source"
KINDS = {
    "scalar": np.float32(1.5),
    "empty": np.zeros((0, 4), np.float32),
    "many.rows": np.arange(24, dtype=np.int32).reshape(6, 4),
    "many.prime": np.arange(35, dtype=np.float16).reshape(7, 5),
    "flags": np.array([True, False, True]),
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A checkpoint whose larger arrays have several chunks of at most 40 bytes."""
    monkeypatch.setattr(plain_arrays, "LARGEST", 40)
    (tmp_path / "source").mkdir()
    save_file({name: np.asarray(value) for name, value in KINDS.items()}, tmp_path / "source/model.safetensors")
    reshard(tmp_path / "source", tmp_path / "out", ReshardOptions(to="orbax"))
    return tmp_path / "out"


def test_a_model_goes_there_and_back_without_tensorstore(tmp_path, monkeypatch):
    monkeypatch.setattr(OrbaxSource, "__init__", lambda *_: pytest.fail("tensorstore was asked"))
    made = reshard(SOURCE, tmp_path / "out", ReshardOptions(to="orbax"))
    assert made.record.digest == digest(SOURCE).digest
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=str(SOURCE))).ok
    (tmp_path / "out/shardctl.json").unlink()
    assert diff(tmp_path / "out", SOURCE).equal
    reshard(tmp_path / "out", tmp_path / "hf", ReshardOptions(to="hf"))
    ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path / "hf", SOURCE))
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[key] == theirs[key]).all()) for key in ours)


@pytest.mark.skipif(find_spec("tensorstore") is None, reason="needs tensorstore")
def test_tensorstore_reads_every_array(written):
    source = OrbaxSource(written)
    assert {array.name: array.shape for array in source.arrays.values()} == {
        name: np.shape(value) for name, value in KINDS.items()
    }
    for array in source.arrays.values():
        expected = np.asarray(KINDS[array.name])
        found = array.store.read().result()
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()


def test_rows_are_divided_so_that_every_chunk_is_full(written):
    assert [(written / f"many.rows/{n}.0").stat().st_size for n in range(3)] == [32] * 3
    assert json.loads((written / "many.prime/.zarray").read_text())["chunks"] == [1, 5]
    assert isinstance(LocalSource(written), LocalSource)
    back = written.with_name("back")
    assert reshard(written, back, ReshardOptions(to="hf")).record.digest == digest(written).digest


def test_a_chunk_that_is_missing_or_short_is_an_error_that_names_it(written):
    chunk = written / "many.rows/1.0"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1])
    with pytest.raises(SourceError, match=r"many\.rows/1\.0 has 31 bytes: many\.rows/\.zarray gives it 32"):
        digest(written)
    chunk.unlink()
    with pytest.raises(SourceError, match=r"many\.rows/1\.0 is missing"):
        digest(written)


def test_a_config_beside_what_orbax_wrote_is_that_of_the_model(tmp_path):
    place = tmp_path / "orbax"
    shutil.copytree(SOURCE.parents[2] / "orbax/zarr", place)
    shutil.copy(SOURCE / "config.json", place)
    rules = SourceOptions(rules=SOURCE.parents[2] / "orbax/names.toml")
    assert diff(place, SOURCE, source_options_a=rules).equal


def test_names_that_no_tree_has_are_refused(tmp_path):
    for number, names in enumerate((("a", "a.b"), ("a..b",), ("a/b",))):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({name: np.ones(2, np.float32) for name in names}, folder / "model.safetensors")
        with pytest.raises(UnsupportedError, match=r"needs it to be a dict|cannot be the name of a folder"):
            reshard(folder, tmp_path / "out", ReshardOptions(to="orbax"))
