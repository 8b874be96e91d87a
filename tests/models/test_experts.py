"""Experts in the tables: who holds which, what real models count, and that a hundred thousand tensors stay quick."""

from __future__ import annotations

import time

import pytest
from model_oracle import FIXTURES, fixture, on_meta, stored

from shardctl.base.errors import PartitionError, SourceError
from shardctl.base.garbage_collection import pause_garbage_collection
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest
from shardctl.tensors.box import Box, subtract_all
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import check_cuts, compute_rank_boxes

MOE = [name for name in FIXTURES if any(t.spec.of_expert for t in describe_model(fixture(name)).own())]


def ranks(mesh):
    return [mesh.coordinate(rank) for rank in range(mesh.world)]


@pytest.mark.parametrize("name", MOE)
def test_what_transformers_shards_over_experts_ep_divides_and_nothing_else(name):
    config = fixture(name)
    model, real = describe_model(config), on_meta(config)
    plan = getattr(real.config, "base_model_ep_plan", None)
    divided = {
        t.name
        for t in model.own()
        if t.spec.member or any(cut.axis == "ep" for cuts in t.spec.cuts[:1] for cut in cuts)
    }
    assert divided
    if plan is None:  # of Llama 4 and Jamba
        return
    arrays = {t.name: (t.name,) for t in model.own()} | {f.name: f.tensors for f in model.fusions.values()}
    expected = {
        tensor
        for array, tensors in arrays.items()
        if plan.get(".".join("*" if p.isdecimal() else p for p in array.removeprefix("model.").split(".")))
        == "grouped_gemm"
        for tensor in tensors
    }
    assert divided == expected


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("degrees", [{"dp": 4, "ep": 2}, {"tp": 4, "ep": 2, "etp": 2}, {"fsdp": 4, "ep": 2}], ids=str)
def test_the_ranks_of_ep_hold_every_element_of_every_expert_and_no_expert_twice(name, degrees):
    model, mesh = describe_model(fixture(name)), Mesh.of(**degrees)
    for tensor in model.own():
        if not tensor.spec.of_expert:
            continue
        check_cuts(tensor.name, tensor.shape, tensor.spec, mesh)
        held = [(at, box) for at in ranks(mesh) for box in compute_rank_boxes(tensor.shape, tensor.spec, mesh, at)]
        assert subtract_all(Box.whole(tensor.shape), [box for _, box in held]) == []
        if tensor.spec.member:
            assert len({at["ep"] for at, _ in held}) == 1
        once = [box for at, box in held if at["replica"] == 0 and (at["etp"] == 0 or mesh.etp > 1)]
        whole = Box.whole(tensor.shape).size
        cut = any(c.axis == "etp" for dim in tensor.spec.cuts for c in dim)
        assert sum(box.size for box in once) == whole * (1 if cut else mesh.etp)


def test_latent_attention_is_cut_by_heads_and_the_latents_are_whole():
    model, mesh = describe_model(fixture("deepseek_v3")), Mesh.of(tp=2)
    base = "model.layers.0.self_attn"
    second = {
        name: [str(b) for b in compute_rank_boxes(t.shape, t.spec, mesh, mesh.coordinate(1))]
        for name, t in model.tensors.items()
        if name.startswith(base)
    }
    assert second[f"{base}.q_b_proj.weight"] == ["[24:48, 0:12]"]  # two heads of 8 + 4
    assert second[f"{base}.kv_b_proj.weight"] == ["[32:64, 0:12]"]  # two heads of 8 + 8
    assert second[f"{base}.o_proj.weight"] == ["[0:32, 16:32]"]
    for whole in ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"):
        tensor = model.tensors[f"{base}.{whole}.weight"]
        assert second[tensor.name] == [str(Box.whole(tensor.shape))]


def test_linear_attention_is_cut_by_key_heads_with_the_value_heads_they_serve():
    """Four key heads of 4, each serving two value heads of 6: rank 1 of 2 has the last two."""
    model, mesh = describe_model(fixture("qwen3_next")), Mesh.of(tp=2)
    base = "model.layers.0.linear_attn"
    second = {
        name.removeprefix(f"{base}."): [str(b) for b in compute_rank_boxes(t.shape, t.spec, mesh, mesh.coordinate(1))]
        for name, t in model.tensors.items()
        if name.startswith(base)
    }
    assert second == {
        "dt_bias": ["[4:8]"],
        "A_log": ["[4:8]"],
        "conv1d.weight": ["[8:16, 0:1, 0:4]", "[24:32, 0:1, 0:4]", "[56:80, 0:1, 0:4]"],
        "in_proj_qkvz.weight": ["[64:128, 0:32]"],
        "in_proj_ba.weight": ["[8:16, 0:32]"],
        "norm.weight": ["[0:6]"],
        "out_proj.weight": ["[0:32, 24:48]"],
    }


def test_linear_attention_in_separate_projections_is_cut_by_the_same_heads():
    """As above, but q, k and v are sections of `in_proj_qkv`, as they are of the convolution."""
    model, mesh = describe_model(fixture("qwen3_5")), Mesh.of(tp=2)
    base = "model.language_model.layers.0.linear_attn"
    second = {
        name.removeprefix(f"{base}."): [str(b) for b in compute_rank_boxes(t.shape, t.spec, mesh, mesh.coordinate(1))]
        for name, t in model.tensors.items()
        if name.startswith(f"{base}.in_proj")
    }
    assert second == {
        "in_proj_qkv.weight": ["[8:16, 0:32]", "[24:32, 0:32]", "[56:80, 0:32]"],
        "in_proj_z.weight": ["[24:48, 0:32]"],
        "in_proj_b.weight": ["[4:8, 0:32]"],
        "in_proj_a.weight": ["[4:8, 0:32]"],
    }


def test_what_qwen3_5_predicts_with_has_the_names_of_its_files_whoever_it_sees_for():
    for name in ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"):
        further = {n for n, t in describe_model(fixture(name)).tensors.items() if t.row.optional}
        assert {n.split(".layers.0.")[0] for n in further} == {
            "mtp",
            "mtp.fc.weight",
            "mtp.norm.weight",
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
        }
        assert "mtp.layers.0.self_attn.q_norm.weight" in further


def test_a_pair_of_gate_and_up_columns_stays_together():
    tensor = describe_model(fixture("gpt_oss")).tensors["model.layers.0.mlp.experts.gate_up_proj"]
    mesh = Mesh.of(dp=2, ep=2, etp=1)
    assert [str(b) for b in compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(1))] == [
        "[2:4, 0:32, 0:128]"
    ]
    with pytest.raises(PartitionError, match="over etp=128: 64 pairs of gate and up columns"):
        check_cuts(tensor.name, tensor.shape, tensor.spec, Mesh.of(tp=128))


MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_mxfp4_blocks_are_shared_out_as_in_vllm(tp):
    """`per_rank_intermediate_size_block` of `vllm/model_executor/models/gpt_oss.py`, and what it narrows."""
    config = fixture("gpt_oss", intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8, **MXFP4)
    model, mesh = describe_model(config), Mesh.of(tp=tp)
    width = -(-2880 // 32 // tp) * 32
    for rank in range(tp):
        start, stop = rank * width, min((rank + 1) * width, 2880)
        for name, dim, of in (
            ("gate_up_proj_blocks", 1, lambda n: 2 * n),
            ("gate_up_proj_bias", 1, lambda n: 2 * n),
            ("down_proj_blocks", 2, lambda n: n // 32),
            ("down_proj_scales", 2, lambda n: n // 32),
        ):
            tensor = model.tensors[f"model.layers.0.mlp.experts.{name}"]
            (box,) = compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(rank))
            assert (box.origin[dim], box.origin[dim] + box.shape[dim]) == (of(start), of(stop))


def test_mxfp4_is_cut_between_blocks_and_scales_with_them():
    model, mesh = describe_model(fixture("gpt_oss", **MXFP4)), Mesh.of(tp=2)
    base = "model.layers.0.mlp.experts"
    second = {
        name: (
            tensor.dtype.name,
            [str(b) for b in compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(1))],
        )
        for name, tensor in model.tensors.items()
        if name.startswith(base)
    }
    assert second == {
        f"{base}.gate_up_proj_blocks": ("U8", ["[0:4, 64:128, 0:1, 0:16]"]),
        f"{base}.gate_up_proj_scales": ("U8", ["[0:4, 64:128, 0:1]"]),
        f"{base}.gate_up_proj_bias": ("BF16", ["[0:4, 64:128]"]),
        f"{base}.down_proj_blocks": ("U8", ["[0:4, 0:32, 1:2, 0:16]"]),
        f"{base}.down_proj_scales": ("U8", ["[0:4, 0:32, 1:2]"]),
        f"{base}.down_proj_bias": ("BF16", ["[0:4, 0:32]"]),
    }
    blocks = model.tensors[f"{base}.down_proj_blocks"]
    with pytest.raises(PartitionError, match="over etp=4: 2 MXFP4 blocks of 32 columns") as caught:
        check_cuts(blocks.name, blocks.shape, blocks.spec, Mesh.of(tp=4))
    assert caught.value.hint == "use --ep 4, which leaves each expert whole, or --etp 1 or 2"


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "hy_v4", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"]
)
def test_layers_that_predict_further_tokens_are_known_and_not_demanded(name):
    model = describe_model(fixture(name))
    further = [t for t in model.tensors.values() if t.row.optional]
    assert further
    assert {t.spec.where for t in further} == {(("last", 0),)}
    own = {t.name: t.shape for t in model.own()}
    assert list(bind_manifest(model, stored(own.items())).tensors) == list(own)
    both = {**own, **{t.name: t.shape for t in further}}
    assert list(bind_manifest(model, stored(both.items())).tensors) == list(both)
    assert sum(".experts." in t.name for t in further) == 3 * 4


MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
        (DEEPSEEK_V3, 671_026_419_200),  # with the biases of its routers, without the layer that predicts
        (GPT_OSS_20B, 20_914_757_184),
    ],
    ids=lambda v: v["architectures"][0] if isinstance(v, dict) else "",
)
def test_published_mixtures_have_their_published_number_of_parameters(config, parameters):
    assert describe_model(config).parameters == parameters


def test_the_layer_that_deepseek_v3_predicts_with_has_the_names_of_its_files():
    model = describe_model(DEEPSEEK_V3)
    last = {name.removeprefix("model.layers.61.") for name in model.tensors if name.startswith("model.layers.61.")}
    ends = {"embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight"}
    assert {n for n in last if ".experts." not in n and "self_attn" not in n} == ends | {
        "shared_head.norm.weight",
        "shared_head.head.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        *(f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    assert sum(".experts." in n for n in last) == 3 * 256


@pause_garbage_collection()  # a pass over all that earlier tests left in this process takes longer than what is timed
def test_a_hundred_thousand_tensors_are_described_and_bound_in_time_that_grows_with_their_number():
    """The shape of DeepSeek-V3 with smaller tensors; from twice the layers twice the time, with a wide margin."""
    small = {**DEEPSEEK_V3, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 16, "vocab_size": 64}
    spent = {}
    for layers in (61, 122):
        began = time.process_time()
        model = describe_model({**small, "num_hidden_layers": layers})
        described = time.process_time() - began
        headers = stored((name, tensor.shape) for name, tensor in model.tensors.items())
        began = time.process_time()
        assert len(bind_manifest(model, headers).tensors) == len(model.tensors)
        spent[len(model.tensors)] = described + time.process_time() - began
    (few, fast), (many, slow) = spent.items()
    assert (few, many) == (46_186, 93_888)
    assert slow < 10  # a quarter of that where nothing else runs
    assert slow / many < 3 * fast / few


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers = 3 where a list of layers"),
        ("llama4_text", {"moe_layers": "all"}, "moe_layers = 'all' where a list of names or numbers"),
        ("mixtral", {"num_local_experts": None}, "no 'num_local_experts'"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ("qwen3_next", {"linear_num_value_heads": 6}, "6 value heads for 4 key heads"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_with_the_key(name, changes, message):
    with pytest.raises(SourceError, match=message):
        describe_model(fixture(name, **changes))


def test_norms_over_all_heads_of_minimax_are_cut_with_the_heads():
    """vLLM, `minimax_m2.py`, `MiniMaxText01RMSNormTP`: each rank has the weights of its own heads."""
    model, mesh = describe_model(fixture("minimax_m2")), Mesh.of(tp=2)
    for name, second in (("q_norm", "[16:32]"), ("k_norm", "[8:16]")):
        tensor = model.tensors[f"model.layers.0.self_attn.{name}.weight"]
        (box,) = compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(1))
        assert str(box) == second
