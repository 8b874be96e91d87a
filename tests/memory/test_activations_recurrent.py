"""What training keeps of layers with a recurrent state, against what their kernels' autograd functions save.

`recurrent_peaks.json` was written by docs/benchmarks/activations_recurrent.py: torch's count of transformers' models
that call mamba-ssm 2.3.2, causal-conv1d 1.7.0 and fla-core 0.6.0, in bf16, on one device. `megatron_mamba_peaks.json`
was written by docs/benchmarks/activations_megatron.py: the same of megatron-core 0.15's layers of Mamba 2, without a
head.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardctl.base.errors import UnsupportedError
from shardctl.estimate.model.layer_graph import LayerState, build_layer_graph
from shardctl.estimate.model.rank_shards import RankShards
from shardctl.estimate.term import sum_terms
from shardctl.estimate.training.activations import estimate_activations
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.mesh import Mesh

PEAKS = json.loads(Path(__file__).with_name("recurrent_peaks.json").read_text())
MEGATRON = json.loads(Path(__file__).with_name("megatron_mamba_peaks.json").read_text())
CONFIGS = {one["name"]: one["config"] for one in PEAKS}
KINDS = ("mamba", "falcon_mamba", "mamba2", "jamba", "qwen3_next")
ONE = Mesh.of()


def terms(name: str, work: TrainingWorkload, mesh: Mesh = ONE, made_of=None):
    made_of = made_of or build_layer_graph(CONFIGS[name])
    layers = len(made_of.layers)
    holding = RankShards(0, "only", mesh.coordinate(0), 1, 0, range(layers), ())
    return estimate_activations(made_of, holding, mesh, work, stages=(layers,))


def kept(name: str, work: TrainingWorkload, **options: object) -> dict[str, int]:
    """Bytes by the name of the term."""
    return {t.name: t.nbytes for t in terms(name, work, **options)}


RECURRENT = "kept by recurrent layers and their kernels"


def label(one: dict[str, object]) -> str:
    return f"{one['name']}, {one['batch']} x {one['sequence']}, {one['recompute']}"


@pytest.mark.parametrize("one", PEAKS, ids=label)
def test_the_peak_is_that_of_the_kernels_autograd_functions_within_five_percent(one):
    work = TrainingWorkload(one["sequence"], one["batch"], profile="hf", precision="bf16", recompute=one["recompute"])
    found = sum_terms(terms(one["name"], work))
    assert found.nbytes == pytest.approx(one["peak"], rel=0.05)
    assert found.low < one["peak"] < found.high


@pytest.mark.parametrize(
    "one", [one for one in PEAKS if one["recompute"] == "none" and "wide vocabulary" in one["name"]], ids=label
)
def test_what_is_kept_for_the_backward_pass_is_counted_to_a_thousandth(one):
    # With a wide vocabulary the worst moment is the loss, when all that is kept is still there.
    found = terms(one["name"], TrainingWorkload(one["sequence"], one["batch"], profile="hf", precision="bf16"))
    assert found[-1].name.endswith("the loss")
    assert sum_terms(found, category="activations").nbytes == pytest.approx(one["kept"], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        # Of i channels, N states each and the rank r: xz, x_dbl, B and C, the result; states each 2048 tokens.
        ("mamba", "n * (6 * i + 2 * r + 8 * N) + 8 * i * N + 8 * i + 8 * i * N"),
        ("falcon_mamba", "n * (6 * i + 2 * r + 8 * N) + 8 * i * N + 8 * i + 8 * i * N"),
        ("jamba", "n * (16 * i + 8 * r + 16 * N + 12) + 8 * i * N + 8 * i + 8 * i * N"),
    ],
)
def test_selective_scans_keep_what_their_functions_save(name, formula):
    config, work = CONFIGS[name], TrainingWorkload(1024, profile="hf", precision="bf16")
    i, r = 2 * config["hidden_size"], config["hidden_size"] // 16
    layers = config["num_hidden_layers"] // (2 if name == "jamba" else 1)
    expected = eval(formula, {}, {"n": 1024, "i": i, "r": r, "N": 16})  # noqa: S307
    assert kept(name, work)[RECURRENT] == layers * expected


def test_a_scan_in_chunks_keeps_its_input_and_its_result():
    config, work = CONFIGS["mamba2"], TrainingWorkload(1024, 2, profile="hf", precision="bf16")
    i, heads, states = 2 * config["hidden_size"], config["num_heads"], 128
    a_token = 2 * (2 * i + 2 * states + heads) + 2 * i + 4
    assert kept("mamba2", work)[RECURRENT] == config["num_hidden_layers"] * (2048 * a_token + 8 * heads)


def test_a_gated_delta_rule_keeps_its_chunks_products():
    c, work = CONFIGS["qwen3_next"], TrainingWorkload(1024, profile="hf", precision="bf16")
    k_heads, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    keys, values = k_heads * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    convolved, normed = 2 * (2 * keys + values), 2 * 2 * keys + 8 * k_heads
    a_token = convolved + normed + 2 * values + 2 * 64 * heads + 14 * heads + 18 * values + 4 * heads
    assert kept("qwen3_next", work)[RECURRENT] == 3 * (1024 * a_token + 8 * heads)


@pytest.mark.parametrize("name", KINDS)
def test_a_term_says_that_it_is_of_the_kernels(name):
    for profile in ("hf", "fsdp2", "deepspeed"):
        found = next(t for t in terms(name, TrainingWorkload(512, profile=profile)) if t.name == RECURRENT)
        assert eval(found.formula, {}, dict(found.inputs)) == pytest.approx(found.nbytes)  # noqa: S307
        assert "kernels of mamba-ssm 2.3" in found.source
        assert found.low < found.nbytes < found.high


@pytest.mark.parametrize("name", KINDS)
def test_whatever_shards_them_the_modules_are_those_of_transformers(name):
    """Under autocast, which the profile hf has, norms keep fp32 sums, and experts compute in the fp32 of their weights.

    fsdp2 and deepspeed give modules weights in bf16. All else that is kept is the same; which backward pass needs most
    is not, where there are experts.
    """
    by_profile = [kept(name, TrainingWorkload(512, profile=profile)) for profile in ("hf", "fsdp2", "deepspeed")]
    assert by_profile[1] == by_profile[2]
    for wider in ("kept by norms", "kept by experts"):
        cast, narrow, _ = [terms.pop(wider, None) for terms in by_profile]
        assert cast is narrow is None or narrow < cast <= 2 * narrow
    cast, narrow = ({name: size for name, size in terms.items() if "alive" not in name} for terms in by_profile[:2])
    assert cast == narrow
    assert by_profile[0] == by_profile[1] or any("experts" in name for name in by_profile[0])


@pytest.mark.parametrize("name", KINDS)
def test_selective_recomputation_is_of_attention_only(name):
    none, selective, full = (
        kept(name, TrainingWorkload(512, profile="hf", precision="bf16", recompute=r))
        for r in ("none", "selective", "full")
    )
    assert none[RECURRENT] == selective[RECURRENT]
    assert RECURRENT not in full
    assert "inputs of layers" in full


def test_what_is_added_up_in_fp32_is_kept_so():
    wide, narrow = (
        kept(name, TrainingWorkload(512, profile="hf", precision="bf16", recompute="full"))["inputs of layers"]
        for name in ("mamba, wide vocabulary", "mamba, narrow sums")
    )
    assert wide == 2 * narrow


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("profile", ["hf", "fsdp2", "deepspeed"])
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_what_transformers_does_not_divide_is_refused_by_name(name, axis, profile):
    with pytest.raises(UnsupportedError, match=f"layer 0 is not known with {axis}"):
        terms(name, TrainingWorkload(512, profile=profile), Mesh.of(**{axis: 2}))


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba", "qwen3_next"])
def test_layers_that_megatron_does_not_have_are_not_guessed(name):
    with pytest.raises(UnsupportedError, match="layer 0 is not known with this profile: only Megatron-LM") as raised:
        terms(name, TrainingWorkload(512, profile="megatron"))
    assert "hf, fsdp2 and deepspeed" in raised.value.hint


def megatron(one, **options: object):
    """The terms of a stage without the head."""
    made_of, mesh = build_layer_graph(one["config"]), Mesh.of(tp=one["tp"], pp=2)
    layers = len(made_of.layers)
    holding = RankShards(0, "only", mesh.coordinate(0), 1, 0, range(layers), ())
    options = {"dropout": False, **options}  # as it was measured
    work = TrainingWorkload(one["sequence"], one["batch"], profile="megatron", microbatches=1, **options)
    return estimate_activations(made_of, holding, mesh, work, stages=(layers, 1))


@pytest.mark.parametrize("one", MEGATRON, ids=lambda one: f"tp{one['tp']}, {one['config']['hidden_size']}")
def test_megatrons_layers_of_mamba_2_are_divided_by_tp(one):
    found = megatron(one)
    # With tp there is one buffer besides, for whatever is gathered.
    buffer = 2 * one["batch"] * one["sequence"] * one["config"]["hidden_size"] * (one["tp"] > 1)
    assert sum_terms(found, category="activations").nbytes + buffer == pytest.approx(one["kept"], rel=1e-4)
    assert sum_terms(found).nbytes == pytest.approx(one["peak"], rel=0.02)


def test_megatron_divides_groups_evenly_or_not_at_all():
    one = next(one for one in MEGATRON if one["tp"] == 4)
    with pytest.raises(UnsupportedError, match="tp=4: its 2 groups"):
        megatron({**one, "config": {**one["config"], "n_groups": 2}})


def test_megatrons_layers_of_mamba_2_with_cp_are_not_guessed():
    with pytest.raises(UnsupportedError, match="layer 0 is not known with cp"):
        terms("mamba2", TrainingWorkload(512, profile="megatron"), Mesh.of(cp=2))


def test_states_that_are_computed_in_a_way_that_is_not_known_are_not_guessed():
    made_of = build_layer_graph(CONFIGS["jamba"])
    state = LayerState(channels=512, grouped=0, groups=1, window=4, recurrent=8192, recurrent_fp32=True)
    layers = list(made_of.layers)
    layers[2] = replace(layers[2], state=state)
    with pytest.raises(UnsupportedError, match="layer 2 is not known: it has a recurrent state"):
        terms(
            "jamba",
            TrainingWorkload(512, profile="hf", precision="bf16"),
            made_of=replace(made_of, layers=tuple(layers)),
        )
