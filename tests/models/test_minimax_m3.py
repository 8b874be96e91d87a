"""MiniMax-M3: attention to chosen blocks, its indexer, and the names of the Hub."""

from __future__ import annotations

import pytest
from model_oracle import fixture, stored

from shardctl.base.errors import SourceError
from shardctl.estimate.model.layer_graph import LayerIndexer, TokenCache, build_layer_graph
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import compute_rank_boxes

M3 = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "text_config": {
        "moe_layer_freq": [0] * 3 + [1] * 57,
        "sparse_attention_config": {"sparse_attention_freq": [0] * 3 + [1] * 57},
        "num_mtp_modules": 1,
    },
    "vision_config": {},
}


def test_indexers_choose_blocks_and_cache_a_key_in_the_type_of_the_cache():
    """`resolve_indexer_kv_dtype("bf16")` in vLLM's `models/minimax_m3/nvidia/model.py`."""
    layers = build_layer_graph(M3).layers
    assert {layer.attention.chosen for layer in layers[:3]} == {None}
    assert {layer.attention.chosen for layer in layers[3:]} == {16 * 128}
    assert {layer.attention.indexer for layer in layers[3:]} == {LayerIndexer(4, 128)}
    assert {layer.attention.besides for layer in layers[3:]} == {(TokenCache("keys of the indexer", 128, 0),)}


@pytest.mark.parametrize("tp", [2, 8])
def test_heads_of_the_indexer_go_where_key_value_heads_go(tp):
    """`MinimaxM3QKVParallelLinearWithIndexer` in vLLM's `layers/linear.py`, with copies where heads are too few."""
    model, mesh = describe_model(M3, kv_heads="replicate"), Mesh.of(tp=tp)
    for rank in range(tp):
        rows = []
        for name in ("k_proj", "index_q_proj", "index_k_proj"):
            tensor = model.tensors[f"model.language_model.layers.3.self_attn.{name}.weight"]
            (box,) = compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(rank))
            rows.append((box.origin[0], box.shape[0]))
        first = 128 * (rank * 4 // tp)
        assert rows == [(first, max(512 // tp, 128))] * 2 + [(0, 128)]


@pytest.mark.parametrize(
    ("hub", "meant"),
    [
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.model.norm.weight", "model.language_model.norm.weight"),
        (
            "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight",
            "model.language_model.layers.1.block_sparse_moe.experts.3.w2.weight",
        ),
        (
            "language_model.model.mtp.layers.0.transformer_layer.self_attn.index_q_proj.weight",
            "model.language_model.mtp.layers.0.transformer_layer.self_attn.index_q_proj.weight",
        ),
        (
            "vision_tower.vision_model.embeddings.patch_embedding.weight",
            "model.vision_tower.embeddings.proj.weight",
        ),
        (
            "vision_tower.vision_model.encoder.layers.1.mlp.fc1.bias",
            "model.vision_tower.layers.1.mlp.fc1.bias",
        ),
        ("vision_tower.vision_model.pre_layrnorm.bias", "model.vision_tower.pre_layrnorm.bias"),
        ("patch_merge_mlp.linear_2.weight", "model.multi_modal_projector.merge_linear_2.weight"),
    ],
)
def test_names_of_the_hub_are_known(hub, meant):
    """`minimax_m3_vl` in transformers' `conversion_mapping.py`; those of layers that predict in vLLM's `mtp.py`."""
    model = describe_model(fixture("minimax_m3_vl"))
    assert [*bind_manifest(model, stored([(hub, model.tensors[meant].shape)]), partial=True).tensors] == [meant]


def test_marks_of_other_than_all_layers_are_refused():
    with pytest.raises(SourceError, match="where a list of 3 layers is expected"):
        describe_model(fixture("minimax_m3_vl_text", mlp_layer_types=["dense"]))
