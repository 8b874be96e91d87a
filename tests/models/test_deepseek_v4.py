"""DeepSeek-V4: the Hub's names, who holds what, and what its attention caches."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from cache_bytes import bytes_per_token
from model_oracle import fixture, on_meta, state, stored
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from shardctl.base.errors import PartitionError, SourceError, UnsupportedError
from shardctl.estimate.model.layer_graph import TokenCache, build_layer_graph
from shardctl.estimate.model.operations import count_attention_operations
from shardctl.estimate.model.rank_shards import RankShards
from shardctl.estimate.serving.kv_cache import list_cache_terms
from shardctl.estimate.training.activations import estimate_activations
from shardctl.estimate.training.layer_flags import list_model_remarks
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import check_cuts, compute_rank_boxes

FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 0, *(4, 128) * 20, 4, 0],
}
PRO = {
    **FLASH,
    "compress_ratios": [128, *(128, 4) * 30, 0],
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "n_routed_experts": 384,
    "index_topk": 1024,
    "o_groups": 16,
    "q_lora_rank": 1536,
}
HUB = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "layers.0.hc_attn_scale": "model.layers.0.attn_hc.scale",
    "layers.0.hc_ffn_fn": "model.layers.0.ffn_hc.fn",
    "layers.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "layers.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    "layers.0.attn.attn_sink": "model.layers.0.self_attn.sinks",
    "layers.0.attn.wq_a.weight": "model.layers.0.self_attn.q_a_proj.weight",
    "layers.0.attn.q_norm.weight": "model.layers.0.self_attn.q_a_norm.weight",
    "layers.0.attn.wq_b.weight": "model.layers.0.self_attn.q_b_proj.weight",
    "layers.0.attn.wkv.weight": "model.layers.0.self_attn.kv_proj.weight",
    "layers.0.attn.kv_norm.weight": "model.layers.0.self_attn.kv_norm.weight",
    "layers.0.attn.wo_a.weight": "model.layers.0.self_attn.o_a_proj.weight",
    "layers.0.attn.wo_b.weight": "model.layers.0.self_attn.o_b_proj.weight",
    "layers.1.attn.compressor.ape": "model.layers.1.self_attn.compressor.position_bias",
    "layers.1.attn.compressor.wkv.weight": "model.layers.1.self_attn.compressor.kv_proj.weight",
    "layers.1.attn.compressor.wgate.weight": "model.layers.1.self_attn.compressor.gate_proj.weight",
    "layers.1.attn.compressor.norm.weight": "model.layers.1.self_attn.compressor.kv_norm.weight",
    "layers.1.attn.indexer.wq_b.weight": "model.layers.1.self_attn.compressor.indexer.q_b_proj.weight",
    "layers.1.attn.indexer.weights_proj.weight": (
        "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight"
    ),
    "layers.1.attn.indexer.compressor.ape": "model.layers.1.self_attn.compressor.indexer.position_bias",
    "layers.1.attn.indexer.compressor.wgate.weight": "model.layers.1.self_attn.compressor.indexer.gate_proj.weight",
    "layers.1.attn.indexer.compressor.norm.weight": "model.layers.1.self_attn.compressor.indexer.kv_norm.weight",
    "layers.0.ffn.gate.tid2eid": "model.layers.0.mlp.gate.tid2eid",
    "layers.1.ffn.gate.bias": "model.layers.1.mlp.gate.e_score_correction_bias",
    "layers.1.ffn.gate.weight": "model.layers.1.mlp.gate.weight",
    "layers.1.ffn.shared_experts.w2.weight": "model.layers.1.mlp.shared_experts.down_proj.weight",
}
"""A name of every kind that the Hub's files have besides routed experts, and what the class calls it."""
NEXT = {
    "mtp.0.attn.wo_a.weight": "mtp.0.self_attn.o_a_proj.weight",
    "mtp.0.ffn.experts.3.w2.weight": "mtp.0.mlp.experts.3.w2.weight",
    "mtp.0.ffn.gate.bias": "mtp.0.mlp.gate.e_score_correction_bias",
    "mtp.0.hc_attn_base": "mtp.0.attn_hc.base",
    "mtp.0.e_proj.weight": "mtp.0.e_proj.weight",
    "mtp.0.emb.tok_emb.weight": "mtp.0.emb.tok_emb.weight",
    "mtp.0.head.weight": "mtp.0.head.weight",
    "mtp.0.hc_head_fn": "mtp.0.hc_head_fn",
    "mtp.0.norm.weight": "mtp.0.norm.weight",
}
"""The same of the layer that predicts further tokens (vLLM, `models/deepseek_v4/nvidia/mtp.py`, `load_weights`)."""


@pytest.mark.parametrize(("config", "billions"), [(FLASH, 284), (PRO, 1573)], ids=["Flash", "Pro"])
def test_published_models_have_their_published_size(config, billions):
    assert round(describe_model(config).parameters / 1e9) == billions


@pytest.mark.parametrize("hub", [*HUB, *NEXT])
def test_names_of_the_hub_are_those_that_transformers_makes_of_them(hub):
    model = describe_model(fixture("deepseek_v4"))
    (meant,) = bind_manifest(model, stored([(hub, model.tensors[{**HUB, **NEXT}[hub]].shape)]), partial=True).tensors
    assert meant == {**HUB, **NEXT}[hub]
    if hub in HUB:
        renamed = hub
        for rule in get_checkpoint_conversion_mapping("deepseek_v4"):
            if type(rule).__name__ == "WeightRenaming":
                renamed, _ = rule.rename_source_key(renamed)
        assert renamed.replace("\\", "") in {meant, meant.removeprefix("model.")}


def test_heads_are_cut_by_groups_and_the_rest_of_attention_is_whole():
    """Eight heads of 16 in four groups, of which each has six columns: rank 1 of 2 has the last two."""
    model, mesh = describe_model(fixture("deepseek_v4")), Mesh.of(tp=2)
    base = "model.layers.1.self_attn."
    second = {
        name.removeprefix(base): [str(b) for b in compute_rank_boxes(t.shape, t.spec, mesh, mesh.coordinate(1))]
        for name, t in model.tensors.items()
        if name.startswith(base)
    }
    cut = {"sinks": "[4:8]", "q_b_proj.weight": "[64:128, 0:12]", "o_a_proj.weight": "[12:24, 0:32]"}
    cut["o_b_proj.weight"] = "[0:32, 12:24]"
    for name, boxes in second.items():
        whole = "[" + ", ".join(f"0:{n}" for n in model.tensors[base + name].shape) + "]"
        assert boxes == [cut.get(name, whole)]
    sinks = model.tensors[f"{base}sinks"]
    with pytest.raises(PartitionError, match="4 groups of attention heads"):
        check_cuts(sinks.name, sinks.shape, sinks.spec, Mesh.of(tp=8))


@pytest.mark.parametrize(
    "changes",
    [
        {"compress_ratios": [128, 4, 0, 4, 0], "layer_types": None},
        {"layer_types": None},
        {"mlp_layer_types": None, "num_hash_layers": 2},
        {"mlp_layer_types": None},
        {"compress_rates": None, "compress_rate_csa": 2, "compress_rate_hca": 16},
    ],
    ids="-".join,
)
def test_older_keys_mean_what_transformers_makes_of_them(changes):
    config = {key: value for key, value in fixture("deepseek_v4", **changes).items() if value is not None}
    assert describe_model(config).state() == state(on_meta(config))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["sliding_attention"]},
        {"layer_types": None, "compress_ratios": [0, 4, 7, 4]},
        {"mlp_layer_types": ["moe"] * 3},
        {"o_groups": 3},
    ],
    ids=str,
)
def test_configs_that_make_no_sense_are_refused(changes):
    with pytest.raises(SourceError, match=f"config.json has {[*changes][-1]} = "):
        describe_model(fixture("deepseek_v4", **changes))


def test_what_is_cached_is_what_transformers_caches():
    """Of eleven tokens, two sequences: all in the window; two vectors of four; one of eight, and three that wait."""
    config, batch, tokens = fixture("deepseek_v4", dtype="float32"), 2, 11
    kind = transformers.DeepseekV4ForCausalLM
    model = kind(kind.config_class.from_dict(json.loads(json.dumps(config)))).eval()
    with torch.no_grad():
        made = model(input_ids=torch.ones((batch, tokens), dtype=torch.long), use_cache=True).past_key_values
    theirs = {"window": 0, "compressed": 0, "indexer": 0, "wait": 0}
    for layer in made.layers:
        theirs["window"] += layer.keys.nbytes  # which are the values, too
        kept = getattr(layer, "compressed_kv", {})
        theirs["compressed"] += kept["compressor"].nbytes if "compressor" in kept else 0
        theirs["indexer"] += kept["indexer"].nbytes if "indexer" in kept else 0
        for part in (getattr(layer, "buffer_kv", {}), getattr(layer, "buffer_gate", {})):
            theirs["wait"] += sum(tensor.nbytes for tensor in part.values() if tensor is not None)
    shape = build_layer_graph(config)
    whole = RankShards(0, "only", {}, 1, 0, range(len(shape.layers)), ())
    terms = list_cache_terms(shape, whole, Mesh.of(), ServingWorkload(tokens, batch, page=1), dtype="F32")
    ours = dict.fromkeys(theirs, 0)
    for term in terms:
        (word,) = [w for w in ("wait", "indexer", "compressed", "window") if w in term.name][:1]
        ours[word] += term.low
    assert ours == theirs


def test_what_is_cached_has_the_sizes_of_vllm():
    """`DeepseekV4Attention.get_kv_cache_spec`: 512 elements; `DeepseekV4Indexer`: 132 bytes; `CompressorStateCache`:
    fp32, `2 * coff * head_dim` of `coff * compress_ratio` tokens, where `coff` is 2 for four tokens and else 1."""
    layers = build_layer_graph(FLASH).layers
    assert [layer.attention.compressed for layer in layers[:5]] == [0, 0, 4, 128, 4]
    assert layers[0].attention.besides == ()
    assert layers[2].attention.besides == (
        TokenCache("keys and values of 4 tokens, compressed", 512, 0, 4),
        TokenCache("keys of the indexer", 128, 132, 4),
        TokenCache("4 tokens that wait for the compressor", 2048, 8192, 4, 8),
        TokenCache("4 tokens that wait for the compressor of the indexer", 512, 2048, 4, 8),
    )
    assert layers[3].attention.besides == (
        TokenCache("keys and values of 128 tokens, compressed", 512, 0, 128),
        TokenCache("128 tokens that wait for the compressor", 1024, 4096, 128, 128),
    )
    assert bytes_per_token(build_layer_graph(FLASH), dtype="BF16") == 43 * 1024 + 21 * 320 + 20 * 8


def test_attention_sees_the_window_and_compressed_tokens():
    plain, sparse, dense = (build_layer_graph(FLASH).layers[n] for n in (0, 2, 3))
    for layer, seen, scored in ((plain, 128, 0), (dense, 128 + 1000, 0), (sparse, 128 + 512, 32_000)):
        assert count_attention_operations([layer], Mesh.of(tp=8), 1, 128_000) == 2 * (
            seen * 64 * 1024 / 8 + scored * 64 * 128
        )


def test_what_is_not_counted_behind_the_last_layer_is_said():
    shape = build_layer_graph(fixture("deepseek_v4"))
    assert any("behind the last layer" in one for one in list_model_remarks(TrainingWorkload(8), shape))
    assert [*list_model_remarks(TrainingWorkload(8), build_layer_graph(fixture("llama")))] == []


def test_what_training_keeps_in_megatron_is_said_to_be_unknown():
    shape = build_layer_graph(fixture("deepseek_v4"))
    for number, why in enumerate(("mixes several states", "an indexer chooses", "compressed tokens")):
        holding = RankShards(0, "only", {}, 1, 0, range(number, number + 1), ())
        with pytest.raises(UnsupportedError, match=f"layer {number} is not known: it .*{why}"):
            estimate_activations(shape, holding, Mesh.of(), TrainingWorkload(8, profile="megatron"), stages=(4,))


FP4 = {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "expert_dtype": "fp4",
    "moe_intermediate_size": 64,
}


def test_experts_are_two_codes_in_a_byte_with_a_scale_for_32_and_the_rest_is_fp8():
    """vLLM, `models/deepseek_v4/nvidia/model.py`, `w13_weight` and `w13_weight_scale`."""
    tensors = describe_model(fixture("deepseek_v4", **FP4)).tensors
    found = {
        name: (tensors[name].dtype.name, tensors[name].shape)
        for name in tensors
        if name.startswith(("model.layers.1.mlp.experts.3.w2", "model.layers.1.self_attn.o_b_proj"))
    }
    assert found == {
        "model.layers.1.mlp.experts.3.w2.weight": ("I8", (32, 32)),
        "model.layers.1.mlp.experts.3.w2.scale": ("F8_E8M0", (32, 2)),
        "model.layers.1.self_attn.o_b_proj.weight": ("F8_E4M3", (32, 24)),
        "model.layers.1.self_attn.o_b_proj.scale": ("F8_E8M0", (1, 1)),
        **{n: (t.dtype.name, t.shape) for n, t in tensors.items() if n.endswith("o_b_proj.input_scale") and ".1." in n},
    }
    second = tensors["model.layers.1.mlp.experts.3.w2.scale"]
    mesh = Mesh.of(tp=2)
    assert [str(b) for b in compute_rank_boxes(second.shape, second.spec, mesh, mesh.coordinate(1))] == ["[0:32, 1:2]"]


def test_scales_have_the_names_of_the_hub():
    model = describe_model(fixture("deepseek_v4", **FP4))
    for hub, name in (
        ("layers.1.ffn.experts.3.w2.scale", "model.layers.1.mlp.experts.3.w2.scale"),
        ("layers.1.attn.wo_b.scale", "model.layers.1.self_attn.o_b_proj.scale"),
    ):
        (meant,) = bind_manifest(model, stored([(hub, model.tensors[name].shape)], "F8_E8M0"), partial=True).tensors
        assert meant == name


def test_experts_of_an_unknown_type_are_refused():
    with pytest.raises(UnsupportedError, match="experts of this fp8 checkpoint are int3"):
        describe_model(fixture("deepseek_v4", **{**FP4, "expert_dtype": "int3"}))
