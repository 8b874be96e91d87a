"""Orbax checkpoints: in all ways in which Orbax stores arrays, under the names of a rule file, bit for bit."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardctl.base.errors import HostileError, SourceError, UnsupportedError, UsageError
from shardctl.conversion.preparing import open_conversion
from shardctl.conversion.share_transfer import list_source_versions
from shardctl.libraries.registry import detect_format, scan_checkpoint
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.storage import read_bytes
from shardctl.storage.addresses import open_source
from shardctl.storage.orbax import OrbaxSource, is_orbax, list_run_slices
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"
ORBAX, SOURCE = FIXTURES / "orbax", FIXTURES / "trtllm" / "llama_pp3" / "source"
NAMED = SourceOptions(rules=ORBAX / "names.toml", config=SOURCE / "config.json")
WAYS = ("ocdbt", "zarr3", "zarr")
needs_tensorstore = pytest.mark.skipif(find_spec("tensorstore") is None, reason="needs tensorstore")


@pytest.fixture
def place(tmp_path):
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(ORBAX / "zarr", tmp_path / "zarr"))


@needs_tensorstore
class TestReading:
    @pytest.mark.parametrize("way", WAYS)
    def test_it_is_the_model_bit_for_bit(self, way, tmp_path):
        made = reshard(ORBAX / way, tmp_path / "hf", ReshardOptions(to="hf"), source_options=NAMED)
        ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path / "hf", SOURCE))
        assert ours.keys() == theirs.keys()
        assert all(bool((ours[key] == theirs[key]).all()) and ours[key].dtype == theirs[key].dtype for key in ours)
        assert made.record.digest == digest(SOURCE).digest

    @pytest.mark.parametrize("way", WAYS)
    def test_a_conversion_is_bound_to_the_files_that_the_arrays_are_stored_in(self, way, tmp_path):
        """An interrupted one starts anew if such a file changes, whatever the metadata says."""
        place = Path(shutil.copytree(ORBAX / way, tmp_path / way))
        with open_conversion(place, tmp_path / "hf", ReshardOptions(to="hf"), NAMED, None) as work:
            bound = list_source_versions(work)
        stored = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
        assert bound.keys() >= stored

    def test_what_maxtext_converts_is_the_model_bit_for_bit(self, tmp_path):
        given = FIXTURES / "torchtitan" / "qwen3" / "source"
        names = SourceOptions(rules=FIXTURES / "maxtext" / "names.toml", config=given / "config.json")
        made = reshard(FIXTURES / "maxtext" / "qwen3", tmp_path / "hf", ReshardOptions(to="hf"), source_options=names)
        ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path / "hf", given))
        assert ours.keys() == theirs.keys()
        assert all(bool((ours[key] == theirs[key]).all()) and ours[key].dtype == theirs[key].dtype for key in ours)
        assert made.record.digest == digest(given).digest

    def test_maxtexts_arrays_without_names_are_answered_with_what_to_do(self, tmp_path):
        said = json.loads((FIXTURES / "torchtitan" / "qwen3" / "source" / "config.json").read_text())
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**said, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
        read = SourceOptions(config=config)
        done = reshard(FIXTURES / "maxtext" / "qwen3", tmp_path / "hf", ReshardOptions(to="hf"), source_options=read)
        assert any("maxtext.checkpoint_conversion.to_huggingface" in warning for warning in done.warnings)
        with pytest.raises(UnsupportedError, match="has no tensor") as raised:
            reshard(
                FIXTURES / "maxtext" / "qwen3",
                tmp_path / "cut",
                ReshardOptions(mesh=Mesh.of(tp=2)),
                source_options=read,
            )
        assert "maxtext.checkpoint_conversion.to_huggingface" in str(raised.value.hint)

    @pytest.mark.parametrize("way", WAYS)
    def test_into_any_layout(self, way, tmp_path):
        reshard(ORBAX / way, tmp_path / "cut", ReshardOptions(mesh=Mesh.of(tp=2, pp=2)), source_options=NAMED)
        reshard(ORBAX / way, tmp_path / "trt", ReshardOptions(to="trtllm", mesh=Mesh.of(tp=4)), source_options=NAMED)
        assert diff(tmp_path / "cut", tmp_path / "trt").equal
        assert diff(tmp_path / "cut", SOURCE).equal

    def test_without_rules_the_names_are_the_trees(self):
        found = inspect(ORBAX / "ocdbt")
        names = {line.name for line in found.tensors}
        assert {"params.embedder.embedding", "params.layers.attention.query.kernel", "step"} <= names
        assert detect_format(open_source(ORBAX / "ocdbt")).name == "orbax"

    def test_any_run_of_bytes_can_be_read(self):
        source = open_source(ORBAX / "zarr3")
        path = "arrays/params.layers.attention.query.kernel"
        whole = read_bytes(source, path)
        assert len(whole) == source.files()[path].size
        for start, stop in ((0, 1), (3, 777), (1023, 1026), (5000, 8191), (2, len(whole)), (9, 9)):
            assert read_bytes(source, path, start, stop - start) == whole[start:stop]

    def test_what_looks_like_an_optimizers_travels_with_a_word(self, tmp_path):
        whole = reshard(ORBAX / "zarr", tmp_path / "whole", ReshardOptions(to="hf"))
        said = "opt_state.count, opt_state.mu.norm.scale look like an optimizer's, and travel like weights"
        assert [each for each in whole.warnings if each.startswith(said)]
        assert "opt_state.count" in load_file(tmp_path / "whole" / "model.safetensors")
        weights = reshard(ORBAX / "zarr", tmp_path / "weights", ReshardOptions(to="hf", exclude=r"^opt_state\."))
        named = reshard(ORBAX / "zarr", tmp_path / "named", ReshardOptions(to="hf"), source_options=NAMED)
        assert not [each for each in (*weights.warnings, *named.warnings) if "optimizer" in each]

    def test_what_orbax_keeps_for_itself_does_not_travel(self):
        manifest = scan_checkpoint(open_source(ORBAX / "ocdbt"))
        assert manifest.objects == ()
        assert manifest.warnings == ()

    def test_an_array_that_is_missing(self, place):
        shutil.rmtree(place / "params.norm.scale")
        with pytest.raises(SourceError, match=r"params\.norm\.scale is in _METADATA, but cannot be opened"):
            inspect(place)

    def test_a_damaged_chunk(self, place):
        chunk = next(path for path in (place / "params.head.kernel").iterdir() if path.name[0].isdecimal())
        chunk.write_bytes(chunk.read_bytes()[:-20])
        with pytest.raises(SourceError, match=r"params\.head\.kernel cannot be read"):
            digest(place)

    @pytest.mark.parametrize("text", ["", "[]", '{"tree_metadata": 3}', '{"tree_metadata": {"a": {}}}', "[" * 9999])
    def test_metadata_that_is_malformed(self, place, text):
        (place / "_METADATA").write_text(text)
        with pytest.raises(SourceError, match=r"_METADATA (is not|nests)"):
            inspect(place)

    @pytest.mark.parametrize("name", ["../../etc", "a/b", ".."])
    def test_a_name_that_leaves_the_directory_is_hostile(self, place, name):
        said = json.loads((place / "_METADATA").read_text())
        next(iter(said["tree_metadata"].values()))["key_metadata"] = [{"key": name}]
        (place / "_METADATA").write_text(json.dumps(said))
        with pytest.raises(HostileError, match="leaves the directory"):
            inspect(place)


def test_without_tensorstore_that_is_said(place, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(UnsupportedError, match="but tensorstore, which reads it, is not installed") as caught:
        open_source(place)
    assert "pip install 'tensorstore>=" in caught.value.hint


def test_only_orbaxs_directories_are_taken_for_one(place, tmp_path):
    assert is_orbax(place)
    assert all(is_orbax(ORBAX / way) for way in WAYS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "_METADATA").write_text("{}")
    assert not is_orbax(tmp_path / "other")
    assert not isinstance(open_source(tmp_path / "other"), OrbaxSource)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_runs_are_all_elements_in_order(shape, data):
    array = np.arange(int(np.prod(shape))).reshape(shape)
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    found = list(list_run_slices(shape, start, stop))
    taken = [array[index].reshape(-1) for index in found]
    assert np.concatenate([*taken, []]).tolist() == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)


class TestNames:
    """`[names]` of a rule file, on arrays of any container."""

    def say(self, tmp_path, text):
        (tmp_path / "names.toml").write_text(f"[names]\n{text}\n")
        return SourceOptions(rules=tmp_path / "names.toml")

    @pytest.fixture
    def stored(self, tmp_path):
        from safetensors.numpy import save_file

        arrays = {
            "up.kernel": np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4),
            "a.0.w": np.arange(6, dtype=np.float32).reshape(2, 3),
            "a.1.w": np.arange(6, dtype=np.float32).reshape(2, 3) + 10,
            "step": np.array(3),
        }
        save_file(arrays, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors", arrays

    @pytest.mark.parametrize(("transposed", "stacked"), [(False, 0), (False, 1), (True, 1), (True, 2)])
    def test_heads_between_which_other_layers_lie(self, tmp_path, transposed, stacked):
        from safetensors.numpy import load_file as load
        from safetensors.numpy import save_file

        array = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
        save_file({"out.kernel": array}, tmp_path / "model.safetensors")
        width = 5
        names = self.say(
            tmp_path,
            f'"out.kernel" = {{ to = "l.{{n}}.o", stacked = {stacked}, shape = [-1, {width}], '
            f"transposed = {str(transposed).lower()} }}",
        )
        reshard(tmp_path / "model.safetensors", tmp_path / "out", ReshardOptions(to="hf"), source_options=names)
        made = load(tmp_path / "out" / "model.safetensors")
        assert len(made) == array.shape[stacked]
        for n in range(array.shape[stacked]):
            expected = array.take(n, stacked).reshape(-1, width)
            assert (made[f"l.{n}.o"] == (expected.T if transposed else expected)).all()

    def test_stacked_reshaped_and_transposed(self, stored, tmp_path):
        from safetensors.numpy import load_file as load

        path, arrays = stored
        source_options = self.say(
            tmp_path,
            '"up.kernel" = { to = "l.{n}.up", stacked = 1, transposed = true }\n'
            '"a.{i}.w" = { to = "b.{i}", shape = [-1, 2] }\n'
            '"step" = ""',
        )
        reshard(path, tmp_path / "out", ReshardOptions(to="hf"), source_options=source_options)
        made = load(tmp_path / "out" / "model.safetensors")
        expected = {f"l.{n}.up": arrays["up.kernel"][:, n].T for n in range(3)}
        expected |= {f"b.{i}": arrays[f"a.{i}.w"].reshape(3, 2) for i in range(2)}
        assert made.keys() == expected.keys()
        assert all((made[name] == expected[name]).all() for name in expected)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('"up.kernel" = "x"', "no line of .names. matches step, a.0.w, a.1.w"),
            ('"**" = "x"', "calls two arrays x"),
            ('"**" = 3', "is not understood"),
            ('"**" = { to = "x", turned = true }', "is not understood"),
            ('"**" = { to = "x.{n}" }', "1 numbers that its pattern does not have"),
            ('"a.{n}.{n}" = "x.{n}"', "has one number twice"),
            ('"**" = "x.{N}"', "braces in 'x.{N}' that do not name a number"),
            ('"**" = "x{"', "braces in 'x{' that do not name a number"),
            ('"**" = { to = "x", stacked = 0 }', "0 numbers that its pattern does not have"),
            ('"**" = { to = "x.{n}", stacked = true }', "stacked = True, which is not a dim"),
            ('"**" = { to = "x", shape = [-1, -1] }', "which is not a shape"),
            ('"up.kernel" = { to = "x", transposed = true }\n"**" = ""', "transposes up.kernel, but it is"),
            ('"up.kernel" = { to = "x", shape = [5] }\n"**" = ""', r"sees up.kernel as \[5\]"),
            ('"up.kernel" = { to = "x.{n}", stacked = 3 }\n"**" = ""', "stacked = 3 of up.kernel"),
            (
                '"up.kernel" = { to = "x.{n}", stacked = 1, shape = [1, -1] }\n"**" = ""',
                "which its stacked dim does not allow",
            ),
        ],
    )
    def test_what_is_not_understood(self, stored, tmp_path, line, message):
        with pytest.raises(UsageError, match=message):
            inspect(stored[0], source_options=self.say(tmp_path, line))
