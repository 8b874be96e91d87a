"""Qwen3.8-Flash-Next: its published size, its tables of n-grams, and the layer that predicts."""

from __future__ import annotations

from math import prod

import pytest
import torch
import transformers
from cache_bytes import state_bytes
from model_oracle import fixture, stored

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest

TEXT = {
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
    "num_experts": 512,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "indexer_n_heads": 4,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "split_ngram_parts": 128,
}
FLASH_NEXT = {"model_type": "qwen4_exp", "text_config": TEXT, "vision_config": {"out_hidden_size": 2560}}
TABLE = "model.language_model.layers.1.ple.ple_embedding"


def test_it_has_its_published_size():
    """359,999,963,128 bytes on the Hub, which are BF16 but for 35 numbers of the hashes (3 + 16 + 16 in I64)."""
    model = describe_model(FLASH_NEXT)
    tensors = [t for t in model.tensors.values() if not t.row.buffer and t.row.when != "score"]
    assert 2 * sum(prod(t.shape) for t in tensors) + 6 * 35 == 359_999_963_128
    assert model.tensors[f"{TABLE}.ngram_embedding.shard_127.weight"].shape == (2_500_012, 160)
    assert model.fusions[f"{TABLE}.ngram_embedding.weight"].shape == (320_001_536, 160)


def test_one_layer_in_four_attends_to_chosen_tokens_and_caches_keys_of_blocks():
    layers = build_layer_graph(FLASH_NEXT).layers
    found = [layer.attention for layer in layers if layer.attention is not None]
    assert (len(layers), len(found), {layer.streams for layer in layers}) == (48, 12, {4})
    assert {(one.kv_heads, one.chosen, *((c.tokens, c.elements) for c in one.besides)) for one in found} == {
        (2, 2048, (4, 128))
    }


@pytest.mark.parametrize(
    "name",
    [
        "fc_embedding",
        "pre_fc_norm_hidden",
        "layers.0.self_attn.indexer.index_qk_proj",
        "layers.0.mlp.shared_expert_gate",
        "layers.0.mlp_hyper_connection.block_inject_weight",
        "hyper_connection_mixer.input_mix_weight_up",
    ],
)
def test_the_layer_that_predicts_has_its_names(name):
    """Those of the headers on the Hub, which TensorRT-LLM reads: 31 tensors, where experts are two arrays."""
    model = describe_model(FLASH_NEXT)
    assert model.tensors[f"mtp.{name}.weight"].optional
    assert len([t for t in model.tensors if t.startswith("mtp.") and ".experts." not in t]) == 31 - 2


def test_a_table_in_one_array_is_the_parts_behind_each_other():
    """As transformers holds it, and as the Hub does."""
    model = describe_model(fixture("qwen4_exp_text"))
    table = "model.layers.0.ple.ple_embedding.ngram_embedding"
    (rows, width), whole = model.tensors[f"{table}.shard_0.weight"].shape, model.fusions[f"{table}.weight"]
    bound = bind_manifest(model, stored([(f"{table}.weight", whole.shape)]), partial=True)
    assert [*bound.tensors] == [f"{table}.shard_{n}.weight" for n in range(4)]
    starts = [bound.tensors[f"{table}.shard_{n}.weight"].chunks[0].where.offset for n in range(4)]
    assert starts == [n * rows * width * 4 for n in range(4)]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ple_layer_ids": [0]}, SourceError, "layers from 1 to 3 are expected"),
        ({"split_ngram_parts": 7}, SourceError, "split_ngram_parts = 7, which does not divide"),
        ({"ple_embed_dim": 33}, SourceError, "ple_embed_dim = 33"),
        ({"ple_layer_ids": [1, 3]}, UnsupportedError, "tables of n-grams of several sizes"),
    ],
)
def test_tables_that_are_not_possible_or_not_known_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        describe_model(fixture("qwen4_exp_text", **changes))


def test_the_states_are_those_of_transformers_cache():
    """With what the convolution of n-grams sees again; the numbers of the last tokens are not counted."""
    config = fixture("qwen4_exp_text")
    said = transformers.models.auto.CONFIG_MAPPING["qwen4_exp_text"].from_dict(config)
    cache = transformers.DynamicCache(config=said)
    with torch.inference_mode():
        transformers.AutoModelForCausalLM.from_config(said, dtype=torch.float32).eval()(
            torch.arange(12)[None], past_key_values=cache, use_cache=True
        )
    kept = [
        state
        for layer in cache.layers
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
        for state in states.values()
        if state is not None
    ]
    shape = build_layer_graph(config)
    assert [layer.past for layer in shape.layers] == [64 * 3, 0, 0]
    assert state_bytes(shape, dtype="F32") == sum(state.nbytes for state in kept if state.is_floating_point())
    assert [state.shape for state in kept if not state.is_floating_point()] == [(1, 2)]
