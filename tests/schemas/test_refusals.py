"""What a library's layout cannot hold is refused by the model's name, whatever the model is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardctl.base.errors import PartitionError, SourceError, UnsupportedError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.conversion.conversion_plan import plan_conversion
from shardctl.libraries.catalogue import load_layouts
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures"
CONFIGS = FIXTURES / "configs"


def saved(place: Path, name: str, **changes: object) -> dict[str, object]:
    """A checkpoint of zeros; returns its config."""
    said = {**json.loads((CONFIGS / f"{name}.json").read_text()), "dtype": "float32", **changes}
    tensors = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in describe_model(said).own()}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(said))
    return said


@pytest.mark.parametrize("name", ["bart", "bert", "clip", "gptj", "jamba", "llava", "mamba", "t5", "vit", "whisper"])
def test_a_model_that_no_engine_knows_is_refused_by_its_name(name, tmp_path):
    (architecture,) = saved(tmp_path, name)["architectures"]
    with open_checkpoint(tmp_path) as checkpoint:
        for layout in (*(each.name for each in load_layouts() if each.ranks == "library"), "meta"):
            with pytest.raises(UnsupportedError, match=architecture):
                plan_conversion(checkpoint, ReshardOptions(to=layout, mesh=Mesh.of(tp=2)))
            with pytest.raises(UnsupportedError, match=architecture):  # whatever is wrong with the mesh
                plan_conversion(checkpoint, ReshardOptions(to=layout, mesh=Mesh.of(fsdp=2)))


@pytest.mark.parametrize("layout", ["deepseek", "megatron", "torch_dist", "vllm"])
def test_layers_that_predict_further_tokens_are_left_behind_and_that_is_said(layout):
    with open_checkpoint(FIXTURES / "deepseek_mp" / "predicting" / "source") as checkpoint:
        made = plan_conversion(checkpoint, ReshardOptions(to=layout))
    (said,) = made.have.warnings
    assert said.startswith("model.layers.61.")
    assert " and 21 more of layers that predict further tokens" in said
    assert "are left behind: " in said
    assert "--only mtp --to hf" in said
    assert not any(name.startswith("model.layers.61.") for name in made.plan.want.tensors)


def test_an_array_that_would_be_padding_alone_is_refused(tmp_path):
    saved(tmp_path, "llama", vocab_size=3, num_attention_heads=4)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(PartitionError, match=r"lm_head\.weight .* only padding"),
    ):
        plan_conversion(checkpoint, ReshardOptions(to="trtllm", mesh=Mesh.of(tp=4)))


@pytest.mark.parametrize("dense", [0, 1])
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_experts_in_some_layers_are_nothing_for_tensorrt(name, dense, tmp_path):
    saved(tmp_path, name, decoder_sparse_step=1, mlp_only_layers=[dense])
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(UnsupportedError, match=f"in every layer .* layer {dense} has"),
    ):
        plan_conversion(checkpoint, ReshardOptions(to="trtllm"))


@pytest.mark.parametrize("name", ["megatron/llama-tp2-pp2", "torch_dist/stacked/iter"])
def test_more_tokens_than_the_padded_vocabulary_has_rows(name):
    with (
        pytest.raises(SourceError, match=r"has [0-9]+ rows, but the model has 5,000 tokens") as error,
        open_checkpoint(FIXTURES / name, SourceOptions(true_vocab=5000)),
    ):
        pass
    assert "--true-vocab" in error.value.hint


def test_exchanged_folders_of_tp_ranks_are_warned_about(tmp_path):
    source_options, name = SourceOptions(true_vocab=128), "qwen3-moe-ep2-etp1"
    with open_checkpoint(FIXTURES / "megatron" / name, source_options) as checkpoint:
        assert not any("exchanged" in warning for warning in checkpoint.stored.warnings)
    folder = shutil.copytree(FIXTURES / "megatron" / name, tmp_path / name) / "iter_0000010"
    (folder / "mp_rank_00_000").rename(folder / "kept")
    (folder / "mp_rank_01_001").rename(folder / "mp_rank_00_000")
    (folder / "kept").rename(folder / "mp_rank_01_001")
    with open_checkpoint(tmp_path / name, source_options) as checkpoint:
        assert sum("were folders exchanged?" in warning for warning in checkpoint.manifest.warnings) == 2


@pytest.mark.parametrize(("layout", "name"), [("vllm", "model-rank-{}-part-0"), ("trtllm", "rank{}")])
def test_rank_files_that_were_exchanged_are_found_by_their_content_alone(layout, name, tmp_path):
    source, at = FIXTURES / "trtllm" / "llama_tp2_pp2" / "source", tmp_path / "out"
    reshard(source, at, ReshardOptions(to=layout, mesh=Mesh.of(tp=2)))
    one, other = (at / f"{name.format(rank)}.safetensors" for rank in range(2))
    one.rename(at / "kept")
    other.rename(one)
    (at / "kept").rename(other)
    assert verify(at).ok  # no name in the files says whose they are
    assert not verify(at, VerifyOptions(level="full")).ok
    assert not verify(at, VerifyOptions(against=source)).ok


def test_a_last_rank_that_is_missing_is_thought_of(tmp_path):
    source = FIXTURES / "vllm" / "llama" / "0.25-tp2"
    for file in ("config.json", "model-rank-0-part-0.safetensors"):
        shutil.copy(source / file, tmp_path)
    with pytest.raises(SourceError, match="has shape") as error, open_checkpoint(tmp_path):
        pass
    assert "files of the last ranks may be missing" in error.value.hint
