"""DeepSeek's `modelI-mpN.safetensors`: read and written to the bit as its converter does, and refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file
from stored_bits import bits

from shardctl.base.errors import PartitionError, SourceError, UnsupportedError
from shardctl.libraries.deepseek.arrays import SCHEMA
from shardctl.libraries.registry import detect_format, scan_checkpoint
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.storage.local import LocalSource
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

if TYPE_CHECKING:
    import torch

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepseek_mp"
CASES = (("bf16", 1), ("bf16", 2), ("bf16", 4), ("fp8", 1), ("fp8", 2), ("v32", 1), ("v32", 2), ("predicting", 2))
PREDICTING = "model.layers.61."


@pytest.fixture
def place(tmp_path):
    """A copy of what DeepSeek's converter made, to be damaged."""
    return Path(shutil.copytree(FIXTURES / "bf16" / "mp4", tmp_path / "mp4"))


def said(name: str) -> SourceOptions:
    """How a directory without a config is read."""
    return SourceOptions(config=FIXTURES / name / "source" / "config.json")


def stored(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, bits(tensor)


def reshard_options(ranks: int) -> ReshardOptions:
    return ReshardOptions(to="deepseek", mesh=Mesh.of(tp=ranks))


class TestReading:
    @pytest.mark.parametrize(("name", "ranks"), CASES)
    def test_what_deepseek_converts_is_the_model_bit_for_bit(self, name, ranks, tmp_path):
        reshard(FIXTURES / name / f"mp{ranks}", tmp_path / "hf", ReshardOptions(to="hf"), source_options=said(name))
        ours = load_file(tmp_path / "hf" / "model.safetensors")
        theirs = load_file(FIXTURES / name / "source" / "model.safetensors")
        theirs = {key: tensor for key, tensor in theirs.items() if not key.startswith(PREDICTING)}
        assert ours.keys() == theirs.keys()
        assert [key for key in theirs if stored(ours[key]) != stored(theirs[key])] == []

    def test_it_is_recognised_and_its_mesh_is_known(self, place):
        assert detect_format(LocalSource(place)).name == "deepseek"
        dialect = scan_checkpoint(LocalSource(place)).dialect
        assert (str(dialect.mesh), len(dialect.ranks)) == ("tp4 x ep4", 4)

    def test_without_a_config_one_is_asked_for(self, place):
        with pytest.raises(SourceError, match="without a config, nothing says which model's tensors") as caught:
            digest(place)
        assert "--config" in caught.value.hint


class TestWriting:
    @pytest.mark.parametrize(("name", "ranks"), CASES)
    def test_every_array_is_deepseeks(self, name, ranks, tmp_path):
        made = reshard(FIXTURES / name / "source", tmp_path / "out", reshard_options(ranks))
        for path in (FIXTURES / name / f"mp{ranks}").glob("model*"):
            theirs, ours = load_file(path), load_file(tmp_path / "out" / path.name)
            assert ours.keys() == theirs.keys()
            assert [key for key in theirs if stored(ours[key]) != stored(theirs[key])] == []
        assert len(list((tmp_path / "out").glob("model*"))) == ranks
        assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"].startswith("deepseek_v3")
        assert verify(tmp_path / "out", VerifyOptions(against=str(FIXTURES / name / "source"))).ok
        again = reshard(tmp_path / "out", tmp_path / "again", reshard_options(ranks))
        assert made.record.digest == again.record.digest
        for path in (tmp_path / "out").glob("model*"):
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()

    def test_layers_that_predict_are_left_behind_and_that_is_said(self, tmp_path):
        made = reshard(FIXTURES / "predicting" / "source", tmp_path / "out", reshard_options(2))
        assert any("21 more of layers that predict further tokens are left behind" in w for w in made.warnings)
        assert not any(name.startswith(PREDICTING) for name in made.record.tensors)
        kept = reshard(FIXTURES / "bf16" / "source", tmp_path / "all", reshard_options(2))
        assert kept.warnings == ()
        assert kept.record.digest == digest(FIXTURES / "bf16" / "source").digest

    def test_from_one_number_of_ranks_to_another(self, tmp_path):
        reshard(FIXTURES / "bf16" / "mp2", tmp_path / "mp4", reshard_options(4), source_options=said("bf16"))
        for path in (FIXTURES / "bf16" / "mp4").glob("model*"):
            theirs, ours = load_file(path), load_file(tmp_path / "mp4" / path.name)
            assert [key for key in theirs if stored(ours[key]) != stored(theirs[key])] == []


class TestRefusals:
    def test_a_cut_through_blocks_that_share_a_scale(self, tmp_path):
        with pytest.raises(
            PartitionError, match=r"o_proj\.weight \[64, 256\] over tp=4: .*256 columns, of which 128 share"
        ):
            reshard(FIXTURES / "fp8" / "source", tmp_path / "out", reshard_options(4))

    @pytest.mark.parametrize(
        ("mesh", "message"),
        [
            (Mesh.of(tp=3), "4 experts cannot be divided over tp=3"),
            (Mesh.of(tp=8), "4 experts cannot be divided over tp=8"),
            (Mesh.of(tp=2, pp=2), "those of tp ranks, but the mesh is pp2 x tp2"),
        ],
    )
    def test_a_mesh_that_does_not_fit(self, mesh, message, tmp_path):
        with pytest.raises(PartitionError, match=message):
            reshard(FIXTURES / "bf16" / "source", tmp_path / "out", ReshardOptions(to="deepseek", mesh=mesh))

    def test_heads_and_vocabulary_that_do_not_divide(self, tmp_path):
        source = shutil.copytree(FIXTURES / "predicting" / "source", tmp_path / "source")
        config = json.loads((source / "config.json").read_text())
        tensors = load_file(source / "model.safetensors")
        tensors |= {name: tensors[name][:7].clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
        for name in [name for name in tensors if name.startswith(PREDICTING)]:
            del tensors[name]
        save_file(tensors, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps({**config, "vocab_size": 7, "num_nextn_predict_layers": 0}))
        with pytest.raises(PartitionError, match=r"model\.embed_tokens\.weight \[7, 8\] over tp=2: it has 7 rows"):
            reshard(source, tmp_path / "out", reshard_options(2))

    def test_a_bias_that_its_code_has_not(self, tmp_path):
        source = shutil.copytree(FIXTURES / "bf16" / "source", tmp_path / "source")
        config = json.loads((source / "config.json").read_text())
        tensors = load_file(source / "model.safetensors")
        for n in range(2):
            layer = f"model.layers.{n}.self_attn"
            for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
                tensors[f"{layer}.{name}.bias"] = tensors[f"{layer}.{name}.weight"][:, 0].clone()
        save_file(tensors, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
        with pytest.raises(UnsupportedError, match=r"has no place for model\.layers\.0\.self_attn\.[a-z_]+\.bias"):
            reshard(source, tmp_path / "out", reshard_options(2))

    def test_a_model_of_another_family(self, tmp_path):
        source = FIXTURES.parent / "trtllm" / "llama_pp3" / "source"
        with pytest.raises(UnsupportedError, match=r"is for DeepSeek-V2, V3 and V3\.2, not for LlamaForCausalLM"):
            reshard(source, tmp_path / "out", reshard_options(2))

    def test_deepseek_v4_with_the_reason(self):
        model = describe_model(json.loads((FIXTURES.parent / "configs" / "deepseek_v4.json").read_text()))
        with pytest.raises(UnsupportedError, match="o_a_proj in bfloat16, scaled back from fp8") as caught:
            SCHEMA.check(model)
        assert "inference/convert.py" in caught.value.hint

    def test_files_that_are_missing(self, place):
        (place / "model1-mp4.safetensors").unlink()
        (place / "model2-mp4.safetensors").unlink()
        with pytest.raises(SourceError, match=r"model1-mp4\.safetensors and 1 more files are missing"):
            scan_checkpoint(LocalSource(place))

    def test_files_of_two_conversions(self, place):
        shutil.copy(FIXTURES / "bf16" / "mp1" / "model0-mp1.safetensors", place)
        with pytest.raises(SourceError, match="several conversions: mp1 and mp4"):
            scan_checkpoint(LocalSource(place))

    def test_a_rank_too_many(self, place):
        shutil.copy(place / "model0-mp4.safetensors", place / "model4-mp4.safetensors")
        with pytest.raises(SourceError, match=r"model4-mp4\.safetensors is none of 4 files"):
            scan_checkpoint(LocalSource(place))

    def test_files_of_two_models(self, place):
        arrays = load_file(place / "model2-mp4.safetensors")
        arrays["layers.1.ffn.experts.0.w1.weight"] = arrays.pop("layers.1.ffn.experts.2.w1.weight")
        save_file(arrays, place / "model2-mp4.safetensors")
        with pytest.raises(UnsupportedError, match=r"has no rank2/layers\.1\.ffn\.experts\.0\.w1\.weight"):
            digest(place, source_options=said("bf16"))

    def test_another_models_config(self, place):
        with pytest.raises(SourceError, match="shape"):
            digest(place, source_options=said("fp8"))
