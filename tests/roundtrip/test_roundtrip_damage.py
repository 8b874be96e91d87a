"""Whatever is wrong with a checkpoint, the program says so, says where, and does not exit 0."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from damage import data_start, exchange, flip, header, overwrite, region, row_bytes, swap_rows
from safetensors.torch import load_file, save_file
from tiny_models import config_of, save

from shardctl.cli.program import run
from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

SHARDS = [f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in range(1, 5)]
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A tied model, and its four ranks; not to be changed."""
    base = tmp_path_factory.mktemp("damage")
    save(base / "source", config_of("qwen2-tied"))
    reshard(base / "source", base / "ranks", ReshardOptions(mesh=Mesh.of(tp=2, pp=2)))
    return base


@pytest.fixture
def source(kept, tmp_path):
    return shutil.copytree(kept / "source", tmp_path / "source")


@pytest.fixture
def ranks(kept, tmp_path):
    return shutil.copytree(kept / "ranks", tmp_path / "ranks")


@pytest.fixture
def shardctl(capfd, monkeypatch):
    """Runs a command line; gives the exit code and all that was said, on one line."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*args):
        code = run([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return code, " ".join((out + err).split())

    return call


@pytest.fixture
def forget(ranks):
    """Removes what shardctl itself remembers, so that only the files speak."""
    return (ranks / "shardctl.json").unlink


def test_an_undamaged_checkpoint_passes(shardctl, source, ranks):
    assert shardctl("verify", ranks, "--level", "full", "--against", source)[0] == 0
    assert shardctl("verify", source, "--level", "full")[0] == 0
    assert shardctl("diff", source, ranks)[0] == 0


class TestTheRecordFinds:
    """Damage to what shardctl wrote, by `verify --level full` alone: no source is at hand."""

    @pytest.mark.parametrize("place", ["first byte", "somewhere", "last byte"])
    @pytest.mark.parametrize("shard", SHARDS)
    def test_a_flipped_bit_of_the_data_of_any_file(self, shardctl, ranks, shard, place):
        file = ranks / shard
        start, stop = data_start(file), file.stat().st_size
        at = {"first byte": start, "somewhere": random.Random(shard).randrange(start, stop), "last byte": stop - 1}
        flip(file, at[place], bit=5)
        holder = next(
            n for n in header(file) if n != "__metadata__" and region(file, n)[0] <= at[place] < region(file, n)[1]
        )
        code, said = shardctl("verify", ranks, "--level", "full")
        assert code == 3
        assert shard in said
        tie = {"lm_head.weight": "model.embed_tokens.weight"}
        assert tie.get(holder, holder) in said

    @pytest.mark.parametrize("layout", ["ranks", "hf"])
    def test_a_flipped_bit_anywhere(self, shardctl, kept, tmp_path, layout):
        """Tensors, headers, index, side files and the record itself: nothing is beyond doubt."""
        place = tmp_path / "result"
        if layout == "ranks":
            shutil.copytree(kept / "ranks", place)
        else:
            reshard(kept / "ranks", place, ReshardOptions(to="hf", max_shard_size=15_000))
            assert (place / "model.safetensors.index.json").is_file()
        chance = random.Random(layout)
        files = sorted(file for file in place.rglob("*") if file.is_file() and file.stat().st_size)
        assert len(files) > 9
        for file in files * 8:
            at, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
            flip(file, at, bit)
            code, said = shardctl("verify", place, "--level", "full")
            assert code in {3, 4}, (file, at, bit)
            assert file.relative_to(place).as_posix() in said
            flip(file, at, bit)
        assert shardctl("verify", place, "--level", "full")[0] == 0

    def test_damage_before_it_is_converted_again(self, shardctl, ranks, tmp_path):
        """What shardctl wrote it knows, so that damage does not travel on."""
        flip(ranks / SHARDS[0], region(ranks / SHARDS[0], UP)[0])
        code, said = shardctl("reshard", ranks, tmp_path / "new", "--tp", 4)
        assert code == 4
        assert f"{UP} has changed since {ranks} was written" in said
        assert not (tmp_path / "new").exists()
        (ranks / "shardctl.json").unlink()
        assert shardctl("reshard", ranks, tmp_path / "new", "--tp", 4)[0] == 0

    @pytest.mark.parametrize("seed", range(20))
    def test_a_flipped_bit_of_a_header(self, shardctl, ranks, seed):
        chance = random.Random(seed)
        shard = chance.choice(SHARDS)
        flip(ranks / shard, chance.randrange(data_start(ranks / shard)), bit=chance.randrange(8))
        code, said = shardctl("verify", ranks)
        assert code in {3, 4}, said
        assert shard in said

    @pytest.mark.parametrize("byte", range(8))
    def test_a_flipped_bit_of_a_headers_length(self, shardctl, ranks, byte):
        flip(ranks / SHARDS[1], byte)
        code, said = shardctl("verify", ranks)
        assert code in {3, 4}
        assert SHARDS[1] in said

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "1_Pooling/config.json", "modeling_custom.py"])
    def test_a_flipped_bit_of_a_side_file(self, shardctl, ranks, name):
        flip(ranks / name, 3)
        code, said = shardctl("verify", ranks)
        assert code in {3, 4}
        assert name in said

    @pytest.mark.parametrize("seed", range(10))
    def test_a_flipped_bit_of_the_record_itself(self, shardctl, ranks, seed):
        chance = random.Random(seed)
        record = ranks / "shardctl.json"
        flip(record, chance.randrange(record.stat().st_size), bit=chance.randrange(8))
        code, said = shardctl("verify", ranks)
        assert code in {3, 4}
        assert "shardctl.json" in said

    @pytest.mark.parametrize("lost", [1, 100, 100_000_000])
    def test_a_truncated_file(self, shardctl, ranks, lost):
        file = ranks / SHARDS[2]
        size = max(file.stat().st_size - lost, 0)
        with file.open("r+b") as opened:
            opened.truncate(size)
        code, said = shardctl("verify", ranks)
        assert code in {3, 4}
        assert SHARDS[2] in said
        assert f"{size:,} bytes" in said

    def test_a_file_whose_tail_is_a_hole(self, shardctl, ranks):
        file = ranks / SHARDS[2]
        size = file.stat().st_size
        with file.open("r+b") as opened:
            opened.truncate(size - 600)
            opened.truncate(size)
        code, said = shardctl("verify", ranks, "--level", "full")
        assert code == 3
        assert SHARDS[2] in said

    @pytest.mark.parametrize("shard", SHARDS)
    def test_a_missing_shard(self, shardctl, ranks, shard):
        (ranks / shard).unlink()
        code, said = shardctl("verify", ranks)
        assert code == 3
        assert f"{shard} is missing" in said

    def test_a_missing_side_file(self, shardctl, ranks):
        (ranks / "tokenizer.json").unlink()
        code, said = shardctl("verify", ranks)
        assert code == 3
        assert "tokenizer.json is missing" in said

    def test_two_swapped_rows(self, shardctl, ranks):
        swap_rows(ranks / SHARDS[0], UP, 3, 4)
        code, said = shardctl("verify", ranks, "--level", "full")
        assert code == 3
        assert f"{UP} has changed" in said
        assert SHARDS[0] in said

    def test_two_swapped_elements_of_a_row(self, shardctl, ranks):
        start, _ = region(ranks / SHARDS[0], UP)
        two = (ranks / SHARDS[0]).read_bytes()[start : start + 4]
        overwrite(ranks / SHARDS[0], start, two[2:] + two[:2])
        code, said = shardctl("verify", ranks, "--level", "full")
        assert code == 3
        assert f"{UP} has changed" in said

    @pytest.mark.parametrize("pair", [(0, 1), (2, 3), (0, 2)])
    def test_two_exchanged_rank_files(self, shardctl, ranks, pair):
        exchange(*(ranks / SHARDS[n] for n in pair))
        code, said = shardctl("verify", ranks)
        assert code == 3
        assert SHARDS[pair[0]] in said
        assert SHARDS[pair[1]] in said

    def test_two_ranks_whose_data_alone_is_exchanged(self, shardctl, ranks):
        one, other = (ranks / shard for shard in SHARDS[:2])
        data = [file.read_bytes()[data_start(file) :] for file in (one, other)]
        assert len(data[0]) == len(data[1])
        overwrite(one, data_start(one), data[1])
        overwrite(other, data_start(other), data[0])
        code, said = shardctl("verify", ranks, "--level", "full")
        assert code == 3
        assert UP in said

    @pytest.mark.parametrize(
        "name", ["shard-00005-model-00001-of-00001.safetensors", "pytorch_model.bin", "old.safetensors"]
    )
    def test_a_stale_file_that_a_loader_would_take(self, shardctl, ranks, name):
        shutil.copy(ranks / SHARDS[3], ranks / name)
        code, said = shardctl("verify", ranks)
        assert code == 3
        assert f"{name} is not part of this checkpoint" in said

    def test_a_replica_that_differs(self, shardctl, ranks):
        flip(ranks / SHARDS[1], region(ranks / SHARDS[1], NORM)[0] + 7)
        code, said = shardctl("verify", ranks, "--level", "full")
        assert code == 3
        assert f"{NORM}: copies differ in 1 elements, first at [3:4] in {SHARDS[1]}" in said

    def test_a_tie_that_differs(self, shardctl, ranks):
        file = ranks / SHARDS[3]
        flip(file, region(file, "lm_head.weight")[1] - 1)
        code, said = shardctl("verify", ranks, "--level", "full")
        assert code == 3
        assert "model.embed_tokens.weight: copies differ in 1 elements, first at [95:96, 31:32]" in said
        assert SHARDS[3] in said


class TestTheFilesThemselvesTell:
    """Damage to rank files without their record, as another program may have written them."""

    @pytest.mark.parametrize("shard", SHARDS)
    def test_a_missing_shard(self, shardctl, ranks, forget, tmp_path, shard):
        forget()
        (ranks / shard).unlink()
        code, said = shardctl("verify", ranks)
        assert code in {3, 4}
        assert "missing" in said or "are stored in no file" in said
        assert shardctl("reshard", ranks, tmp_path / "new")[0] == 4
        assert shardctl("digest", ranks)[0] == 4
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("value", [0.0, 1.0])
    @pytest.mark.parametrize("shard", [0, 1])
    def test_an_all_equal_tensor_whose_shard_is_gone(self, shardctl, tmp_path, value, shard):
        """Nothing of what is left looks wrong: only that it does not cover the tensor."""
        (tmp_path / "source").mkdir()
        save_file({"w": torch.full((8, 4), value), "x": torch.full((2,), value)}, tmp_path / "source/model.safetensors")
        (tmp_path / "rules.toml").write_text('[rules]\n"w" = ["tp"]\n"**" = []\n')
        reshard_it = ("reshard", tmp_path / "source", tmp_path / "ranks", "--tp", 2, "--rules", tmp_path / "rules.toml")
        assert shardctl(*reshard_it)[0] == 0
        (tmp_path / "ranks" / SHARDS[shard]).unlink()
        assert shardctl("verify", tmp_path / "ranks")[0] == 3
        (tmp_path / "ranks/shardctl.json").unlink()
        code, said = shardctl("verify", tmp_path / "ranks")
        hole = ["[0:4, 0:4]", "[4:8, 0:4]"][shard]
        assert code in {3, 4}
        assert hole in said or "missing" in said

    def test_a_truncated_file(self, shardctl, ranks, forget):
        forget()
        with (ranks / SHARDS[1]).open("r+b") as opened:
            opened.truncate(data_start(ranks / SHARDS[1]) + 10)
        code, said = shardctl("verify", ranks)
        assert code == 4
        assert SHARDS[1] in said

    def test_a_replica_that_differs(self, shardctl, source, ranks, forget, tmp_path):
        forget()
        flip(ranks / SHARDS[1], region(ranks / SHARDS[1], NORM)[0] + 7)
        for args in (("verify", ranks, "--level", "full"), ("verify", ranks, "--against", source)):
            code, said = shardctl(*args)
            assert code == 3
            assert f"{NORM}: copies differ in 1 elements, first at [3:4] in {SHARDS[1]}" in said
        for args in (("reshard", ranks, tmp_path / "new"), ("digest", ranks), ("diff", ranks, source)):
            code, said = shardctl(*args)
            assert code in {3, 4}, args
            assert NORM in said
            assert SHARDS[1] in said
        assert not (tmp_path / "new").exists()

    def test_a_stale_shard_of_another_mesh(self, kept, shardctl, ranks, forget, tmp_path):
        """What is left of a tp4 run overlaps the boxes of this one, with the same or with older values."""
        reshard(kept / "source", tmp_path / "tp4", ReshardOptions(mesh=Mesh.of(tp=4)))
        forget()
        shutil.copy(tmp_path / "tp4" / SHARDS[3], ranks / "shard-00005-model-00001-of-00001.safetensors")
        code, said = shardctl("verify", ranks)
        assert code == 3
        assert "overlap" in said
        assert "shard-00005" in said
        code, said = shardctl("reshard", ranks, tmp_path / "new")
        assert code == 4
        assert "overlap" in said


def rank_file(file, arrays, **more):
    """A hand-made rank file: `{name: (offsets, tensor)}`."""
    info = {name: {"saved_offsets": list(origin), **more} for name, (origin, _) in arrays.items()}
    told = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
    save_file({name: tensor for name, (_, tensor) in arrays.items()}, file, told)


class TestHandMadeRankFiles:
    @pytest.mark.parametrize("level", ["quick", "full"])
    def test_overlapping_chunks(self, shardctl, tmp_path, level):
        for rank, start in enumerate((0, 3)):
            rank_file(tmp_path / SHARDS[rank], {"w": ((start, 0), torch.ones(4, 2))})
        code, said = shardctl("verify", tmp_path, "--level", level)
        assert code == 3
        assert "w [7, 2]: chunks [0:4, 0:2] and [3:7, 0:2] overlap in [3:4, 0:2]" in said
        assert SHARDS[0] in said

    def test_a_hole_between_chunks(self, shardctl, tmp_path):
        for rank, start in enumerate((0, 5)):
            rank_file(tmp_path / SHARDS[rank], {"w": ((start, 0), torch.ones(4, 2))})
        code, said = shardctl("verify", tmp_path)
        assert code == 3
        assert "w [9, 2]: elements [4:5, 0:2] are stored in no file" in said
        assert shardctl("reshard", tmp_path, tmp_path.parent / "new")[0] == 4

    def test_a_chunk_outside_of_the_global_shape(self, shardctl, tmp_path):
        rank_file(tmp_path / SHARDS[0], {"w": ((4, 0), torch.ones(4, 2))}, global_shape=[6, 2])
        code, said = shardctl("verify", tmp_path)
        assert code == 4
        assert "[4:8, 0:2]" in said
        assert "[6, 2]" in said

    def test_chunks_of_different_types(self, shardctl, tmp_path):
        rank_file(tmp_path / SHARDS[0], {"w": ((0, 0), torch.ones(4, 2))})
        rank_file(tmp_path / SHARDS[1], {"w": ((4, 0), torch.ones(4, 2, dtype=torch.float16))})
        code, said = shardctl("verify", tmp_path)
        assert code == 4
        assert "w" in said
        assert SHARDS[1] in said


class TestWhatOthersWrote:
    """Damage to what transformers saved."""

    @pytest.fixture
    def sharded(self, tmp_path):
        return save(tmp_path / "sharded", config_of("llama"), max_shard_size="20KB").path

    def test_a_missing_shard(self, shardctl, sharded, tmp_path):
        lost = sorted(sharded.glob("model-*.safetensors"))[1]
        lost.unlink()
        for args in (("verify", sharded), ("reshard", sharded, tmp_path / "new"), ("inspect", sharded)):
            code, said = shardctl(*args)
            assert code == 4
            assert lost.name in said

    def test_a_missing_shard_and_no_index(self, shardctl, sharded):
        (sharded / "model.safetensors.index.json").unlink()
        lost = sorted(sharded.glob("model-*.safetensors"))[1]
        lost.unlink()
        code, said = shardctl("verify", sharded)
        assert code == 4
        assert "missing" in said

    @pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "sub/../../x.safetensors"])
    def test_an_index_that_names_a_file_elsewhere(self, shardctl, sharded, tmp_path, name):
        save_file({"lm_head.weight": torch.ones(96, 32, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
        index = sharded / "model.safetensors.index.json"
        told = json.loads(index.read_text())
        told["weight_map"]["lm_head.weight"] = name
        index.write_text(json.dumps(told))
        for args in (("verify", sharded), ("reshard", sharded, tmp_path / "new"), ("digest", sharded)):
            code, said = shardctl(*args)
            assert code == 4
            assert name in said

    def test_a_shape_that_is_not_the_configs(self, shardctl, source, tmp_path):
        told = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(told | {"intermediate_size": 64}))
        for args in (("verify", source), ("reshard", source, tmp_path / "new", "--tp", 2)):
            code, said = shardctl(*args)
            assert code == 4
            assert "model.layers.0.mlp.gate_proj.weight has shape [48, 32], but config.json gives it [64, 32]" in said

    def test_a_tensor_too_few(self, shardctl, source):
        file = source / "model.safetensors"
        tensors = load_file(file)
        del tensors[UP]
        save_file(tensors, file, {"format": "pt"})
        code, said = shardctl("verify", source)
        assert code == 3
        assert f"lacks 1 tensor of Qwen2ForCausalLM: {UP}" in said

    def test_a_tensor_that_the_model_does_not_have(self, shardctl, source, tmp_path):
        """On one device it can travel along, and is warned of; on a mesh nobody knows where it belongs."""
        file, name = source / "model.safetensors", "model.layers.9.mlp.up_proj.weight"
        tensors = load_file(file)
        save_file({**tensors, name: tensors[UP].clone()}, file, {"format": "pt"})
        for args, expected in (
            (("verify", source), 0),
            (("verify", source, "--strict"), 3),
            (("reshard", source, tmp_path / "new", "--tp", 2), 4),
        ):
            code, said = shardctl(*args)
            assert code == expected
            assert f"Qwen2ForCausalLM has no tensor {name}" in said

    def test_tied_weights_that_differ(self, shardctl, source, tmp_path):
        file = source / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][5, 6] += 1
        save_file(tensors, file, {"format": "pt"})
        code, said = shardctl("verify", source, "--level", "full")
        assert code == 3
        assert "model.embed_tokens.weight: copies differ in 1 elements, first at [5:6, 6:7]" in said
        code, said = shardctl("reshard", source, tmp_path / "new", "--tp", 2)
        assert code == 4
        assert "lm_head.weight" in said

    @pytest.mark.parametrize("how", ["flipped bit", "swapped rows", "zeroed row"])
    def test_damage_of_the_values_is_found_against_the_source(self, kept, shardctl, source, how):
        file = source / "model.safetensors"
        start, _ = region(file, UP)
        if how == "flipped bit":
            flip(file, start + 2 * 33)
        elif how == "swapped rows":
            swap_rows(file, UP, 1, 2)
        else:
            overwrite(file, start + row_bytes(file, UP), bytes(row_bytes(file, UP)))
        for args in (("verify", source, "--against", kept / "ranks"), ("diff", source, kept / "ranks")):
            code, said = shardctl(*args)
            assert code == 3
            assert UP in said
            assert "[1:2, " in said
