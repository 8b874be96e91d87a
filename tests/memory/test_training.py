"""A training rank needs states, activations and runtime, each once, and what comes after them only beyond them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from known_models import stock

from shardctl.base.errors import UsageError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.term import CATEGORIES
from shardctl.estimate.training.activations import estimate_activations
from shardctl.estimate.training.rank_training import build_timeline, list_training_terms
from shardctl.estimate.training.states import list_state_terms
from shardctl.estimate.training.transients import STEP
from shardctl.estimate.workload import PROFILES, TrainingWorkload
from shardctl.tensors.mesh import Mesh

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"


def ranks(name, mesh, work, stages):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    described = build_layer_graph(config)
    return [
        (
            h,
            list_training_terms(described, h, mesh, work, stages=stages),
            estimate_activations(described, h, mesh, work, stages=stages),
        )
        for h in list_rank_shards(stock(config), mesh, stages)
    ]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_terms_of_every_profile(profile, zero, recompute):
    work = TrainingWorkload(64, profile=profile, zero=zero, recompute=recompute)
    if profile == "ddp" and zero:
        pytest.skip("DDP shares no states")
    piped = zero < 2 or profile in {"megatron", "fsdp2"}
    mesh = Mesh.of(dp=2, tp=2, pp=2 if piped else 1)
    stages = [1, 1] if piped else [2]
    described = build_layer_graph(json.loads((CONFIGS / "llama.json").read_text()))
    for holding, terms, _ in ranks("llama", mesh, work, stages):
        names = [t.name for t in terms]
        assert len(names) == len(set(names))
        assert {t.category for t in terms} <= set(CATEGORIES)
        assert {"weights", "optimizer", "runtime"} <= {t.category for t in terms}
        assert all(t.low <= t.nbytes <= t.high for t in terms)
        assert all(t.formula and t.source for t in terms if not t.exact)
        lasting = {t.name for t in list_state_terms(holding, mesh, work) if t.category in {"weights", "optimizer"}}
        assert lasting <= set(names)
        line = build_timeline(described, holding, mesh, work, stages=stages)
        moments = line.list_moments()
        allocated = sum(t.nbytes for t in terms if t.category != "runtime" and t.tier == "device")
        assert max(m.nbytes for m in moments) == pytest.approx(allocated, abs=len(terms))
        assert moments[-1].name == "optimizer's step"


@pytest.mark.parametrize(("sequence", "counts"), [(8, True), (4096, False)])
def test_copies_of_a_step_count_when_it_is_the_worst_moment(sequence, counts):
    """The optimizer runs when activations are gone: of both only the larger is needed."""
    work, mesh = TrainingWorkload(sequence), Mesh.of()
    for holding, terms, _ in ranks("llama", mesh, work, [2]):
        (alone,) = (t for t in list_state_terms(holding, mesh, work) if t.name == STEP)
        assert [t for t in terms if t.name == STEP] == ([alone] if counts else [])
        assert any(t.category == "activations" for t in terms) != counts


def test_frozen_and_offloaded_states_are_on_their_tiers():
    work = TrainingWorkload(64, profile="deepspeed", zero=3, offload="nvme", offload_parameters=True)
    for _, terms, _ in ranks("llama", Mesh.of(dp=2), work, [2]):
        assert {t.tier for t in terms} == {"device", "host", "nvme"}
        assert all(t.tier == "nvme" for t in terms if t.category == "optimizer")
        assert all(t.tier == "device" for t in terms if t.category in {"activations", "runtime"})


@pytest.mark.parametrize(("schedule", "virtual", "times"), [("1f1b", 1, 1), ("gpipe", 1, 8), ("interleaved", 2, 1)])
def test_logits_are_held_as_often_as_the_schedule_makes_them_wait(schedule, virtual, times):
    work = TrainingWorkload(4096, microbatches=8, schedule=schedule, virtual_stages=virtual, profile="megatron", zero=1)
    *_, (_, terms, _) = ranks("t5", Mesh.of(pp=2), work, [2, 2])
    (head,) = (t for t in terms if t.name == "kept by the head and the loss")
    assert head.inputs["m"] == times


def test_what_cannot_be_shared_out_is_refused():
    with pytest.raises(UsageError, match="3 model chunks per stage need at least as many layers, but a stage has 1"):
        ranks("llama", Mesh.of(pp=2), TrainingWorkload(64, schedule="interleaved", virtual_stages=3), [1, 1])
    with pytest.raises(UsageError, match="6 equal parts, but it has 64 tokens") as raised:
        ranks("llama", Mesh.of(cp=3), TrainingWorkload(64), [2])
    assert raised.value.hint == "use --seq-len 66"
