"""The stated cost: operations by the published formula, time as simple arithmetic, and ranks that make sense."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from known_models import DEEPSEEK_V3, GPT_3, LLAMA_3_8B, LLAMA_3_405B, MIXTRAL_8X7B, deepseek_v3, llama_405b, stock

from shardctl.estimate.model.heaviest import HeaviestRanks
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.operations import (
    compute_touched_share,
    count_attention_operations,
    count_matrix_operations,
)
from shardctl.estimate.rank_estimate import build_estimate
from shardctl.estimate.search.cost import DevicePace, _count_ranks_and_nodes, price_mesh
from shardctl.estimate.search.mesh_comparison import WeightTotals
from shardctl.estimate.term import MemoryTerm
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.hardware.devices import GB, GIB, get_device
from shardctl.tensors.mesh import Mesh

H100 = get_device("h100")
CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"


def cost(config, inventory, text, work, on=H100, *, cache=0, pace=None):
    mesh = Mesh.parse(text)
    holdings = HeaviestRanks(inventory).hold(mesh, WeightTotals(inventory).stages(mesh))
    terms = [(MemoryTerm("cache", "kv cache", cache),) for _ in holdings]
    return price_mesh(build_layer_graph(config), build_estimate(holdings, terms), mesh, work, on, pace=pace)


def operations(config, inventory, tokens, text="tp=1"):
    mesh = Mesh.parse(text)
    holdings = HeaviestRanks(inventory).hold(mesh, WeightTotals(inventory).stages(mesh))
    return sum(count_matrix_operations(build_layer_graph(config), one, mesh, tokens) for one in holdings)


# Narayanan et al. 2021, appendix: 72 B s L h^2 (1 + s / 6h + V / 12 L h) forward and backward without recomputation.
def test_gpt_3_takes_the_operations_of_the_published_formula():
    s, layers, h, vocabulary = 2048, 96, 12288, 50257
    formula = 72 * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    whole = 3 * operations(GPT_3, stock(GPT_3), s)
    whole += 3 * count_attention_operations(build_layer_graph(GPT_3).layers, Mesh.of(), s, s)
    assert whole == pytest.approx(formula, rel=1e-4)


def test_llama_405b_took_the_operations_that_meta_states():
    # Grattafiori et al. 2024, sec. 1: 3.8e25 for 15.6e12 tokens; most had sequences of 8192.
    per_token = 3 * operations(LLAMA_3_405B, llama_405b(), 1)
    per_token += 3 * count_attention_operations(build_layer_graph(LLAMA_3_405B).layers, Mesh.of(), 1, 8192, masked=True)
    assert 15.6e12 * per_token == pytest.approx(3.8e25, rel=0.06)


@pytest.mark.parametrize(
    ("name", "layer", "part"), [("bert", 0, 1), ("t5", 0, 1), ("t5", -1, 3 / 4), ("llama", 0, 1 / 2)]
)
def test_a_mask_hides_half_of_what_a_decoder_has_of_its_own(name, layer, part):
    layers = build_layer_graph(json.loads((CONFIGS / f"{name}.json").read_text())).layers
    masked, whole = (
        count_attention_operations([layers[layer]], Mesh.of(), 8, 64, masked=masked) for masked in (True, False)
    )
    assert masked / whole == part


def test_experts_work_for_the_tokens_that_choose_them():
    # DeepSeek-AI 2024: 37B parameters are active for each token; the embedding's 0.9B are looked up.
    assert operations(DEEPSEEK_V3, deepseek_v3(), 1) / 2 == pytest.approx(37.5e9 - 0.93e9, rel=0.02)


@pytest.mark.parametrize("text", ["tp=2", "pp=2", "dp=2,ep=2", "tp=2,ep=2", "dp=2,tp=2,ep=2,etp=2", "dp=8,ep=8"])
def test_ranks_share_the_operations(text):
    inventory, mesh = stock(MIXTRAL_8X7B), Mesh.parse(text)
    whole = operations(MIXTRAL_8X7B, inventory, 1)
    assert operations(MIXTRAL_8X7B, inventory, 1, text) == pytest.approx(whole / mesh.degree("tp"), rel=0.01)


def test_codes_of_four_bits_are_counted_as_the_weights_they_are():
    plain = {**LLAMA_3_8B, "num_hidden_layers": 2}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    whole = operations(plain, stock(plain), 1)
    packed = operations(plain, stock({**plain, "quantization_config": settings}), 1)
    assert packed == pytest.approx(whole, rel=0.02)


def test_a_tied_head_works_on_the_last_stage_only():
    tied = {**LLAMA_3_8B, "tie_word_embeddings": True}
    assert operations(tied, stock(tied), 1, "pp=2") == operations(LLAMA_3_8B, stock(LLAMA_3_8B), 1)


def test_few_tokens_touch_few_experts():
    parts = build_layer_graph(MIXTRAL_8X7B)
    assert compute_touched_share(parts, Mesh.of(), 1) == pytest.approx(2 / 8)
    assert compute_touched_share(parts, Mesh.of(), 2) == pytest.approx(1 - (6 / 8) ** 2)
    assert compute_touched_share(parts, Mesh.of(dp=8, ep=8), 1) == pytest.approx(1 - (6 / 8) ** 8)
    assert compute_touched_share(build_layer_graph(LLAMA_3_8B), Mesh.of(), 1) == 1


@pytest.mark.parametrize(
    ("text", "axes", "expected"),
    [
        ("dp=4,tp=8", ("tp",), (8, 1)),
        ("dp=4,tp=8", ("dp", "cp"), (4, 4)),
        ("dp=8,tp=4", ("dp", "cp"), (8, 4)),
        ("tp=8,dp=4", ("tp",), (8, 4)),
        ("pp=2,dp=2,tp=2", ("pp",), (2, 1)),
        ("pp=2,dp=4,tp=4", ("pp",), (2, 2)),
        ("dp=16,ep=8", ("ep",), (8, 1)),
        ("dp=16,ep=8", ("replica",), (2, 2)),
        ("dp=16,ep=16", ("ep",), (16, 2)),
        ("pp=2,dp=2,tp=8,ep=16", ("ep",), (16, 2)),
        ("fsdp=4,tp=4,ep=4", ("efsdp",), (4, 2)),
        ("dp=2,fsdp=2,cp=2,tp=4", ("replica",), (4, 2)),
        ("dp=2,fsdp=2,cp=2,tp=4", ("efsdp",), (2, 2)),
        ("dp=2,fsdp=2,cp=2,tp=4", ("fsdp",), (2, 2)),
    ],
)
def test_which_ranks_are_on_a_node_follows_from_the_order_of_the_axes(text, axes, expected):
    assert _count_ranks_and_nodes(Mesh.parse(text), axes, 8) == expected


@pytest.mark.parametrize(
    "text", ["pp=2,dp=2,fsdp=2,cp=2,tp=2", "tp=2,pp=2,fsdp=4", "pp=2,dp=2,fsdp=2,tp=2,ep=4", "fsdp=4,tp=2,ep=2,etp=2"]
)
def test_those_ranks_are_the_ones_whose_other_indices_agree(text):
    mesh = Mesh.parse(text)
    places = [mesh.coordinate(rank) for rank in range(mesh.world)]
    for known in (("pp", "dp", "fsdp", "cp", "tp"), ("pp", "etp", "ep", "efsdp", "replica")):
        for axis in known:
            rest = [other for other in known if other != axis]
            alike = [r for r, at in enumerate(places) if all(at[o] == places[0][o] for o in rest)]
            assert _count_ranks_and_nodes(mesh, (axis,), 2) == (len(alike), len({rank // 2 for rank in alike}))


def test_time_is_bytes_over_bandwidth_and_operations_over_rate():
    slow = replace(H100, flops_bf16=1e12, memory_bandwidth=1e9, link_bandwidth=1e9, network_bandwidth=1e8)
    exact = DevicePace(operations=1, memory=1, links=1, near=0, far=0)
    inventory = stock(LLAMA_3_8B)
    work = ServingWorkload(context=100)
    one = cost(LLAMA_3_8B, inventory, "tp=1", work, slow, cache=GB, pace=exact)
    assert one.share("weights read") == pytest.approx(inventory.nbytes / 1e9)
    assert one.share("cache read") == pytest.approx(1)
    two = cost(LLAMA_3_8B, inventory, "tp=2", work, slow, pace=exact)
    sums = next(share for share in two.shares if share.name == "activations between tp ranks")
    assert sums.seconds == pytest.approx(sums.nbytes / 1e9)
    assert "link" in sums.formula
    far = cost(LLAMA_3_8B, inventory, "tp=2", work, replace(slow, per_node=1), pace=exact)
    assert far.share("activations between tp ranks") == pytest.approx(10 * sums.seconds)
    many = cost(LLAMA_3_8B, inventory, "tp=1", replace(work, batch=10**6), slow, pace=exact)
    assert many.share("weights read") + many.share("compute") == pytest.approx(
        operations(LLAMA_3_8B, inventory, 10**6) / 1e12
    )


def test_an_update_is_of_what_ranks_share_of_experts_and_of_all_else():
    inventory, work = stock(MIXTRAL_8X7B), TrainingWorkload(4096, profile="megatron", zero=1)
    found = cost(MIXTRAL_8X7B, inventory, "dp=8,ep=8", work)
    (update,) = (share for share in found.shares if share.name == "update")
    expert = sum(k.count * prod(k.shape) for k in inventory.kinds if k.spec.of_expert)
    assert update.nbytes == 30 * ((inventory.elements - expert) // 8 + expert // 8)


def test_a_stage_that_waits_is_a_bubble():
    work = TrainingWorkload(sequence=4096, microbatches=8, profile="megatron")
    one = cost(LLAMA_3_8B, stock(LLAMA_3_8B), "pp=4", work)
    within = one.share("compute") + one.share("activations between stages")
    assert one.share("bubble") == pytest.approx(within * 3 / 8)
    halves = cost(LLAMA_3_8B, stock(LLAMA_3_8B), "pp=4", replace(work, schedule="interleaved", virtual_stages=2))
    within = halves.share("compute") + halves.share("activations between stages")
    assert halves.share("bubble") == pytest.approx(within * 3 / 16)


def test_recomputing_costs_another_forward_pass():
    work = TrainingWorkload(sequence=4096)
    plain, again = (
        cost(LLAMA_3_8B, stock(LLAMA_3_8B), "tp=1", replace(work, recompute=how)) for how in ("none", "full")
    )
    assert again.share("compute") == pytest.approx(4 / 3 * plain.share("compute"))


def test_what_is_sent_behind_the_computation_counts_only_where_it_takes_longer():
    work = TrainingWorkload(sequence=4096, microbatches=4)
    near = cost(LLAMA_3_8B, stock(LLAMA_3_8B), "fsdp=8", work)
    assert near.share("parameters") == 0
    slow = replace(H100, link_bandwidth=1 * GB)
    far = cost(LLAMA_3_8B, stock(LLAMA_3_8B), "fsdp=8", work, slow)
    hidden = far.share("compute")
    sent = sum(share.nbytes for share in far.shares if share.name in {"parameters", "gradients"}) / (0.8 * GB)
    assert far.share("parameters") + far.share("gradients") == pytest.approx(sent - hidden, rel=0.01)


def test_tokens_go_to_the_nodes_of_their_groups_of_experts_only():
    """Node-limited routing: a token of DeepSeek-V3 chooses four of eight groups, and so four nodes at most."""
    work, name = TrainingWorkload(sequence=4096), "tokens to experts and back"
    config, inventory = DEEPSEEK_V3, deepseek_v3()
    limited = cost({**config, "n_group": 8, "topk_group": 4}, inventory, "dp=64,ep=64", work).share(name)
    free = cost({**config, "n_group": 1, "topk_group": 1}, inventory, "dp=64,ep=64", work).share(name)
    ratio = 4 * (1 - (3 / 4) ** 8) / (8 * (1 - (7 / 8) ** 8))
    assert limited / free == pytest.approx(ratio, rel=0.02)
    greedy = {**config, "n_group": 8, "topk_group": 4, "topk_method": "greedy"}
    assert cost(greedy, inventory, "dp=64,ep=64", work).share(name) == pytest.approx(free)


# Grattafiori et al. 2024, table 4: tp8, pp16, dp64 and 32 sequences per dp rank reached 430 TFLOP/s per device. The
# schedule was interleaved; in how many chunks it does not say.
@pytest.mark.parametrize("chunks", [2, 4, 7])
def test_llama_405b_is_as_fast_as_meta_measured_within_a_fifth(chunks):
    work = TrainingWorkload(
        sequence=8192, microbatches=32, profile="megatron", zero=1, schedule="interleaved", virtual_stages=chunks
    )
    found = cost(LLAMA_3_405B, llama_405b(), "pp=16,dp=64,tp=8", work)
    per_token = 3 * operations(LLAMA_3_405B, llama_405b(), 1)
    reached = per_token * found.tokens / found.seconds / found.ranks / 1e12
    assert 430 * 0.8 < reached < 430 * 1.2
    assert found.tokens == 64 * 32 * 8192


def test_tp_across_nodes_costs_more_than_stages():
    inventory = stock(LLAMA_3_8B)
    work = TrainingWorkload(sequence=4096, microbatches=32, profile="megatron")
    assert cost(LLAMA_3_8B, inventory, "tp=16", work).score > cost(LLAMA_3_8B, inventory, "pp=2,tp=8", work).score


def test_a_device_that_is_a_size_takes_the_pace_of_a_known_one():
    work = ServingWorkload(context=100)
    one = cost(LLAMA_3_8B, stock(LLAMA_3_8B), "tp=1", work, get_device(80 * GIB))
    assert one == cost(LLAMA_3_8B, stock(LLAMA_3_8B), "tp=1", work)
    assert one.device == "H100-80GB"


def test_the_shares_are_all_of_it():
    found = cost(MIXTRAL_8X7B, stock(MIXTRAL_8X7B), "pp=2,dp=8,ep=8", TrainingWorkload(sequence=4096, microbatches=4))
    assert found.seconds == pytest.approx(sum(share.seconds for share in found.shares))
    assert {"compute", "bubble", "update", "tokens to experts and back"} <= {share.name for share in found.shares}
    assert len({share.name for share in found.shares}) == len(found.shares)
    assert found.score == pytest.approx(found.seconds * 16 / (8 * 4 * 4096))


def test_the_first_token_comes_when_the_prompt_has_gone_through_all_layers():
    """Of Llama-3-8B, 2 P operations a token and 4 L h s / 2 for scores and values; chunks hide their weights."""
    tokens, layers, hidden, vocabulary = 16384, 32, 4096, 128256
    weights = 8.03e9 - vocabulary * hidden  # the embedding is looked up
    wanted = (2 * weights * tokens + 4 * layers * hidden * tokens**2 / 2) / H100.flops_bf16
    exact = DevicePace(1, 1, 1, 0, 0)
    one = cost(LLAMA_3_8B, stock(LLAMA_3_8B), "tp=1", ServingWorkload(tokens), pace=exact)
    assert one.first_token_seconds == pytest.approx(wanted, rel=0.01)
    four = cost(LLAMA_3_8B, stock(LLAMA_3_8B), "tp=4", ServingWorkload(tokens), pace=exact)
    assert wanted / 4 < four.first_token_seconds < wanted / 2  # what tensor parallelism sends is not hidden
    small = cost(LLAMA_3_8B, stock(LLAMA_3_8B), "tp=1", ServingWorkload(tokens, batched_tokens=16), pace=exact)
    assert small.first_token_seconds == pytest.approx(1024 * 16.06e9 / H100.memory_bandwidth, rel=0.01)
    word = cost(MIXTRAL_8X7B, stock(MIXTRAL_8X7B), "tp=1", ServingWorkload(1), pace=exact)
    assert word.first_token_seconds == pytest.approx(word.seconds, rel=0.01)  # which reads two of eight experts
    training = cost(LLAMA_3_8B, stock(LLAMA_3_8B), "tp=1", TrainingWorkload(tokens))
    assert training.first_token_seconds is None
