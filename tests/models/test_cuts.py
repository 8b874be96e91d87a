"""What the tables cut is what transformers cuts, whole heads, and never a byte lost or held twice."""

from __future__ import annotations

import re

import pytest
import torch
from family_checks import FamilyChecks
from model_oracle import FIXTURES, fixture, on_meta

from shardctl.base.errors import PartitionError
from shardctl.models import describe_model
from shardctl.tensors.box import Box, subtract_all
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import (
    AxisPartition,
    PartitionSection,
    check_cuts,
    compute_intervals,
    compute_rank_boxes,
)

EACH = FamilyChecks()
DEGREES = ({"tp": 2}, {"fsdp": 3}, {"fsdp": 4, "tp": 2}, {"fsdp": 2, "tp": 4})
UNPLANNED = {
    "albert",
    "bart",
    "bert",
    "big_bird",
    "bitnet",
    "bloom",
    "camembert",
    "clip",
    "clip_text_model",
    "clip_vision_model",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "falcon",
    "falcon_mamba",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gte",
    "jetmoe",
    "jina_embeddings_v3",
    "longt5",
    "m2m_100",
    "mamba",
    "mamba2",
    "marian",
    "mbart",
    "mllama",
    "mllama_text_model",
    "modernbert",
    "modernbert-decoder",
    "mpnet",
    "mpt",
    "mt5",
    "nomic_bert",
    "opt",
    "pegasus",
    "persimmon",
    "recurrent_gemma",
    "roberta",
    "roberta-prelayernorm",
    "siglip",
    "stablelm",
    "t5",
    "umt5",
    "vit",
    "whisper",
    "xlm-roberta",
    "xlm-roberta-xl",
    "zamba2",
}
"""Families for which transformers has no plan."""
PARTLY_PLANNED = {
    "afmoe": "its plan is for the routed experts, and leaves attention and the shared ones whole",
    "bailing_hybrid": "its plan is for the MLPs, and leaves attention of both kinds whole",
    "bamba": "its plan is for the head alone",
    "dbrx": "its plan is for the head alone",
    "deepseek_v3": "its plan is for the MLPs, and leaves latent attention whole",
    "deepseek_v4": "its plan is for the routed experts, and leaves attention and the shared ones whole",
    "falcon_h1": "its plan is for the head alone",
    "glm4_moe_lite": "its plan leaves shared experts whole",
    "glm5_next": "its plan is for latent attention and MLPs, and leaves delta attention whole",
    "gpt_oss": "it has a plan for expert parallelism only",
    "granitemoe": "its plan is for the experts, and leaves attention whole",
    "granitemoehybrid": "the same",
    "granitemoeshared": "the same",
    "kimi_linear": "its plan is for the MLPs, and leaves attention of both kinds whole",
    "jamba": "its plan is for the experts that most Jambas have, and leaves attention and Mamba whole",
    "minimax_m3_vl": "its plan is for attention and the routed experts, and leaves the indexer and other MLPs whole",
    "minimax_m3_vl_text": "the same",
    "lfm2": "its plan is for the head alone",
    "lfm2_moe": "its plan is for the experts, and leaves attention and convolutions whole",
    "hunyuan_v1_dense": "its plan is for the head alone",
    "hunyuan_v1_moe": "its plan is for the routed experts, and leaves attention and the shared one whole",
    "mistral4": "its plan is for the MLPs, and leaves latent attention whole",
    "olmo_hybrid": "its plan is for attention and MLPs, and leaves linear attention whole",
    "nemotron_h": "its plan is for the experts and the embedding, and leaves attention and Mamba whole",
    "phimoe": "its plan is for the experts, and leaves attention whole",
    "qwen3_vl": "its plan is for the head only",
    "voxtral": "its plan leaves the head whole",
    "qwen4_exp": "its plan is for linear attention, MLPs and tables of n-grams, and leaves attention whole",
    "qwen4_exp_text": "the same",
}
OWN_CHOICE = {
    "model.embed_tokens.weight": "most plans leave it whole; a tied one must be cut like the head, and Megatron, "
    "torchtitan and those plans that do cut it (`embedding_rowwise`) cut it over the vocabulary",
    "gpt_neox.embed_in.weight": "the same",
    "embed_tokens_per_layer.weight": "Gemma 4: a second embedding, cut like the first, as in vLLM",
    "linear_attn.A_log": "Qwen3-Next: goes where the heads go",
    "linear_attn.dt_bias": "the same",
    "linear_attn.conv1d.weight": "the same",
    "mlp.shared_expert.gate_proj.weight": "Qwen2-MoE: cut like any MLP, as in the plan of Qwen3-Next",
    "mlp.shared_expert.up_proj.weight": "the same",
    "mlp.shared_expert.down_proj.weight": "the same",
    "mlp.shared_experts.gate_proj.weight": "Solar-Open and K-EXAONE: cut like any MLP, as in the plan of DeepSeek-V3",
    "mlp.shared_experts.up_proj.weight": "the same",
    "mlp.shared_experts.down_proj.weight": "the same",
    "self_attn.q_norm.weight": "Cohere: a head's norm is its own, and goes where the head goes",
    "self_attn.k_norm.weight": "Cohere: a head's norm is its own, and goes where the head goes",
}
"""Where we differ from a plan that says nothing about a tensor, and why."""
OTHERWISE = {
    "linear_attn.out_proj.weight": "Qwen3-Next: the plan cuts rows and gathers, because its forward pass needs all "
    "heads; we cut columns by heads, as vLLM does",
    "hyper_connection.input_mix_weight_down.weight": "Qwen4-Exp: what mixes the streams is small, and whole",
    "hyper_connection_mixer.input_mix_weight_down.weight": "the same",
    "indexer.index_qk_proj.weight": "Qwen4-Exp: the plan gathers what it cuts; indexers are whole, as in DeepSeek-V3.2",
}
"""Where we differ from what a plan says, and why."""

TOWERS = (".vision_tower.", "vision_model.", "multi_modal_projector.")
"""What is whole on every rank, whatever a plan says."""


def tp_dims(tensor):
    """The dims that tp cuts; inside an expert it is etp, which is tp unless someone says otherwise."""
    return {dim for dim, cuts in enumerate(tensor.spec.cuts) if any(cut.axis in {"tp", "etp"} for cut in cuts)}


def planned_of_experts(model, plan):
    """What a plan for arrays of experts means for the tensors that they are or hold; styles count dims from the end."""
    styles = {"packed_colwise": 2, "colwise": 2, "packed_rowwise": 1, "rowwise": 1}
    held = {t.name: ((t.name, tuple(range(len(t.shape)))),) for t in model.own()}
    for fusion in model.fusions.values():
        axes = [view.axes for view in fusion.places.views]
        held[fusion.name] = tuple(zip(fusion.tensors, axes, strict=True))
    return {
        tensor: {axes.index(max(0, ndim - styles[plan[pattern]]))}
        for name, tensors in held.items()
        if (pattern := ".".join("*" if p.isdecimal() else p for p in name.split("."))) in plan
        for ndim in [len(model.fusions[name].shape if name in model.fusions else model.tensors[name].shape)]
        for tensor, axes in tensors
    }


def planned(model, plan):
    """The dims that transformers' plan cuts of each tensor it speaks of."""
    expected = planned_of_experts(model, plan)
    moved = {
        tensor: fusion.name
        for fusion in model.fusions.values()
        if len(fusion.tensors) == 1 or "ngram_embedding" in fusion.name
        for tensor in fusion.tensors
    }
    for pattern, style in plan.items():
        for tensor in (n for t in model.own() for n in (t.name, *t.ties)):
            module, _, kind = moved.get(tensor, tensor).rpartition(".")
            if ".".join("*" if p.isdecimal() else p for p in module.split(".")) != pattern:
                continue
            if style.startswith("colwise") or style == "embedding_rowwise":
                expected[tensor] = {0}
            elif style == "embedding_colwise":
                expected[tensor] = {1}
            elif style.startswith("rowwise"):
                expected[tensor] = {1} if kind == "weight" else set()
            elif style not in {"moe_tp_experts", "local_params"}:  # of the module, for its forward pass
                assert style.startswith(("replicated", "mla_kv_a_proj")), style
                expected[tensor] = set()
    return expected


@EACH.add()
def check_tp_cuts_are_those_of_transformers_own_plan(name):
    config = fixture(name)
    model, real = describe_model(config), on_meta(config)
    assert (not real.tp_plan) == (config["model_type"] in UNPLANNED)
    expected = planned(model, real.tp_plan)
    assert any(expected.values()) == bool(real.tp_plan)
    for tensor in model.own() if real.tp_plan else ():
        for spelled in (tensor.name, *tensor.ties):
            if spelled.endswith(tuple(OTHERWISE)) or any(tower in spelled for tower in TOWERS):
                continue
            if spelled in expected or not (spelled.endswith(tuple(OWN_CHOICE)) or model.family in PARTLY_PLANNED):
                assert tp_dims(tensor) == expected.get(spelled, set()), spelled


def ranks(mesh):
    return [mesh.coordinate(rank) for rank in range(mesh.world)]


@EACH.add(lambda _: [{"degrees": degrees} for degrees in DEGREES])
def check_every_element_is_held_and_only_shared_heads_are_held_twice(name, degrees):
    model = describe_model(fixture(name), kv_heads="replicate")
    mesh = Mesh.of(**degrees)
    for tensor in model.tensors.values():
        check_cuts(tensor.name, tensor.shape, tensor.spec, mesh)
        shared = any(section.shared for cuts in tensor.spec.cuts for cut in cuts for section in cut.sections)
        held = [box for at in ranks(mesh) for box in compute_rank_boxes(tensor.shape, tensor.spec, mesh, at)]
        assert subtract_all(Box.whole(tensor.shape), held) == []
        cut_by_all = all(
            d == 1 or any(cut.axis == axis for cuts in tensor.spec.cuts for cut in cuts) for axis, d in mesh.axes
        )
        if cut_by_all and not shared:
            assert sum(box.size for box in held) == Box.whole(tensor.shape).size


def test_a_gpt2_rank_holds_its_heads_of_q_k_and_v_as_its_own_attention_would_split_them():
    config = fixture("gpt2")
    model = describe_model(config)
    weight = model.tensors["transformer.h.0.attn.c_attn.weight"]
    mesh = Mesh.of(tp=2)
    numbered = torch.arange(32 * 96).reshape(weight.shape)
    for at in ranks(mesh):
        parts = compute_rank_boxes(weight.shape, weight.spec, mesh, at)
        assert len(parts) == 3
        mine = torch.cat([numbered[b.slices()] for b in parts], dim=1)
        heads = slice(2 * at["tp"], 2 * at["tp"] + 2)
        # GPT2Attention.forward: split into q, k, v along the last dim, then view as (..., heads, head_dim)
        theirs = torch.cat(
            [x.view(32, 4, 8)[:, heads].reshape(32, 16) for x in numbered.split(32, dim=1)],
            dim=1,
        )
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("degree", [2, 4])
def test_a_llama_rank_holds_the_key_value_heads_that_its_query_heads_attend_to(degree):
    model = describe_model(fixture("llama"), kv_heads="replicate")
    mesh = Mesh.of(tp=degree)
    q, k = (model.tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qk")
    for at in ranks(mesh):
        (mine,), (keys,) = (compute_rank_boxes(t.shape, t.spec, mesh, at) for t in (q, k))
        queries = range(mine.origin[0] // 8, mine.stop[0] // 8)
        assert {head // 2 for head in queries} == set(range(keys.origin[0] // 8, keys.stop[0] // 8))


def test_too_few_key_value_heads_are_refused_with_the_degrees_that_work():
    tensor = describe_model(fixture("llama")).tensors["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(PartitionError, match=r"k_proj\.weight \[16, 32\] over tp=4: 2 key/value heads") as caught:
        check_cuts(tensor.name, tensor.shape, tensor.spec, Mesh.of(tp=4))
    assert caught.value.hint == "use --tp 1 or 2, or --kv-heads replicate to keep each head on several ranks"


@EACH.add()
def check_a_degree_that_the_heads_do_not_allow_is_refused(name):
    model = describe_model(fixture(name), kv_heads="replicate")
    nouns = "attention heads|groups of attention heads|key/value groups|channels|state space heads|key heads"
    refused = next(
        t
        for t in model.own()
        if any(re.match(nouns, section.noun) for cuts in t.spec.cuts for cut in cuts for section in cut.sections)
    )
    with pytest.raises(PartitionError, match=rf"over tp=3: \d+ ({nouns})"):
        check_cuts(refused.name, refused.shape, refused.spec, Mesh.of(tp=3))


def test_a_vocabulary_is_cut_as_torch_chunk_cuts_it():
    tensor = describe_model(fixture("gpt2")).tensors["transformer.wte.weight"]
    mesh = Mesh.of(tp=4)
    sizes = [compute_rank_boxes(tensor.shape, tensor.spec, mesh, at)[0].shape[0] for at in ranks(mesh)]
    assert sizes == [len(part) for part in torch.arange(97).chunk(4)]


def test_fsdp_cuts_what_tp_left():
    tensor = describe_model(fixture("llama")).tensors["model.layers.0.mlp.up_proj.weight"]
    mesh = Mesh.of(fsdp=2, tp=2)
    numbered = torch.arange(48)
    for at in ranks(mesh):
        (box,) = compute_rank_boxes(tensor.shape, tensor.spec, mesh, at)
        mine = numbered.chunk(2)[at["tp"]].chunk(2)[at["fsdp"]]
        assert list(range(box.origin[0], box.stop[0])) == mine.tolist()


def test_an_exact_cut_after_another_is_refused_rather_than_wrong():
    after = (AxisPartition("fsdp"), AxisPartition("tp", (PartitionSection(8),)))
    mesh = Mesh.of(fsdp=2, tp=2)
    for at in ranks(mesh):
        with pytest.raises(PartitionError, match="must come before any other cut"):
            compute_intervals(8, after, mesh, at)
    assert compute_intervals(0, (AxisPartition("tp", (PartitionSection(0),)),), mesh, mesh.coordinate(1)) == []


def stages(model):
    return {name: tensor.spec.where for name, tensor in model.tensors.items()}


def test_a_tied_embedding_is_on_both_ends_and_an_untied_one_on_the_first():
    tied, untied = stages(describe_model(fixture("qwen2-tied"))), stages(describe_model(fixture("qwen2")))
    assert tied["model.embed_tokens.weight"] == (("first", 0), ("last", 0))
    assert untied["model.embed_tokens.weight"] == (("first", 0),)
    assert untied["lm_head.weight"] == untied["model.norm.weight"] == (("last", 0),)
    assert untied["model.layers.1.mlp.up_proj.weight"] == (("layer", 1),)


def test_a_decoders_blocks_follow_the_encoders():
    model = describe_model(fixture("t5"))
    where = stages(model)
    assert model.layers == 5
    assert where["encoder.block.1.layer.0.layer_norm.weight"] == (("layer", 1),)
    assert where["encoder.final_layer_norm.weight"] == (("layer", 1),)
    assert where["decoder.block.0.layer.0.layer_norm.weight"] == (("layer", 2),)
    assert where["decoder.final_layer_norm.weight"] == (("last", 0),)
    assert where["shared.weight"] == (("first", 0), ("layer", 2), ("last", 0))


def test_what_an_encoder_does_not_use_is_on_no_layer_that_it_lacks():
    model = describe_model(fixture("t5", architectures=["T5EncoderModel"]))
    assert model.layers == 2
    numbers = [n for t in model.tensors.values() for where, n in t.spec.where if where == "layer"]
    assert set(numbers) == {0, 1}


@EACH.add()
def check_layers_are_numbered_without_a_gap(name):
    model = describe_model(fixture(name))
    numbers = {n for t in model.own() for where, n in t.spec.where if where == "layer"}
    assert numbers == set(range(model.layers))


@EACH.add()
def check_buffers_are_whole_on_every_rank(name):
    for tensor in describe_model(fixture(name)).tensors.values():
        if tensor.row.buffer:
            assert tensor.spec.cuts == ((),) * len(tensor.shape)


@EACH.add()
def check_heads_of_classes_are_whole_on_every_tp_rank(name):
    model = describe_model(fixture(name))
    inner = f"{model.prefix}." if model.prefix else "no such prefix"
    for tensor in model.tensors.values():
        if not tensor.name.startswith(inner) and any(word in tensor.row.dims.split() for word in ("labels", "2")):
            assert tp_dims(tensor) == set(), tensor.name


@pytest.mark.parametrize("name", FIXTURES)
def test_each_config(name, subtests):
    EACH.run(subtests, name)
