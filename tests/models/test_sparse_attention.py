"""Latent attention to chosen tokens: who holds the indexer, which layers have one, and what it adds to the cache."""

from __future__ import annotations

import pytest
from cache_bytes import bytes_per_token
from model_oracle import fixture, on_meta, state

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.estimate.model.layer_graph import LayerIndexer, TokenCache, build_layer_graph
from shardctl.estimate.model.operations import count_attention_operations
from shardctl.models import describe_model
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.windows import list_windows
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import compute_rank_boxes

V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
}
GLM_5 = {
    **V32,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    # DeepSeek-V3 has 671,026,419,200; of GLM-5, 744 B are published.
    [(V32, 671_026_419_200 + 61 * (64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168)), (GLM_5, 743_910_000_000)],
    ids=["DeepSeek-V3.2", "GLM-5"],
)
def test_published_models_have_their_published_size(config, parameters):
    assert describe_model(config).parameters == pytest.approx(parameters, rel=1e-5)


def test_indexers_are_whole_on_every_rank_of_tp():
    model = describe_model(fixture("deepseek_v32"))
    inside = [t for t in model.tensors.values() if ".indexer." in t.name]
    assert len(inside) == 3 * 5  # of two layers, and of the one that predicts
    for tensor in inside:
        for at in map(Mesh.of(tp=2).coordinate, range(2)):
            (box,) = compute_rank_boxes(tensor.shape, tensor.spec, Mesh.of(tp=2), at)
            assert box.shape == tensor.shape


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FSSFSF", "index_topk_freq": None},
        {"indexer_types": ["full", "full", "shared", "shared", "full", "shared"]},
        {"index_topk_freq": None},
    ],
    ids="-".join,
)
def test_the_layers_with_an_indexer_are_those_of_transformers(changes):
    config = fixture("glm_moe_dsa", num_hidden_layers=6, mlp_layer_types=None, **changes)
    config = {key: value for key, value in config.items() if value is not None}
    assert describe_model(config).state() == state(on_meta(config))


def test_files_may_have_indexers_that_transformers_leaves_out():
    """GLM-5.2 has them in all layers (vLLM, `deepseek_v2.py`: "the checkpoint ships indexer weights for all")."""
    model = describe_model(fixture("glm_moe_dsa"))
    assert [model.tensors[f"model.layers.{n}.self_attn.indexer.wk.weight"].optional for n in range(4)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("kinds", [["full"], ["full", "none", "full"], 3, "FF"])
def test_kinds_that_are_none_are_refused(kinds):
    with pytest.raises(SourceError, match=r"config.json has .* where "):
        describe_model(fixture("glm_moe_dsa", indexer_types=kinds))


@pytest.mark.parametrize("kinds", [["dense"], ["dense", "sparse", "none"], "dense"])
def test_kinds_of_mlps_that_are_none_are_refused(kinds):
    with pytest.raises(SourceError, match=r"mlp_layer_types = .* where .* expected"):
        describe_model(fixture("glm_moe_dsa", mlp_layer_types=kinds))


def test_an_indexer_caches_a_key_for_all_heads_which_vllm_keeps_in_fp8_with_a_scale():
    """`Indexer` of vLLM's `deepseek_v2.py`: `head_dim + head_dim // quant_block_size * 4` bytes, 132."""
    layers = build_layer_graph(V32).layers
    assert {layer.attention.indexer for layer in layers} == {LayerIndexer(64, 128)}
    assert {layer.attention.besides for layer in layers} == {(TokenCache("keys of the indexer", 128, 132),)}
    assert bytes_per_token(build_layer_graph(V32), dtype="BF16") == 61 * (512 + 64 + 128) * 2


def test_layers_that_take_over_a_choice_cache_no_keys_of_their_own():
    first, _, third = build_layer_graph(fixture("glm_moe_dsa")).layers
    assert first.attention.chosen == third.attention.chosen == 4
    assert first.attention.besides
    assert not third.attention.besides
    assert third.attention.indexer is None


def test_attention_looks_at_chosen_tokens_and_the_indexer_at_all():
    (layer, *_), mesh = build_layer_graph(V32).layers, Mesh.of(tp=8)
    for context, seen in ((1000, 1000), (100_000, 2048)):
        assert count_attention_operations([layer], mesh, 1, context) == 2 * (
            seen * 128 * (192 + 128) / 8 + context * 64 * 128
        )


def test_what_configs_call_layers_of_sparse_attention_is_known():
    kinds = ["indexed_attention", "deepseek_sparse_attention"]
    assert list_windows(None, ModelConfig({"layer_types": kinds}), 2) == (None, None)


def test_what_megatron_keeps_of_sparse_attention_is_said_to_be_unknown():
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.training.activations import estimate_activations
    from shardctl.estimate.workload import TrainingWorkload

    shape = build_layer_graph(fixture("deepseek_v32"))
    holding = RankShards(0, "only", {}, 1, 0, range(len(shape.layers)), ())
    with pytest.raises(UnsupportedError, match="layer 0 is not known: it attends to tokens that an indexer chooses"):
        estimate_activations(shape, holding, Mesh.of(), TrainingWorkload(8, profile="megatron"), stages=(2,))
    assert estimate_activations(shape, holding, Mesh.of(), TrainingWorkload(8, profile="hf"), stages=(2,))
