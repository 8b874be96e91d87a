"""Adapters without tensors, without elements, without some of what their config lists, and next to a model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardctl.base.errors import SourceError, UsageError
from shardctl.cli.program import run
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures" / "peft"
BASE = FIXTURES / "hf/llama"
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model.model.layers."


def change(tmp_path: Path, case: str, tensors: dict[str, torch.Tensor] | None = None, **settings: object) -> Path:
    """A copy of an adapter with other tensors or settings."""
    adapter = tmp_path / "adapter"
    shutil.copytree(FIXTURES / case / "adapter", adapter)
    values = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(values | settings))
    if tensors is not None:
        save_file(tensors, adapter / FILE)
    return adapter


def keep(case: str, pattern: str) -> dict[str, torch.Tensor]:
    """The tensors of an adapter whose names do not match."""
    stored = load_file(FIXTURES / case / "adapter" / FILE)
    kept = {name: tensor for name, tensor in stored.items() if not re.search(pattern, name)}
    assert len(kept) < len(stored)
    return kept


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "the adapter's file holds no tensors"),
        (
            {f"{PREFIX}0.self_attn.q_proj.lora_{x}.weight": torch.empty(0) for x in "AB"},
            "2 of 2 tensors .* no elements",
        ),
    ],
)
def test_an_adapter_without_elements_is_refused_and_described(tmp_path, tensors, message):
    """As ZeRO-3 leaves it where parameters are not gathered (trl#4416, peft#1328)."""
    adapter = change(tmp_path, "lora", tensors)
    options = ReshardOptions(merge=(adapter,), allow_partial_adapter=True)
    with pytest.raises(SourceError, match=message) as raised:
        reshard(BASE, tmp_path / "out", options)
    assert "GatheredParameters" in raised.value.hint
    with pytest.raises(SourceError, match=message):
        plan(adapter, source_options=SourceOptions(config=BASE / "config.json"))
    assert re.search(message, inspect(adapter).adapter.problem)
    assert not verify(adapter).ok


@pytest.mark.parametrize(
    ("case", "pattern", "message"),
    [
        ("lora", "v_proj", r"v_proj \(2 modules\)"),
        ("lora", r"layers\.1\.", r"model\.layers\.1\.self_attn\.q_proj\.weight \(1 of 2\)"),
        ("embedding-head", r"lm_head", r"lm_head \(1 module\)"),
        ("embedding-head", r"embed_tokens\.(lora|base)", r"embed_tokens \(1 module\)"),
        ("embedding-head", r"o_proj", r"o_proj \(2 modules\)"),
        ("experts-one", r"layers\.0\.mlp\.experts\.lora_(A|B)", "holds no tensors"),
        ("experts", r"experts\.base_layer\.", r"mlp\.experts\.gate_up_proj \(1 module\)"),
        ("rslora-patterns", r"layers\.0\.mlp\.down_proj", r"model\.layers\.0\.mlp\.down_proj\.weight \(1 of 2\)"),
    ],
)
def test_an_adapter_must_have_what_its_config_lists(tmp_path, case, pattern, message):
    adapter = change(tmp_path, case, keep(case, pattern))
    base = FIXTURES / json.loads((adapter / CONFIG).read_text())["base_model_name_or_path"]
    with pytest.raises(SourceError, match=message):
        reshard(base, tmp_path / "out", ReshardOptions(merge=(adapter,)))
    if "holds no" in message:
        return
    options = ReshardOptions(merge=(adapter,), allow_partial_adapter=True)
    done = reshard(base, tmp_path / "out", options)
    assert any(re.search(f"has nothing for .*{message}", text) for text in done.warnings)
    assert verify(tmp_path / "out", VerifyOptions(against=base, merge=(adapter,), level="full")).ok


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        (r"layers\.1\.", {"layers_to_transform": [0]}),
        (r"layers\.1\.", {"layers_to_transform": 0, "layers_pattern": "layers"}),
        (r"layers\.1\.", {"target_modules": r".*\.layers\.0\..*_proj"}),
        (r"layers\.1\..*v_proj", {"exclude_modules": ["layers.1.self_attn.v_proj"]}),
        (r"layers\.0\..*v_proj", {"exclude_modules": r"model\.layers\.0\.self_attn\.v_proj"}),
        (r"v_proj", {"target_modules": "all-linear"}),
    ],
)
def test_what_the_config_leaves_out_is_not_missing(tmp_path, pattern, settings):
    """As PEFT reads the config (tuners/tuners_utils.py, `check_target_module_exists`)."""
    adapter = change(tmp_path, "lora", keep("lora", pattern), **settings)
    done = reshard(BASE, tmp_path / "out", ReshardOptions(merge=(adapter,)))
    assert not done.warnings


def test_an_expression_that_may_take_for_ever_is_not_run(tmp_path):
    adapter = change(tmp_path, "lora", target_modules="(.*a+)+")
    done = reshard(BASE, tmp_path / "out", ReshardOptions(merge=(adapter,)))
    assert any("did not check which modules are listed" in text for text in done.warnings)


@pytest.mark.parametrize(
    ("case", "pattern", "settings"),
    [
        ("dora", "magnitude", {}),
        ("lora", None, {"use_dora": True}),
        ("biases", "bias", {}),
        ("dora", None, {"use_dora": False}),
    ],
)
def test_vectors_that_the_config_contradicts_are_refused(tmp_path, case, pattern, settings):
    adapter = change(tmp_path, case, keep(case, pattern) if pattern else None, **settings)
    with pytest.raises(SourceError, match="use_dora, lora_bias"):
        reshard(BASE, tmp_path / "out", ReshardOptions(merge=(adapter,), allow_partial_adapter=True))


def test_the_permission_needs_a_merge(tmp_path):
    with pytest.raises(UsageError, match="--allow-partial-adapter has an effect only with --merge"):
        reshard(BASE, tmp_path / "out", ReshardOptions(allow_partial_adapter=True))


@pytest.fixture
def beside(tmp_path) -> Path:
    """A model with an adapter in the same directory, as it is left after training or an earlier merge."""
    shutil.copytree(BASE, tmp_path / "model")
    for name in (CONFIG, FILE):
        shutil.copy(FIXTURES / "lora/adapter" / name, tmp_path / "model")
    return tmp_path / "model"


def test_every_verb_warns_of_an_adapter_next_to_a_model(beside, tmp_path):
    reshard(beside, tmp_path / "out")
    warned = [
        inspect(beside).warnings,
        plan(beside).warnings,
        reshard(beside, tmp_path / "again").warnings,
        [finding.message for finding in verify(beside).levels[0].findings],
        [finding.message for finding in verify(tmp_path / "out").levels[0].findings],
    ]
    assert all(any("transformers applies that adapter" in text for text in said) for said in warned)
    assert not inspect(FIXTURES / "lora/adapter").warnings


def test_a_merged_adapter_is_not_copied_with_the_model(beside, tmp_path):
    """transformers would apply it a second time."""
    out = tmp_path / "out"
    done = reshard(beside, out, ReshardOptions(merge=(beside,)))
    assert {*done.dropped} >= {CONFIG, FILE}
    assert not done.warnings
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "shardctl.json"]
    assert verify(out, VerifyOptions(against=beside, merge=(beside,), level="full")).ok
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        twice, once = (AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (beside, out))
    assert (twice - once).abs().max() < 0.05


def test_an_adapter_next_to_a_model_may_lack_modules(beside, tmp_path):
    """transformers applies what it has, so that the merged model computes the same."""
    save_file(keep("lora", r"layers\.1\."), beside / FILE)
    done = reshard(beside, tmp_path / "out", ReshardOptions(merge=(beside,)))
    assert any("has nothing for" in text for text in done.warnings)


def test_rows_of_a_larger_vocabulary_are_no_model(tmp_path):
    """`new_embeddings.safetensors` lies beside an adapter (mergekit#328), and travels with it."""
    adapter = change(tmp_path, "lora")
    save_file({"input_embeddings": torch.ones(4, 32)}, adapter / "new_embeddings.safetensors")
    found = inspect(adapter)
    assert found.adapter is not None
    assert found.files == (FILE,)
    assert any("new_embeddings.safetensors has rows" in text for text in found.warnings)
    reshard(adapter, tmp_path / "out")
    assert (tmp_path / "out/new_embeddings.safetensors").read_bytes() == (
        adapter / "new_embeddings.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "name", ["rng_state.pth", "rng_state_0.pth", "optimizer.bin", "scaler.pt", "training_args.bin"]
)
def test_what_a_trainer_keeps_beside_an_adapter_is_no_model(tmp_path, name):
    adapter = change(tmp_path, "lora")
    torch.save({"w": torch.ones(2)}, adapter / name)
    found = inspect(adapter)
    assert found.adapter is not None
    assert found.files == (FILE,)
    assert name in found.dropped
    reshard(BASE, tmp_path / "merged", ReshardOptions(merge=(adapter,)))


def test_the_program_ends_with_4(tmp_path, capfd):
    adapter = change(tmp_path, "lora", keep("lora", "v_proj"))
    command = ["reshard", str(BASE), str(tmp_path / "out"), "--merge", str(adapter)]
    assert run([*command, "--dry-run"]) == 4
    assert "--allow-partial-adapter" in capfd.readouterr().err
    assert run([*command, "--allow-partial-adapter"]) == 0
