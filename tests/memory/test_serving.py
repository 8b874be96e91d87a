"""What serving needs: weights as stored, peaks as in vLLM's logs, the longest context and largest batch that fit."""

from __future__ import annotations

import json
import math
import time
from functools import cache
from pathlib import Path

import pytest
from cache_bytes import bytes_per_token
from hypothesis import given
from hypothesis import strategies as st
from known_models import even, stock

from shardctl.base.errors import UsageError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.rank_estimate import build_estimate
from shardctl.estimate.runtime import MIB, list_communicators, list_runtime_terms
from shardctl.estimate.serving.rank_serving import MOST, find_largest_batch, find_longest_context, list_serving_terms
from shardctl.estimate.term import sum_terms
from shardctl.estimate.workload import EngineBudget, ServingWorkload
from shardctl.tensors.mesh import Mesh

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
GIB = 1 << 30


def fixture(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


def held(config, mesh):
    """The anatomy of a config, and what each distinct rank holds of its weights."""
    inventory = stock(config)
    return build_layer_graph(config), list_rank_shards(inventory, mesh, even(inventory.layers, mesh))


def dense(name, vocab, hidden, ffn, layers, heads, kv, **more):
    return {
        "architectures": [name],
        "dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        **more,
    }


LLAMA_8B = dense("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8)
LLAMA_70B = dense("LlamaForCausalLM", 128256, 8192, 28672, 80, 64, 8)
QWEN3_8B = dense("Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, head_dim=128)
QWEN2_1B5 = dense("Qwen2ForCausalLM", 151936, 1536, 8960, 28, 12, 2, tie_word_embeddings=True)


SORTING = EngineBudget("vllm", 0.9, 80 * GIB, (0, 8))
"""A version of vLLM whose sampler sorts."""


def term(terms, name):
    return next(one for one in terms if one.name == name)


@pytest.mark.parametrize(
    ("config", "tp", "tokens", "weights", "peak"),
    [
        # vLLM 0.6.4, github.com/vllm-project/vllm/pull/10511: "vllm serve meta-llama/Meta-Llama-3-8B", 8192 tokens.
        pytest.param(LLAMA_8B, 1, 8192, 14.96, 1.26, id="Llama-3-8B"),
        pytest.param(LLAMA_8B, 2, 8192, 7.48, 1.26, id="Llama-3-8B on two"),
        # vLLM 0.8.5, DeepSeek-R1-0528-Qwen3-8B with --tensor-parallel-size 4 --max-num-batched-tokens 8192.
        pytest.param(QWEN3_8B, 4, 8192, 3.85, 1.45, id="Qwen3-8B on four"),
        # vLLM 0.7, Qwen2.5-1.5B-Instruct with 32768 tokens: here a forward pass needs more than the sampler.
        pytest.param(QWEN2_1B5, 1, 32768, 2.89, 2.02, id="Qwen2.5-1.5B"),
    ],
)
def test_peaks_are_those_that_vllm_logs(config, tp, tokens, weights, peak):
    """vLLM at 256 sequences: "model weights take"; "PyTorch activation peak memory takes"."""
    mesh = Mesh.of(tp=tp)
    shape, (rank, *_) = held(config, mesh)
    work = ServingWorkload(tokens, 256, batched_tokens=tokens, budget=SORTING)
    terms = list_serving_terms(shape, rank, mesh, work, dtype="BF16")
    assert term(terms, "weights").nbytes / GIB == pytest.approx(weights, rel=0.01)
    passing = [one for one in terms if one.category in {"activations", "workspace"}]
    assert sum(one.nbytes for one in passing) / GIB == pytest.approx(peak, rel=0.03)
    assert sum_terms(passing).low / GIB < peak < sum_terms(passing).high / GIB


def test_weights_are_exact_and_all_else_says_what_it_is():
    mesh = Mesh.of(tp=2, pp=2)
    shape, ranks = held(LLAMA_8B, mesh)
    for rank in ranks:
        terms = list_serving_terms(shape, rank, mesh, ServingWorkload(8192, 16), dtype="BF16")
        names = [one.name for one in terms]
        assert len(set(names)) == len(names)
        weights = term(terms, "weights")
        assert (weights.nbytes, weights.exact, weights.formula) == (rank.nbytes, True, "")
        assert [one.name for one in terms if one.exact] == ["weights", "keys and values"]
        for one in terms[1:]:
            assert one.formula
            assert one.source
            assert one.low <= one.nbytes <= one.high
        assert ("sampler beyond the forward pass" in names) == (rank.stage == 1)


def test_formulas_give_the_bytes():
    """The formulas are Python, and their symbols the inputs, but for those of the runtime."""
    checked = set()
    for name in ("llama", "deepseek_v3", "gemma2", "mamba2", "t5", "whisper"):
        config = fixture(name)
        config["sliding_window"] = 7
        shape, (rank,) = held(config, Mesh.of())
        for one in list_serving_terms(shape, rank, Mesh.of(), ServingWorkload(100, 3, batched_tokens=10), dtype="BF16"):
            if one.category in {"weights", "runtime"}:
                continue
            checked.add(one.name)
            scope = {"ceil": math.ceil, "min": min, "max": max, **one.inputs}
            assert int(eval(one.formula, {}, scope)) == pytest.approx(one.nbytes, abs=2), one.name  # noqa: S307
    assert len(checked) == 7


def test_the_sampler_is_not_divided_by_tp_and_a_forward_pass_is():
    peaks = {}
    for tp in (1, 8):
        mesh = Mesh.of(tp=tp)
        shape, (rank, *_) = held(LLAMA_70B, mesh)
        work = ServingWorkload(8192, 512, batched_tokens=512, budget=SORTING)
        peaks[tp] = list_serving_terms(shape, rank, mesh, work, dtype="BF16")
    one, eight = (term(peaks[tp], "forward pass") for tp in (1, 8))
    assert one.nbytes == 512 * (4 * 8192 + 3 * 28672) * 2
    assert eight.nbytes == 512 * (4 * 8192 + 3 * 28672 // 8) * 2
    whole = {tp: term(peaks[tp], "sampler beyond the forward pass").nbytes + peak.nbytes
             for tp, peak in ((1, one), (8, eight))}  # fmt: skip
    assert whole[1] == whole[8] == 512 * 128256 * 4 * 97 // 10 + 512 * 8192 * 2 * 9 // 10


def test_the_sampler_makes_room_for_the_most_sequences():
    """A start with vLLM's `max_num_seqs` of 256 needs as much as a batch of so many."""
    mesh = Mesh.of()
    shape, holdings = held(LLAMA_8B, mesh)
    few, room, many = (
        term(list_serving_terms(shape, holdings[0], mesh, work, dtype="BF16"), "sampler beyond the forward pass")
        for work in (
            ServingWorkload(8192, budget=SORTING),
            ServingWorkload(8192, rows=256, budget=SORTING),
            ServingWorkload(8192, 256, budget=SORTING),
        )
    )
    assert few.nbytes < room.nbytes == many.nbytes
    budget = 80 * GIB
    assert find_largest_batch(shape, holdings, mesh, ServingWorkload(1024, rows=4), dtype="BF16", budget=budget) == 4
    assert (
        find_largest_batch(shape, holdings, mesh, ServingWorkload(1024, rows=10**6), dtype="BF16", budget=budget)
        is not None
    )
    assert find_largest_batch(shape, holdings, mesh, ServingWorkload(1024, rows=4), dtype="BF16", budget=16 * GIB) == 0


def test_an_encoder_reads_tokens_of_its_own():
    mesh = Mesh.of()
    shape, (rank,) = held(fixture("t5"), mesh)
    alike, longer = (
        list_serving_terms(shape, rank, mesh, ServingWorkload(64, 2, source=n), dtype="F32") for n in (64, 640)
    )
    assert alike == list_serving_terms(shape, rank, mesh, ServingWorkload(64, 2), dtype="F32")
    assert term(longer, "keys and values").nbytes == term(alike, "keys and values").nbytes
    read = [term(found, "keys and values of the encoder").nbytes for found in (alike, longer)]
    assert read[1] == 10 * read[0]
    passed = [term(found, "forward pass").inputs["n"] for found in (alike, longer)]
    assert passed == [2 * 64, 2 * 640]
    whisper, (rank,) = held(fixture("whisper"), mesh)
    fixed = [list_serving_terms(whisper, rank, mesh, ServingWorkload(8, source=n), dtype="F32") for n in (None, 5)]
    assert fixed[0] == fixed[1]


def test_experts_have_a_row_for_each_expert_of_a_token():
    """vLLM's fused_moe: intermediate_cache13 and intermediate_cache2."""
    mixtral = dense("MixtralForCausalLM", 32000, 4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2)
    shape, (rank,) = held(mixtral, Mesh.of())
    forward = term(list_serving_terms(shape, rank, Mesh.of(), ServingWorkload(4096, 8), dtype="BF16"), "forward pass")
    assert forward.nbytes == 8192 * (4 * 4096 + 2 * 3 * 14336 + 4096 + 2 * 8) * 2


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        # Queries and their results, keys and values: more than the MLP where that is narrow.
        ({**LLAMA_8B, "intermediate_size": 64}, 2 * 32 * 128 + 2 * 8 * 128),
        # Latents are unfolded for new tokens: keys of 12 and values of 8 for each of four heads.
        ({**fixture("deepseek_v3"), "intermediate_size": 1, "moe_intermediate_size": 1}, 4 * 2 * (12 + 8) + 16),
    ],
    ids=["GQA", "MLA"],
)
def test_attention_can_need_more_than_the_mlp(name, elements):
    shape, (rank,) = held(name, Mesh.of())
    forward = term(list_serving_terms(shape, rank, Mesh.of(), ServingWorkload(100), dtype="BF16"), "forward pass")
    assert forward.inputs["attention"] == elements
    assert forward.nbytes == 100 * (4 * shape.hidden + elements) * 2


def test_etp_divides_what_is_inside_experts():
    mesh = Mesh.of(tp=2, ep=1, etp=2)
    shape, (rank, *_) = held(fixture("mixtral"), mesh)
    forward = term(list_serving_terms(shape, rank, mesh, ServingWorkload(100), dtype="BF16"), "forward pass")
    assert forward.inputs["experts"] == 2 * (2 * 24 + 24) + 32 + 2 * 4


def test_fsdp_gathers_a_layer_and_the_root():
    mesh = Mesh.of(fsdp=4)
    shape, (rank, *_) = held(LLAMA_8B, mesh)
    gathered = term(list_serving_terms(shape, rank, mesh, ServingWorkload(64), dtype="BF16"), "gathered weights")
    layer = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    assert gathered.inputs == {"layer": layer, "root": 2 * (2 * 128256 * 4096 + 4096)}
    assert gathered.nbytes == gathered.inputs["root"] + 2 * layer


def test_encoders_need_weights_and_a_forward_pass():
    shape, (rank,) = held(fixture("bert"), Mesh.of())
    terms = list_serving_terms(shape, rank, Mesh.of(), ServingWorkload(512, 8), dtype="F32")
    assert {one.category for one in terms} == {"weights", "activations", "runtime"}


def test_a_type_that_does_not_exist_is_refused():
    shape, (rank,) = held(fixture("bert"), Mesh.of())
    with pytest.raises(UsageError, match="no element type 'bf16'"):
        list_serving_terms(shape, rank, Mesh.of(), ServingWorkload(512), dtype="bf16")


def test_the_longest_context_of_llama_8b_on_an_h100():
    """What is left of 79.18 GiB after weights, peak and runtime, at 131,072 bytes a token in pages of 16."""
    shape, ranks = held(LLAMA_8B, Mesh.of())
    budget = int(79.18 * GIB)
    work = ServingWorkload(1, 1)
    found = find_longest_context(shape, ranks, Mesh.of(), work, dtype="BF16", budget=budget)
    beside = sum_terms(
        t
        for t in list_serving_terms(shape, ranks[0], Mesh.of(), ServingWorkload(found), dtype="BF16")
        if t.category != "kv cache"
    )
    assert found == (budget - beside.nbytes) // (131_072 * 16) * 16
    assert 480_000 < found < 520_000


MESHES = [Mesh.of(), Mesh.of(tp=2), Mesh.of(pp=2), Mesh.of(pp=2, tp=2, dp=2), Mesh.of(cp=3), Mesh.of(fsdp=2)]
NAMES = ["llama", "mixtral", "deepseek_v3", "gemma2", "mistral", "qwen3_next", "jamba-moe", "llama4_text", "t5", "gpt2"]


@cache
def known(name, mesh):
    config = fixture(name)
    return held({**config, "sliding_window": 40} if name in {"gemma2", "mistral"} else config, mesh)


def fits(name, mesh, work, budget):
    shape, ranks = known(name, mesh)
    terms = [list_serving_terms(shape, rank, mesh, work, dtype="BF16") for rank in ranks]
    return build_estimate(ranks, terms).within(budget).fits


@given(
    st.sampled_from(NAMES), st.sampled_from(MESHES), st.integers(0, 1 << 33), st.integers(1, 300),
    st.sampled_from([1, 16, 64]), st.sampled_from([1, 100, 8192]), st.sampled_from([None, "F8_E4M3"]),
)  # fmt: skip
def test_the_answer_fits_and_one_more_does_not(name, mesh, budget, number, page, new, kv_dtype):
    shape, ranks = known(name, mesh)
    work = ServingWorkload(number, number, kv_dtype, new, page)
    for ask, key in ((find_longest_context, "context"), (find_largest_batch, "batch")):
        found = ask(shape, ranks, mesh, work, dtype="BF16", budget=budget)

        def at(count, key=key):
            options = {"context": number, "batch": number, key: count}
            return ServingWorkload(options["context"], options["batch"], kv_dtype, new, page)

        if found is None:
            assert fits(name, mesh, at(MOST), budget)
            continue
        assert found == 0 or fits(name, mesh, at(found), budget)
        assert not fits(name, mesh, at(found + 1), budget)


def test_what_keeps_nothing_of_a_token_has_no_longest_context():
    shape, ranks = held(fixture("mamba"), Mesh.of())
    ask = {"dtype": "F32", "budget": 4 * GIB}
    assert find_longest_context(shape, ranks, Mesh.of(), ServingWorkload(1, 4), **ask) is None
    assert find_largest_batch(shape, ranks, Mesh.of(), ServingWorkload(1 << 30), **ask) > 1000
    assert find_longest_context(shape, ranks, Mesh.of(), ServingWorkload(1), dtype="F32", budget=1000) == 0


def test_the_heaviest_stage_decides():
    """Twelve layers on three stages: the last, with the head and the sampler of 512 sequences, has the least room."""
    mesh = Mesh.of(pp=3)
    shape, ranks = held({**LLAMA_8B, "num_hidden_layers": 12}, mesh)
    budget = 16 * GIB
    found = find_longest_context(shape, ranks, mesh, ServingWorkload(1, 512), dtype="BF16", budget=budget)
    each = [
        sum_terms(list_serving_terms(shape, rank, mesh, ServingWorkload(found + 16, 512), dtype="BF16")).nbytes > budget
        for rank in ranks
    ]
    assert each == [False, False, True]


def test_a_large_model_takes_milliseconds():
    mesh = Mesh.of(tp=8, pp=16)
    config = {**LLAMA_70B, "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128}
    shape, ranks = held(config, mesh)
    start = time.process_time()
    terms = [list_serving_terms(shape, rank, mesh, ServingWorkload(131072, 8), dtype="BF16") for rank in ranks]
    assert len(build_estimate(ranks, terms).ranks) == 128
    assert time.process_time() - start < 0.5
    start = time.process_time()
    assert find_longest_context(shape, ranks, mesh, ServingWorkload(1, 8), dtype="BF16", budget=80 * GIB)
    assert time.process_time() - start < 1
    assert bytes_per_token(shape, dtype="BF16", tp=8) == 516_096 // 8


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        (Mesh.of(), ()),
        (Mesh.of(tp=4, pp=2), ("pp", "tp")),
        (Mesh.of(dp=2, fsdp=2, cp=2), ("dp", "fsdp", "cp")),
        (Mesh.of(tp=4, ep=2, etp=2), ("tp", "etp")),
    ],
)
def test_each_axis_has_a_communicator(mesh, axes):
    assert list_communicators(mesh) == axes
    terms = {one.name: one for one in list_runtime_terms(mesh, serving=False)}
    assert ("NCCL communicators" in terms) == bool(axes)
    assert ("NCCL buffers of the exchange of tokens" in terms) == (mesh.ep > 1)
    assert not any(one.exact for one in terms.values())
    assert {one.category for one in terms.values()} == {"runtime"}


@pytest.mark.parametrize(("tp", "measured"), [(2, 0.19), (4, 0.13), (8, 1.77), (8, 2.01)])
def test_communicators_of_a_whole_node_are_inside_the_interval(tp, measured):
    """GiB that SGLang's logs say its start takes: two ranks, four L4 by PCIe, eight H200 (sglang pull 11716)."""
    found = term(list_runtime_terms(Mesh.of(tp=tp), serving=True), "NCCL communicators")
    assert found.low < measured * GIB < found.high
    stages = term(list_runtime_terms(Mesh.of(pp=tp), serving=True), "NCCL communicators")
    assert stages.high == 512 * MIB


def test_peers_of_an_exchange_and_second_communicators():
    def bytes_of(name, mesh, profile=None):
        return term(list_runtime_terms(mesh, serving=False, profile=profile), name)

    exchange = "NCCL buffers of the exchange of tokens"
    two, eight, many = (bytes_of(exchange, Mesh.of(tp=ep, ep=ep)).nbytes for ep in (2, 8, 64))
    assert eight == many == 7 * two
    plain, twice = (bytes_of("NCCL communicators", Mesh.of(dp=2), profile) for profile in ("fsdp2", "megatron"))
    assert (twice.nbytes, twice.low, twice.high) == (plain.nbytes, plain.low, 2 * plain.high)


def test_only_engines_capture_graphs_and_slack_follows_what_is_allocated():
    training = list_runtime_terms(Mesh.of(), serving=False, profile="fsdp2", allocated=100 * GIB)
    slack = term(training, "allocator slack")
    assert (slack.nbytes, slack.interval) == (5 * GIB, (1 * GIB, 10 * GIB))
    assert "CUDA graphs" not in {one.name for one in training}
    assert "CUDA graphs" in {one.name for one in list_runtime_terms(Mesh.of(), serving=True)}
