"""What a library's layout cannot hold is refused by the model's name, whatever the model is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardctl.errors import CutError, UnsupportedError
from shardctl.layouts import COMPOSED, meta
from shardctl.mesh import Mesh
from shardctl.models import describe
from shardctl.verbs.drafting import Wish, draft
from shardctl.verbs.opening import opened

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"


def saved(place: Path, name: str, **changes: object) -> dict[str, object]:
    """A checkpoint of zeros; returns its config."""
    said = {**json.loads((CONFIGS / f"{name}.json").read_text()), "dtype": "float32", **changes}
    tensors = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in describe(said).own()}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(said))
    return said


@pytest.mark.parametrize("name", ["bart", "bert", "clip", "gptj", "jamba", "llava", "mamba", "t5", "vit", "whisper"])
def test_a_model_that_no_engine_knows_is_refused_by_its_name(name, tmp_path):
    (architecture,) = saved(tmp_path, name)["architectures"]
    with opened(tmp_path) as checkpoint:
        for layout in (*(each.name for each in COMPOSED), meta.NAME):
            with pytest.raises(UnsupportedError, match=architecture):
                draft(checkpoint, Wish(to=layout, mesh=Mesh.of(tp=2)))


def test_an_array_that_would_be_padding_alone_is_refused(tmp_path):
    saved(tmp_path, "llama", vocab_size=3, num_attention_heads=4)
    with opened(tmp_path) as checkpoint, pytest.raises(CutError, match=r"lm_head\.weight .* padding alone"):
        draft(checkpoint, Wish(to="trtllm", mesh=Mesh.of(tp=4)))


@pytest.mark.parametrize("dense", [0, 1])
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_experts_in_some_layers_are_nothing_for_tensorrt(name, dense, tmp_path):
    saved(tmp_path, name, decoder_sparse_step=1, mlp_only_layers=[dense])
    with opened(tmp_path) as checkpoint, pytest.raises(UnsupportedError, match=f"in every layer .* layer {dense} has"):
        draft(checkpoint, Wish(to="trtllm"))
