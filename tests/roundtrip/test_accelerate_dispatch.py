"""accelerate loads what `--to hf` writes, shard by shard, with layers in memory and on disk."""

from __future__ import annotations

import pytest
import torch
import transformers

from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

accelerate = pytest.importorskip("accelerate")


@pytest.mark.slow
def test_a_model_that_is_dispatched_to_disk_computes_what_the_source_does(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path / "source")
    reshard(tmp_path / "source", tmp_path / "cut", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(tmp_path / "cut", tmp_path / "hf", ReshardOptions(to="hf", max_shard_size=20_000))
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    with accelerate.init_empty_weights():
        empty = transformers.LlamaForCausalLM(config)
    places = {"model.layers.1": "disk", "model.layers.2": "disk", "lm_head": "disk"}
    rest = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb")
    loaded = accelerate.load_checkpoint_and_dispatch(
        empty,
        tmp_path / "hf",
        device_map={**dict.fromkeys(rest, "cpu"), **places},
        offload_folder=tmp_path / "offload",
        dtype=torch.float32,
    ).eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert next(loaded.model.layers[2].parameters()).device.type == "meta"
