"""What Megatron-LM keeps between passes besides its states, and what of its runs options say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from known_models import DEEPSEEK_V3, GPT_3, LLAMA_3_405B, stock

from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.search.forecast import estimate_ranks
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.mesh import Mesh

WORK = TrainingWorkload(4096, profile="megatron", zero=1, microbatches=4, dropout=False)
DUMMIES = "gradients that nobody reads"


def terms(config, mesh="tp=1", stages=None, stage=0, **options):
    inventory, parsed = stock(config), Mesh.parse(mesh)
    stages = stages or (inventory.layers,)
    holdings = list_rank_shards(inventory, parsed, stages)
    found = estimate_ranks(
        holdings, build_layer_graph(config), parsed, stages, replace(WORK, **options), dtype="BF16"
    ).distinct
    (rank,) = [one for one in found if one.holding.stage == stage]
    return {term.name: term for term in rank.terms}


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_each_shape_of_a_weight_has_one_gradient_that_nobody_reads(tp):
    config = {**LLAMA_3_405B, "num_hidden_layers": 4}
    h, f, kv, vocabulary = 16384, 53248, 8 * 128, 128256
    every = (h + 2 * kv) * h + h * h + 2 * f * h + h * f + vocabulary * h
    assert terms(config, f"tp={tp}")[DUMMIES].nbytes == 2 * every // tp


def test_only_the_last_stage_has_that_of_the_head():
    config = {**LLAMA_3_405B, "num_hidden_layers": 4}
    first, last = (terms(config, "pp=2", (2, 2), stage)[DUMMIES].nbytes for stage in (0, 1))
    assert last - first == 2 * 128256 * 16384


def test_experts_have_two_shapes_however_many_there_are_and_latents_have_theirs():
    config = {**DEEPSEEK_V3, "num_hidden_layers": 4, "first_k_dense_replace": 1}
    h, heads, queries, keys, rotary = 7168, 128, 1536, 512, 64
    attention = queries * h + heads * 192 * queries + (keys + rotary) * h + heads * 256 * keys + h * heads * 128
    dense, routed = 3 * 18432 * h, 3 * 2048 * h
    for ep in (2, 8):
        found = terms(config, f"dp=8,ep={ep}")[DUMMIES]
        assert found.nbytes == 2 * (attention + dense + routed + 129280 * h)
        assert found.inputs["shapes"] == 10  # shared experts have the shapes of the routed ones


def test_without_the_fusion_one_is_alive_at_a_time():
    found = terms(GPT_3, fused_gradients=False)
    assert DUMMIES not in found
    assert found["gradient of one weight, until it is added"].high == 2 * 50257 * 12288


def test_workspaces_are_what_a_run_had_between_steps_besides_its_states():
    config = {**GPT_3, "n_layer": 12, "n_embd": 512, "n_head": 8, "n_positions": 1024, "vocab_size": 50304}
    found = terms(config, "dp=8", zero=1, fused_gradients=False).values()
    lasting = [t for t in found if t.category in {"weights", "gradients", "optimizer"} or "workspaces" in t.name]
    # mem-allocated-bytes of gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files on H100 (Megatron-LM d98e8a6)
    assert sum(term.nbytes for term in lasting) == pytest.approx(581_489_664, abs=1 << 14)


def test_a_fused_loss_keeps_the_logits_alone():
    name, logits = "kept by the head and the loss", 4096 * 128256
    eager, fused = (terms(LLAMA_3_405B, fused_loss=fused)[name].nbytes for fused in (False, True))
    assert eager - fused == (4 - 2) * logits


def test_megatrons_arguments_drop_out_unless_that_is_said():
    config = {**LLAMA_3_405B, "num_hidden_layers": 4}
    assert "dropout masks" not in terms(config)
    assert terms(config, dropout=True)["dropout masks"].nbytes == 4 * 2 * 4096 * 16384


def test_ranks_that_exchange_heads_keep_the_result_of_attention_twice():
    config = {**LLAMA_3_405B, "num_hidden_layers": 4}
    ring, heads = (terms(config, "cp=4", exchanged_heads=each)["kept by attention"].nbytes for each in (False, True))
    assert heads - ring == 4 * 2 * 1024 * 16384


def test_an_interleaved_stage_keeps_the_parts_of_microbatches_that_are_in_flight():
    config = {**GPT_3, "n_layer": 32}
    layers, chunks = (8, 8, 8, 8), (8 - 1) * 4 + 1  # that the last stage has before its first backward pass
    options = {"schedule": "interleaved", "virtual_stages": 8}
    piped = terms(config, "pp=4", layers, 3, **options)["kept by MLPs"]
    alone = terms(config, "pp=4", layers, 3)["kept by MLPs"]
    assert piped.nbytes == alone.nbytes * chunks / 8
