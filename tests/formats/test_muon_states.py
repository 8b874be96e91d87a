"""Muon in Megatron-LM's distributed checkpoints: states of two optimizers, as core has them, and as shardctl writes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored_bits import bits
from stored_bytes import check, gather
from torch.distributed.checkpoint import save

from shardctl.api import Mesh, ReshardOptions, SourceOptions, VerifyOptions, inspect, reshard, verify
from shardctl.base.errors import UnsupportedError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.tensors.training import split_state_name

FIXTURES = Path(__file__).parents[2] / "fixtures"
HERE = FIXTURES / "torch_dist"
CASES = {"muon_plain": Mesh.of(tp=2), "muon_layers": Mesh.of(dp=2, tp=2), "muon_rounds": Mesh.of(dp=2)}
MASTER = 1 + 2**-12
"""What the optimizer's copy of a weight is, times that weight (`fill_states` of the maker)."""
FACTORS = {"exp_avg": 0.25, "momentum_buffer": 0.5}
MISSING = [name for name in ("megatron", "emerging_optimizers") if importlib.util.find_spec(name) is None]
engine = pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed")
LAYERS = "layout tp=2 dp=2"
MODEL = HERE / "hf" / "llama-bf16"


def masters() -> dict[str, torch.Tensor]:
    return {name: weight.float() * MASTER for name, weight in load_file(MODEL / "model.safetensors").items()}


def is_muons(name: str, weight: torch.Tensor) -> bool:
    """As `_is_nonlinear_or_embedding` of megatron-core decides."""
    return weight.ndim == 2 and name not in {"model.embed_tokens.weight", "lm_head.weight"}


def expected() -> dict[tuple[str, str], torch.Tensor]:
    """Every state and its values."""
    found = {}
    for name, weight in masters().items():
        for state in ("momentum_buffer",) if is_muons(name, weight) else ("exp_avg", "exp_avg_sq"):
            found[state, name] = weight * FACTORS[state] if state in FACTORS else weight * weight
    return found


@pytest.mark.parametrize("name", CASES)
def test_states_of_both_optimizers_are_those_of_the_models_tensors(name):
    where = HERE / name / "iter"
    with open_checkpoint(where) as checkpoint:
        training = checkpoint.manifest.training
        check(where, checkpoint.manifest.tensors, masters())
        want = expected()
        assert {split_state_name(state) for state in training.states} == want.keys()
        for state, tensor in training.states.items():
            assert gather(where, tensor) == bits(want[split_state_name(state)]), state
        assert training.step == 2


@pytest.mark.parametrize("name", CASES)
def test_groups_are_those_of_each_optimizer(name):
    with open_checkpoint(HERE / name / "iter") as checkpoint:
        groups = checkpoint.manifest.training.groups
        assert not [each for each in checkpoint.manifest.warnings if "groups" in each]
        found = {p: ("momentum" in g.settings, g.settings["wd_mult"]) for g in groups for p in g.parameters}
        assert found == {n: (is_muons(n, w), float(w.ndim > 1)) for n, w in masters().items()}
        assert {g.settings.get("momentum") for g in groups} == {0.9, None}


@pytest.mark.parametrize("name", [*CASES, "trained"])
def test_inspect_names_what_is_left_behind_and_not_what_is_read(name):
    found = inspect(HERE / name / "iter")
    assert found.mesh == CASES.get(name, Mesh.of(dp=2, tp=2))
    left = {each.rpartition(":")[2] for each in found.dropped if each.startswith("common")}
    assert left == {"num_floating_point_operations_so_far", "content_metadata"}
    assert not [each for each in found.dropped if "optimizer/shard" in each]


def test_what_is_read_of_ranks_is_not_named_as_left_behind():
    dropped = inspect(FIXTURES / "megatron" / "llama-te").dropped
    assert not {"args", "checkpoint_version", "iteration"} & set(dropped)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["bf16", "keep"])
def test_states_there_and_back_are_the_same(name, dtype, tmp_path):
    asked = ReshardOptions(to="torch_dist", mesh=Mesh.of(pp=2, tp=2), optimizer_states="keep", dtype=dtype)
    done = reshard(HERE / name / "iter", tmp_path / "out", asked)
    assert bool([w for w in done.warnings if "add --dtype bf16" in w]) == (dtype == "keep")
    assert verify(tmp_path / "out", VerifyOptions(level="full")).ok
    want = expected()
    with open_checkpoint(tmp_path / "out") as made, open_checkpoint(HERE / name / "iter") as source:
        check(tmp_path / "out", made.manifest.tensors, masters())
        assert {split_state_name(state) for state in made.manifest.training.states} == want.keys()
        for state, tensor in made.manifest.training.states.items():
            assert gather(tmp_path / "out", tensor) == bits(want[split_state_name(state)]), state
        assert made.manifest.training.step == 2
        there, back = (
            {frozenset(g.parameters): dict(g.settings) for g in each.manifest.training.groups}
            for each in (source, made)
        )
        assert there.keys() == back.keys()
        for parameters, settings in there.items():
            assert {k: v for k, v in back[parameters].items() if k in settings and k != "step"} == {
                k: v for k, v in settings.items() if k != "step"
            }
    if dtype == "bf16":
        with open_checkpoint(tmp_path / "out", SourceOptions(weights="module")) as made:
            check(tmp_path / "out", made.manifest.tensors, {n: w.bfloat16() for n, w in masters().items()})


def test_what_core_finds_its_groups_and_optimizers_by_is_in_common(tmp_path):
    asked = ReshardOptions(to="torch_dist", optimizer_states="keep", dtype="bf16")
    reshard(HERE / "muon_plain" / "iter", tmp_path, asked)
    saved = torch.load(tmp_path / "iter_0000010" / "common.pt", weights_only=False)
    (muon,), adam = (saved["optimizer"][n]["optimizer"]["param_groups"] for n in (0, 1))
    assert (muon["momentum"], muon["wd_mult"], "optimizer" in muon, "betas" in muon) == (0.9, 1.0, False, False)
    assert [(g["optimizer"], g["wd_mult"], g["step"], g["betas"]) for g in adam] == [
        ("adam", wd, 2, (0.9, 0.95)) for wd in (1.0, 0.0)
    ]
    assert (saved["args"].optimizer, saved["args"].use_layer_wise_distributed_optimizer) == ("muon", True)


def save_torch(
    weights: dict[str, torch.Tensor], by_muon: set[str], place: Path, trained: set[str] | None = None
) -> None:
    """Save what a trainer with torch's Muon and AdamW does, as FSDP2's are saved."""
    states = {}
    for name, weight in weights.items():
        if name in by_muon:
            states[name] = {"momentum_buffer": weight * 0.5}
        elif trained is None or name in trained:
            states[name] = {"exp_avg": weight * 0.25, "exp_avg_sq": weight**2, "step": torch.tensor(3.0)}
    muon = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "params": sorted(by_muon)}
    others = sorted(states.keys() - by_muon)
    adam = {"lr": 0.001, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": others}
    state = {"model": weights, "optim": {"state": states, "param_groups": [muon, adam]}}
    save(state, checkpoint_id=place, no_dist=True)


def test_another_trainers_muon_becomes_megatrons(tmp_path):
    weights = masters()
    save_torch(weights, {n for n, w in weights.items() if is_muons(n, w)}, tmp_path / "dcp")
    asked = ReshardOptions(to="torch_dist", mesh=Mesh.of(tp=2), optimizer_states="keep", dtype="bf16")
    done = reshard(tmp_path / "dcp", tmp_path / "out", asked, source_options=SourceOptions(config=MODEL))
    assert [w for w in done.warnings if "--muon-split-qkv" in w or "q, k and v apart" in w]
    assert [w for w in done.warnings if "learning rates 0.001, 0.02" in w]
    saved = torch.load(tmp_path / "out" / "iter_0000003" / "common.pt", weights_only=False)
    (muon,) = saved["optimizer"][0]["optimizer"]["param_groups"]
    assert (muon["lr"], muon["max_lr"], muon["momentum"], "nesterov" in muon) == (0.02, 0.02, 0.95, False)
    want = expected()
    with open_checkpoint(tmp_path / "out") as made:
        for state, tensor in made.manifest.training.states.items():
            assert gather(tmp_path / "out", tensor) == bits(want[split_state_name(state)]), state


def test_deepspeeds_muon_becomes_megatrons(tmp_path):
    said = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24}
    said |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(said))
    told = SourceOptions(config=tmp_path)
    asked = ReshardOptions(to="torch_dist", mesh=Mesh.of(tp=2), optimizer_states="keep", dtype="bf16")
    done = reshard(FIXTURES / "deepspeed" / "muon-z3", tmp_path / "out", asked, source_options=told)
    assert [w for w in done.warnings if "q, k and v apart" in w]
    live = torch.load(FIXTURES / "deepspeed" / "muon-z3.universal.pt")
    with open_checkpoint(tmp_path / "out", told) as made:
        states = made.manifest.training.states
        assert len(states) == 7 + 2 * 5
        for state, tensor in states.items():
            kind, name = split_state_name(state)
            assert gather(tmp_path / "out", tensor) == bits(live[kind][name].float()), state


@pytest.mark.parametrize(
    ("name", "kept"),
    [("model.embed_tokens.weight", "Adam"), ("model.layers.1.mlp.down_proj.weight", "Muon")],
)
def test_a_parameter_that_megatron_gives_to_the_other_optimizer_is_refused(name, kept, tmp_path):
    weights = masters()
    by_muon = {n for n, w in weights.items() if is_muons(n, w)} ^ {name}
    save_torch(weights, by_muon, tmp_path / "dcp")
    asked = ReshardOptions(to="torch_dist", optimizer_states="keep")
    with pytest.raises(UnsupportedError, match=f"Megatron-LM trains it with {kept}") as caught:
        reshard(tmp_path / "dcp", tmp_path / "out", asked, source_options=SourceOptions(config=MODEL))
    assert name in caught.value.message
    assert "--to dcp" in caught.value.hint


def test_an_array_of_tensors_of_both_optimizers_is_refused(tmp_path):
    weights = masters()
    by_muon = {n for n, w in weights.items() if is_muons(n, w)} - {"model.layers.0.self_attn.q_proj.weight"}
    save_torch(weights, by_muon, tmp_path / "dcp")
    asked = ReshardOptions(to="torch_dist", optimizer_states="keep")
    with pytest.raises(UnsupportedError, match=r"linear_qkv\.weight of Megatron-LM has one optimizer"):
        reshard(tmp_path / "dcp", tmp_path / "out", asked, source_options=SourceOptions(config=MODEL))


def test_muon_without_adam_is_refused(tmp_path):
    weights = masters()
    muons = {n for n, w in weights.items() if is_muons(n, w)}
    save_torch(weights, muons, tmp_path / "dcp", trained=muons)
    asked = ReshardOptions(to="torch_dist", optimizer_states="keep")
    with pytest.raises(UnsupportedError, match="all parameters have the states of Muon"):
        reshard(tmp_path / "dcp", tmp_path / "out", asked, source_options=SourceOptions(config=MODEL))


@pytest.mark.parametrize("to", ["megatron", "fsdp_dtensor"])
def test_layouts_without_a_place_for_muon_refuse_it(to, tmp_path):
    asked = ReshardOptions(to=to, optimizer_states="keep")
    with pytest.raises(UnsupportedError, match="has a state momentum_buffer") as caught:
        reshard(HERE / "muon_plain" / "iter", tmp_path, asked)
    assert "--to torch_dist" in caught.value.hint


def run_program(*command: object) -> None:
    words = [sys.executable, "-m", *map(str, command)]
    done = subprocess.run(words, cwd=FIXTURES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@engine
@pytest.mark.engine
@pytest.mark.parametrize(
    ("dtype", "before", "others"),
    [
        ("bfloat16", "none replicated tp=2", ("none replicated tp=2", f"fully_reshardable {LAYERS}")),
        (
            "bfloat16",
            "dp_reshardable layout tp=2 dp=2",
            ("dp_reshardable layout tp=2 dp=2", "none replicated tp=1 pp=2"),
        ),
        ("bfloat16", "dp_reshardable rounds tp=1 dp=2", ("dp_reshardable rounds tp=1 dp=2",)),
        ("float32", "none replicated tp=2", ("none replicated tp=2", "none replicated tp=1 pp=2")),
    ],
)
def test_megatron_core_goes_on_with_muon_as_without_the_detour(dtype, before, others, tmp_path):
    program, hf = "fixtures.torch_dist.resume_muon", tmp_path / "hf"
    run_program("fixtures.torch_dist.resume", "model", hf, "llama", dtype)
    run_program(program, "train", hf, tmp_path / "run", tmp_path / "run.json", *before.split())
    losses = json.loads((tmp_path / "run.json").read_text())
    told = SourceOptions(config=hf)
    reshard(tmp_path / "run", tmp_path / "dcp", ReshardOptions(to="dcp", optimizer_states="keep"), source_options=told)
    for number, other in enumerate(others):
        mesh = dict(word.split("=") for word in other.split() if "=" in word)
        asked = ReshardOptions(
            to="torch_dist",
            mesh=Mesh.of(**{axis: int(n) for axis, n in mesh.items()}),
            optimizer_states="keep",
            dtype="bf16" if dtype == "bfloat16" else "keep",
        )
        source = tmp_path / ("dcp" if number else "run")
        out = tmp_path / f"out{number}"
        reshard(source, out, asked, source_options=told)
        run_program(program, "resume", hf, out, tmp_path / "out.json", *other.split())
        found = json.loads((tmp_path / "out.json").read_text())
        apart = max(abs(a - b) for a, b in zip(found, losses, strict=True))
        print(f"{dtype} {before} > {source.name} > {other}: {apart:.1e}")
        if number == 0:
            assert found == losses
        else:
            assert found == pytest.approx(losses, rel=1e-6 if dtype == "float32" else 2e-3)
