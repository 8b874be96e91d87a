"""What devices send, against the formulas of the papers that are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from known_models import even, stock

from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.training.communication import compute_sent_bytes, list_traffic
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.tensors.mesh import Mesh

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
TRAIN = TrainingWorkload(sequence=4096, profile="deepspeed", sequence_parallel=False)
N, H, L = 4096, 4096, 32


def holdings(config, mesh):
    inventory = stock(config)
    return list_rank_shards(inventory, mesh, even(inventory.layers, mesh))


def sends(config, text, work=TRAIN, *, stage=0, tokens=None):
    mesh = Mesh.parse(text)
    one = next(h for h in holdings(config, mesh) if h.stage == stage)
    return list_traffic(build_layer_graph(config), one, mesh, work, tokens=tokens)


def volume(found, *axes):
    return sum(t.nbytes for t in found if not axes or t.axes[0] in axes)


def psi(config, text="tp=1", **which):
    return holdings(config, Mesh.parse(text))[0].gathered(**which)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for n in (1, 2, 3, 8):
        assert compute_sent_bytes("all-reduce", 12, n) == compute_sent_bytes(
            "reduce-scatter", 12, n
        ) + compute_sent_bytes("all-gather", 12, n)


# ZeRO (Rajbhandari et al. 2020), sec. 7: plain data parallelism, ZeRO-1 and ZeRO-2 move 2 Psi, ZeRO-3 moves 3 Psi.
@pytest.mark.parametrize(("zero", "factor"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_moves_what_the_paper_says(zero, factor):
    found = sends(LLAMA, "dp=64", replace(TRAIN, zero=zero))
    assert volume(found) == pytest.approx(factor * psi(LLAMA) * 2 * 63 / 64, rel=1e-9)
    assert {t.axes for t in found} == {("dp", "cp")}


def test_fsdp_moves_half_as_much_again_as_plain_data_parallelism():
    plain = volume(sends(LLAMA, "dp=8"))
    assert volume(sends(LLAMA, "fsdp=8")) == pytest.approx(1.5 * plain, rel=1e-6)
    assert volume(sends(LLAMA, "dp=8", replace(TRAIN, zero=3))) == pytest.approx(1.5 * plain, rel=1e-6)


def test_plain_gradients_are_reduced_once_a_step_and_shared_ones_in_every_microbatch():
    four = replace(TRAIN, microbatches=4)
    assert volume(sends(LLAMA, "dp=8", four)) == volume(sends(LLAMA, "dp=8"))
    assert volume(sends(LLAMA, "fsdp=8", four)) == 4 * volume(sends(LLAMA, "fsdp=8"))
    one, two, three = (volume(sends(LLAMA, "dp=8", replace(four, zero=zero))) for zero in (1, 2, 3))
    unit = psi(LLAMA) * 2 * 7 / 8
    assert (one, two, three) == pytest.approx((2 * unit, 5 * unit, 12 * unit), rel=1e-9)


def test_gradients_travel_as_the_profile_reduces_them():
    bf16 = volume(sends(LLAMA, "dp=8"))
    assert volume(sends(LLAMA, "dp=8", replace(TRAIN, profile="megatron"))) == 2 * bf16
    asked = replace(TRAIN, profile="megatron", gradient_dtype="BF16")
    assert volume(sends(LLAMA, "dp=8", asked)) == bf16


def test_hybrid_sharding_reduces_only_the_shard_between_copies():
    found = sends(LLAMA, "dp=4,fsdp=8")
    kept = holdings(LLAMA, Mesh.parse("dp=4,fsdp=8"))[0].elements()
    assert volume(found, "dp") == pytest.approx(2 * kept * 2 * 3 / 4, rel=1e-9)
    assert volume(found, "fsdp") == volume(sends(LLAMA, "fsdp=8"))


# Shoeybi et al. 2019: four all-reduces of s*b*h elements per layer; here one more for the embedding, one for the head.
def test_tensor_parallelism_sums_four_times_a_layer():
    found = [t for t in sends(LLAMA, "tp=8") if t.axes == ("tp",)]
    assert [t.collective for t in found] == ["all-reduce"]
    assert found[0].messages == 4 * L + 2
    assert found[0].nbytes == (4 * L + 2) * 2 * N * H * 2 * 7 // 8


def test_recomputing_a_layer_sums_again():
    found = [t for t in sends(LLAMA, "tp=8", replace(TRAIN, recompute="full")) if t.axes == ("tp",)]
    assert found[0].messages == 6 * L + 2


# Korthikanti et al. 2022, sec. 4.2.2: sequence parallelism moves no more bytes.
def test_sequence_parallelism_moves_the_same_in_two_halves():
    scattered = [t for t in sends(LLAMA, "tp=8", replace(TRAIN, sequence_parallel=True)) if t.axes == ("tp",)]
    assert [t.collective for t in scattered] == ["all-gather", "reduce-scatter"]
    assert volume(scattered) == volume(sends(LLAMA, "tp=8"), "tp")


def test_serving_sums_twice_a_layer_and_gathers_logits():
    found = sends(LLAMA, "tp=8", ServingWorkload(context=100, batch=16))
    sums, logits = found
    assert sums.nbytes == (2 * L + 1) * 2 * 16 * H * 2 * 7 // 8
    assert logits.nbytes == 16 * 32000 * 2 * 7 // 8
    longer = sends(LLAMA, "tp=8", ServingWorkload(context=100, batch=16), tokens=1600)
    assert volume(longer) == 100 * volume(found)


def test_stages_send_activations_on_and_their_gradients_back():
    work = replace(TRAIN, microbatches=8)
    each = [volume(sends(LLAMA, "pp=4", work, stage=stage), "pp") for stage in range(4)]
    one = N * H * 2 * 8
    assert each == [one, 2 * one, 2 * one, one]
    halves = replace(work, schedule="interleaved", virtual_stages=2)
    around = [volume(sends(LLAMA, "pp=4", halves, stage=stage), "pp") for stage in range(4)]
    assert around == [3 * one, 4 * one, 4 * one, 3 * one]
    assert sum(around) == 2 * (4 * 2 - 1) * one  # each border between chunks, both ways
    served = [volume(sends(LLAMA, "pp=4", ServingWorkload(context=9, batch=2), stage=k), "pp") for k in range(4)]
    assert served == [2 * H * 2] * 3 + [0]


def test_tp_ranks_share_what_stages_send_if_they_share_the_sequence():
    shared = replace(TRAIN, sequence_parallel=True, microbatches=8)
    assert volume(sends(LLAMA, "pp=4,tp=2", shared), "pp") == N * H * 2 * 8 // 2


def test_experts_are_dispatched_and_combined_forward_and_backward():
    found = sends(MIXTRAL, "dp=8,ep=8")
    dispatched = [t for t in found if t.axes == ("ep",)]
    assert [t.collective for t in dispatched] == ["all-to-all"]
    assert dispatched[0].nbytes == 2 * (2 * N * 2 * H * 2) * 7 // 8 * L
    assert dispatched[0].messages == 4 * L


def test_experts_of_ep_ranks_are_reduced_among_their_own_replicas():
    dense, expert = (psi(MIXTRAL, expert=is_expert) for is_expert in (False, True))
    found = {t.name: t for t in sends(MIXTRAL, "dp=8,ep=4")}
    assert found["gradients"].nbytes == pytest.approx(2 * dense * 2 * 7 / 8, rel=1e-9)
    assert found["expert gradients"].ranks == 2
    assert found["expert gradients"].nbytes == pytest.approx(2 * expert / 4 * 2 * 1 / 2, rel=1e-9)


def test_each_tp_rank_dispatches_its_own_tokens():
    work = replace(TRAIN, sequence_parallel=True)
    one, two = (volume(sends(MIXTRAL, text, work), "ep") for text in ("dp=8,ep=8", "dp=4,tp=2,ep=8"))
    assert one == 2 * two


def test_tp_inside_experts_gathers_what_was_dispatched():
    found = [t for t in sends(MIXTRAL, "dp=4,tp=2,ep=4,etp=2") if t.axes == ("etp",)]
    routed = 2 * (N / 2) * 2 * H * 2 * L
    assert [(t.collective, t.nbytes) for t in found] == [("all-gather", routed), ("reduce-scatter", routed)]


def test_ranks_that_all_have_the_same_tokens_need_no_dispatch():
    serving = ServingWorkload(context=100, batch=16)
    assert volume(sends(MIXTRAL, "tp=8,ep=8", serving), "ep") == 0
    assert volume(sends(MIXTRAL, "tp=8,ep=8", serving)) == volume(sends(MIXTRAL, "tp=8", serving))
    assert volume(sends(MIXTRAL, "dp=8,ep=8", serving), "ep") > 0


# Liu et al. 2023: every rank passes on the keys and values of all others; backward, those and their gradients.
def test_context_parallelism_passes_keys_and_values_around():
    found = [t for t in sends(LLAMA, "cp=4") if t.axes == ("cp",)]
    assert found[0].nbytes == 3 * 3 * (N // 4) * (2 * 8 * 128) * 2 * L
    assert found[0].hidden


def test_one_device_sends_nothing():
    assert sends(LLAMA, "tp=1") == ()
    assert sends(MIXTRAL, "tp=1", ServingWorkload(context=9)) == ()
