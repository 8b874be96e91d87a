"""What an engine keeps free, and how vLLM pages the caches of models whose layers differ."""

from __future__ import annotations

import json
from fractions import Fraction
from math import ceil
from pathlib import Path

import pytest
from known_models import LLAMA_3_8B, even, stock

from shardctl.base.errors import UsageError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.serving.engine_budget import choose_batch_limits
from shardctl.estimate.serving.kv_cache import list_cache_terms
from shardctl.estimate.serving.paged_groups import CachedLayer, list_grouped_terms
from shardctl.estimate.serving.rank_serving import find_longest_context, list_serving_terms
from shardctl.estimate.term import sum_terms
from shardctl.estimate.workload import EngineBudget, ServingWorkload
from shardctl.hardware.devices import GIB, get_device
from shardctl.options import PlanOptions
from shardctl.options.plan_options import parse_part
from shardctl.planning.workload import _build_budget
from shardctl.tensors.mesh import Mesh

SIZES = json.loads((Path(__file__).parents[2] / "fixtures/vllm/cache_sizes.json").read_text())
USABLE = get_device("h100").usable_bytes
BESIDE = {"CUDA context", "NCCL communicators", "allocator slack"}


def plain(heads, dim, window=None):
    return CachedLayer(Fraction(2 * heads * dim * 2), window)


STATE = CachedLayer(Fraction(0), state=2 * (3 * 8192 + 32 * 128 * 128))
CASES = {
    "gpt_oss-20b": [plain(8, 64, None if n % 2 else 128) for n in range(24)],
    "gemma3-27b": [plain(16, 128, 1024 if (n + 1) % 6 else None) for n in range(62)],
    "mistral-7b": [plain(8, 128, 4096)] * 32,
    "qwen3_next-80b": [plain(2, 256) if (n + 1) % 4 == 0 else STATE for n in range(48)],
    "unequal heads": [plain(4, 128) if n % 3 == 0 else plain(8, 128, 512) for n in range(12)],
}
"""The layers that `fixtures/vllm/cache_sizes.py` gives to vLLM."""


@pytest.mark.parametrize("case", SIZES)
def test_a_request_takes_the_bytes_that_vllm_says(case):
    layers = [[one] for one in CASES[case]]
    for row in SIZES[case]:
        if "requests" in row:
            continue
        work = ServingWorkload(row["context"], batched_tokens=row["batched"])
        terms = list_grouped_terms(layers, range(len(layers)), work, batches=2)
        assert sum(term.nbytes for term in terms) == row["bytes"], row


def test_requests_together_take_what_the_scheduler_holds():
    """vLLM's own manager holds less than so many times what one request may take alone: a pass is of all of them."""
    checked = 0
    for case, rows in SIZES.items():
        layers = [[one] for one in CASES[case]]
        for row in rows:
            if "requests" not in row:
                continue
            work = ServingWorkload(row["context"], row["requests"], batched_tokens=row["batched"])
            total = sum_terms(list_grouped_terms(layers, range(len(layers)), work, batches=1))
            assert total.low <= row["bytes"] <= total.high, (case, row)
            # Requests that are shorter than a pass are prefilled whole, and hold less than the bound.
            assert total.nbytes <= row["bytes"] * (1.09 if row["context"] > 1000 else 1.4), (case, row)
            checked += 1
    assert checked == 16


def test_stages_have_their_layers_of_every_group():
    """Blocks are as wide as the widest group of a stage, so that stages together have at least what one device has."""
    layers, work = [[one] for one in CASES["gemma3-27b"]], ServingWorkload(32768)
    whole = sum(term.nbytes for term in list_grouped_terms(layers, range(62), work, batches=2))
    parts = [
        sum(t.nbytes for t in list_grouped_terms(layers, span, work, batches=2)) for span in (range(30), range(30, 62))
    ]
    assert max(parts) < whole <= sum(parts) * 1.01


def test_a_config_pages_as_its_layers_do():
    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "dtype": "bfloat16", "vocab_size": 262208,
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": 6,
    }  # fmt: skip
    anatomy, mesh = build_layer_graph(config), Mesh.of()
    (rank, *_) = list_rank_shards(stock(config), mesh, (62,))
    row = SIZES["gemma3-27b"][1]
    work = ServingWorkload(row["context"], budget=EngineBudget("vllm", 0.9, USABLE))
    paged = list_cache_terms(anatomy, rank, mesh, work, dtype="BF16")
    assert sum(term.nbytes for term in paged) == row["bytes"]
    free = list_cache_terms(anatomy, rank, mesh, ServingWorkload(row["context"]), dtype="BF16")
    assert sum(term.nbytes for term in free) < row["bytes"]


def needs(mesh, work):
    anatomy = build_layer_graph(LLAMA_3_8B)
    rank = list_rank_shards(stock(LLAMA_3_8B), mesh, even(32, mesh))[0]
    return list_serving_terms(anatomy, rank, mesh, work, dtype="BF16")


@pytest.mark.parametrize("tp", [1, 2])
def test_vllm_counts_the_context_and_communicators_outside(tp):
    """The identity of its log: the cache has the part of the device less weights, peak and graphs."""
    budget = EngineBudget("vllm", 0.9, USABLE)
    anatomy, mesh = build_layer_graph(LLAMA_3_8B), Mesh.of(tp=tp)
    holdings = list_rank_shards(stock(LLAMA_3_8B), mesh, even(32, mesh))
    work = ServingWorkload(8192, rows=256, budget=budget)
    longest = find_longest_context(anatomy, holdings, mesh, work, dtype="BF16", budget=USABLE)
    terms = needs(mesh, ServingWorkload(longest, rows=256, budget=budget))
    inside = sum(t.nbytes for t in terms if t.name not in BESIDE and t.name != "kept free by the engine")
    page = 16 * 131072 // tp
    assert ceil(0.9 * USABLE) - page < inside <= ceil(0.9 * USABLE)
    assert sum_terms(terms).nbytes <= USABLE


def test_sglang_counts_weights_and_cache_alone():
    budget = EngineBudget("sglang", 0.8, USABLE)
    terms = needs(Mesh.of(tp=2), ServingWorkload(8192, budget=budget))
    fixed = sum(t.nbytes for t in terms if t.name in {"CUDA context", "NCCL communicators"})
    kept = next(t for t in terms if t.name == "kept free by the engine")
    rounded = next(t for t in terms if t.name == "blocks of weights, rounded up")
    others = [t for t in terms if t.category not in {"kv cache", "weights"} and t not in (kept, rounded)]
    assert kept.nbytes + sum(t.nbytes for t in others) - fixed == ceil((USABLE - fixed) * (1 - 0.8))
    assert rounded.interval == (0, 2 * rounded.nbytes)
    assert rounded not in needs(Mesh.of(tp=2), ServingWorkload(8192, budget=EngineBudget("vllm", 0.8, USABLE)))


def test_nothing_is_kept_where_the_rest_needs_it_all():
    terms = needs(Mesh.of(), ServingWorkload(8192, budget=EngineBudget("vllm", 1.0, 24 * GIB)))
    assert next(t for t in terms if t.name == "kept free by the engine").nbytes == 0


def test_parts_and_engines_that_nobody_can_count_with():
    assert parse_part("0.9") == 0.9
    for text in ("0", "1.1", "ninety", "-1", "nan"):
        with pytest.raises(UsageError, match="is not a fraction of a device"):
            parse_part(text)
    with pytest.raises(UsageError, match="--utilization needs a device"):
        _build_budget(PlanOptions(utilization=0.9))
    with pytest.raises(UsageError, match="SGLang chooses"):
        _build_budget(PlanOptions(server="sglang", device=get_device("h100")))
    assert _build_budget(PlanOptions(server="vllm", device=get_device("h100"))).utilization == 0.92


def test_graphs_are_inside_since_0_20():
    kept = {}
    for version in ((0, 19), (0, 20)):
        budget = EngineBudget("vllm", 0.9, USABLE, version)
        terms = needs(Mesh.of(), ServingWorkload(8192, rows=256, budget=budget))
        kept[version] = next(t for t in terms if t.name == "kept free by the engine").nbytes
    graphs = next(t for t in terms if t.name == "CUDA graphs").nbytes
    assert kept[0, 20] - kept[0, 19] == graphs


def test_the_sampler_of_0_33_is_profiled_with_top_k_and_top_p():
    """vLLM 0.33, v1/worker/gpu/model_runner.py, `_dummy_sampler_run`: 14 bytes of each logit, where 0.32 has 6."""
    found = {}
    for version in ((0, 32), (0, 33)):
        work = ServingWorkload(8192, rows=256, budget=EngineBudget("vllm", 0.92, USABLE, version))
        (sampler,) = (t for t in needs(Mesh.of(), work) if t.name == "sampler beyond the forward pass")
        found[version] = sampler.inputs["each"]
    assert found == {(0, 32): 1.5, (0, 33): 3.5}


def test_a_gb10_has_the_defaults_of_smaller_devices_since_0_33():
    """vLLM 0.33, engine/arg_utils.py, `get_batch_defaults`."""
    limits = {
        version: choose_batch_limits(EngineBudget("vllm", 0.92, 119 * GIB, version, 12.1))
        for version in (None, (0, 32), (0, 33))
    }
    assert limits == {None: (256, 2048), (0, 32): (1024, 8192), (0, 33): (256, 2048)}
