"""Kimi-Linear and Kimi-K3: linear and latent attention, what each caches, and the names that files have."""

from __future__ import annotations

import json

import pytest
from model_oracle import CONFIGS, fixture, stored

from shardctl.base.errors import SourceError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import compute_rank_boxes

LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
K3 = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "attn_res_block_size": 12,
        "q_lora_rank": 1536,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [n for n in range(1, 93) if n % 4],
            "head_dim": 128,
            "num_heads": 96,
            "use_full_rank_gate": True,
        },
    },
    "vision_config": {"mm_projector_type": "patchmergerv2"},
}


def test_it_has_its_published_size():
    """48 B in all (the name on the Hub: Kimi-Linear-48B-A3B)."""
    assert round(describe_model(LINEAR).parameters / 1e9) in (48, 49)


def test_linear_attention_keeps_a_state_and_latent_attention_a_latent():
    """`kda_state_shape` of vLLM's `mamba_utils.py`: three convolutions, and heads of 128 x 128."""
    first, fourth = build_layer_graph(LINEAR).layers[0], build_layer_graph(LINEAR).layers[3]
    assert first.attention is None
    assert (first.state.channels, first.state.window, first.state.recurrent) == (3 * 32 * 128, 4, 32 * 128 * 128)
    assert fourth.state is None
    assert (fourth.attention.latent, fourth.attention.heads) == (512 + 64, 32)


@pytest.mark.parametrize("full", [[3], [1, 3], 3])
def test_layers_that_are_of_both_kinds_or_of_none_are_refused(full):
    linear = {**fixture("kimi_linear")["linear_attn_config"], "kda_layers": [1], "full_attn_layers": full}
    with pytest.raises(SourceError, match="full_attn_layers"):
        describe_model(fixture("kimi_linear", linear_attn_config=linear))


def test_mlps_that_transformers_saves_as_experts_are_mlps():
    """Saving turns `mlp` into `block_sparse_moe` in all layers (`conversion_mapping.py`)."""
    model = describe_model(fixture("kimi_linear"))
    meant = "model.layers.0.mlp.gate_proj.weight"
    saved = stored([("model.layers.0.block_sparse_moe.gate_proj.weight", model.tensors[meant].shape)])
    assert [*bind_manifest(model, saved, partial=True).tensors] == [meant]


def test_layers_that_predict_have_latent_attention_and_experts():
    """`KimiK3MultiTokenPredictorLayer` in vLLM's `models/kimi_k3/nvidia/mtp.py`."""
    layer = "model.layers.3."
    model = describe_model(fixture("kimi_linear"))
    found = {name.removeprefix(layer): t for name, t in model.tensors.items() if name.startswith(layer)}
    assert all(t.optional for t in found.values())
    ends = {"embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"}
    assert {f"{name}.weight" for name in ends} <= found.keys()
    assert "self_attn.kv_b_proj.weight" in found
    assert "block_sparse_moe.experts.3.w2.weight" in found
    assert not any("conv1d" in name for name in found)


def test_k3_has_the_size_and_the_parts_that_engines_build():
    """vLLM's `models/kimi_k3/nvidia/model.py`; of the text model."""
    model = describe_model(K3)
    inner = "language_model.model.layers.{}.{}"
    shapes = {
        inner.format(0, "self_attn.g_proj.weight"): (96 * 128, 7168),
        inner.format(3, "self_attn.g_proj.weight"): (96 * 128, 7168),
        inner.format(3, "self_attn.q_b_proj.weight"): (96 * 192, 1536),
        inner.format(1, "block_sparse_moe.experts.895.w1.weight"): (3072, 3584),
        inner.format(1, "block_sparse_moe.routed_expert_up_proj.weight"): (7168, 3584),
        inner.format(92, "mlp_res_proj.weight"): (1, 7168),
        "language_model.model.output_attn_res_proj.weight": (1, 7168),
    }
    assert {name: model.tensors[name].shape for name in shapes} == shapes
    assert "language_model.model.layers.0.self_attn.g_a_proj.weight" not in model.tensors
    layers = build_layer_graph(K3).layers
    assert sum(layer.state is not None for layer in layers) == 69
    assert layers[1].experts.width == 3584
    assert layers[1].gated


def test_k3s_decays_may_be_more_than_its_heads():
    """Its files have 128 for 96 heads, of which engines read the first (`a_log_weight_loader` in vLLM)."""
    config = json.loads((CONFIGS.with_name("configs_hub") / "kimi_k3.json").read_text())
    model, name = describe_model(config), "language_model.model.layers.0.self_attn.A_log"
    bound = bind_manifest(model, stored([(name, (7,))]), partial=True).tensors[name]
    mesh = Mesh.of(tp=2)
    for rank in range(2):
        (box,) = compute_rank_boxes(bound.shape, model.tensors[name].spec, mesh, mesh.coordinate(rank))
        assert box.shape == (7,)
