"""Adapters with embeddings, heads and rows of their own, against what PEFT makes of its own files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shardctl.base.errors import SourceError
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftModel

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(8)[None]
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def make_base(tmp_path: Path, *, tied: bool) -> Path:
    """A small Llama as transformers saves it."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).bfloat16().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def train(base: Path, out: Path, *, rows: int | None = None, **settings: object) -> PeftModel:
    """An adapter with random values as PEFT saves it, of a base whose vocabulary may have been resized."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    if rows is not None:
        model.resize_token_embeddings(rows)
    adapted = get_peft_model(
        model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
    )
    torch.manual_seed(1)
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data += (torch.randn(weight.shape) * 0.1).to(weight.dtype)
    adapted.save_pretrained(out)
    return adapted.eval()


def compute_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"], "rows": 40},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"rows": 40},
        {"trainable_token_indices": [3, 31, 7]},
        {"trainable_token_indices": [3, 39], "rows": 40},
    ],
    ids=str,
)
def test_the_result_is_what_peft_computes(tmp_path, settings, tied):
    base = make_base(tmp_path, tied=tied)
    wanted = train(base, tmp_path / "lora", **settings)
    out, adapter = tmp_path / "out", tmp_path / "lora"
    reshard(base, out, ReshardOptions(merge=(adapter,)))
    assert verify(out, VerifyOptions(against=base, merge=(adapter,), level="full")).ok
    merged, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.allclose(compute_logits(merged), compute_logits(wanted), atol=0.02)
    theirs, ours = wanted.merge_and_unload().state_dict(), merged.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in TABLES)
    assert ours.keys() == theirs.keys()
    assert merged.config.vocab_size == settings.get("rows", 32)


def test_a_resized_vocabulary_is_cut_and_described(tmp_path):
    base = make_base(tmp_path, tied=False)
    train(base, tmp_path / "lora", rows=40, modules_to_save=["embed_tokens", "lm_head"])
    found = inspect(tmp_path / "lora")
    assert found.adapter.replaced == 2
    options = ReshardOptions(merge=(tmp_path / "lora",), mesh=Mesh.of(tp=2))
    reshard(base, tmp_path / "ranks", options)
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    reshard(base, tmp_path / "out", ReshardOptions(merge=(tmp_path / "lora",)))
    back, out = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "out"))
    assert all(torch.equal(back[name], out[name]) for name in out)
    reshard(
        tmp_path / "lora",
        tmp_path / "cut",
        ReshardOptions(mesh=Mesh.of(tp=2)),
        source_options=SourceOptions(config=base),
    )
    reshard(tmp_path / "cut", tmp_path / "whole", ReshardOptions(to="hf"))
    whole, stored = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "lora"))
    assert all(torch.equal(whole[name], stored[name]) for name in stored)


def test_half_of_a_resized_vocabulary_is_refused(tmp_path):
    base = make_base(tmp_path, tied=False)
    train(base, tmp_path / "lora", rows=40)
    file = tmp_path / "lora/adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "lm_head" not in name}, file)
    with pytest.raises(SourceError, match=r"another vocabulary than the base, but no lm_head.weight"):
        reshard(base, tmp_path / "out", ReshardOptions(merge=(tmp_path / "lora",)))


@pytest.mark.parametrize("rows", [[3], [3, 32], [3, 3]])
def test_rows_that_do_not_fit_are_refused(tmp_path, rows):
    base = make_base(tmp_path, tied=False)
    train(base, tmp_path / "lora", trainable_token_indices=[3, 7])
    config = tmp_path / "lora/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"trainable_token_indices": rows}))
    with pytest.raises(SourceError, match="trainable_token_indices"):
        reshard(base, tmp_path / "out", ReshardOptions(merge=(tmp_path / "lora",)))


@pytest.mark.parametrize("tied", [False, True])
def test_a_product_is_added_to_a_whole_copy_of_another_type(tmp_path, tied):
    """PEFT rounds the copy to the type of the base before it adds the product."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base, rows = make_base(tmp_path, tied=tied), 40 if tied else 32  # of a head, PEFT saves no whole copy
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(rows)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "embed_tokens"]))
    torch.manual_seed(1)
    for weight in adapted.parameters():
        if weight.requires_grad or weight is model.get_input_embeddings().weight:
            weight.data += torch.randn(weight.shape) * 0.1
    adapted.save_pretrained(tmp_path / "lora", save_embedding_layers=True)
    stored = load_file(tmp_path / "lora/adapter_model.safetensors")
    assert any("embed_tokens.base_layer" in name and t.dtype == torch.float32 for name, t in stored.items())
    wanted = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    wanted.resize_token_embeddings(rows)
    theirs = PeftModel.from_pretrained(wanted, tmp_path / "lora").merge_and_unload().state_dict()
    reshard(base, tmp_path / "out", ReshardOptions(merge=(tmp_path / "lora",)))
    assert verify(tmp_path / "out", VerifyOptions(against=base, merge=(tmp_path / "lora",), level="full")).ok
    ours = load_file(tmp_path / "out/model.safetensors")
    assert ours[TABLES[0]].shape == (rows, 16)
    for name, tensor in ours.items():
        steps = theirs[name].abs().double() * 2**-7
        assert ((tensor.double() - theirs[name].double()).abs() <= steps).all(), name
    equal = [float((ours[name] == theirs[name]).double().mean()) for name in ours]
    assert min(equal) > 0.99


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adapts_tables", [False, True])
def test_rows_of_further_tokens_are_appended(tmp_path, tied, dtype, adapts_tables):
    """As vLLM up to 0.10 reads `new_embeddings.safetensors` (mergekit#328): the products are of the larger tables."""
    base = make_base(tmp_path, tied=tied)
    train(base, tmp_path / "lora")
    file, prefix = tmp_path / "lora/adapter_model.safetensors", "base_model.model."
    matrices = load_file(file)
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    products = {}
    if adapts_tables:
        a, b = torch.randn(2, 36) * 0.1, torch.randn(16, 2) * 0.1
        matrices |= {f"{prefix}model.embed_tokens.lora_embedding_{part}": t for part, t in (("A", a), ("B", b))}
        products[TABLES[0]] = ((b @ a).T * 2).bfloat16().float()
        config["target_modules"].append("embed_tokens")
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config))
    save_file(matrices, file)
    rows = {"input_embeddings": torch.randn(4, 16).to(dtype), "output_embeddings": torch.randn(4, 16).to(dtype)}
    if tied:
        rows["output_embeddings"] = rows["input_embeddings"].clone()
    save_file(rows, tmp_path / "lora/new_embeddings.safetensors")
    out = tmp_path / "out"
    reshard(base, out, ReshardOptions(merge=(tmp_path / "lora",)))
    assert verify(out, VerifyOptions(against=base, merge=(tmp_path / "lora",), level="full")).ok
    before, found = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 36
    assert (TABLES[1] in found) != tied
    for name, key in zip(TABLES[: 1 if tied else 2], rows, strict=False):
        whole = torch.cat([before[name], rows[key].bfloat16()])
        assert torch.equal(found[name], (whole.float() + products.get(name, 0)).bfloat16()), name
    merged, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert merged.get_input_embeddings().weight.shape == (36, 16)


@pytest.mark.parametrize(
    ("rows", "tied", "message"),
    [
        ({"input_embeddings": (4, 16)}, False, "has no output_embeddings for lm_head.weight"),
        ({"input_embeddings": (4, 8), "output_embeddings": (4, 8)}, False, "has rows of 16"),
        ({"input_embeddings": (4, 16), "output_embeddings": (5, 16)}, False, "of one shape"),
        ({"input_embeddings": (4, 16), "output_embeddings": (4, 16)}, True, "has other rows for each"),
        ({"weights": (4, 16)}, False, "holds weights"),
    ],
)
def test_rows_that_do_not_belong_to_the_base_are_refused(tmp_path, rows, tied, message):
    base = make_base(tmp_path, tied=tied)
    train(base, tmp_path / "lora")
    held = {name: torch.full(shape, float(n)) for n, (name, shape) in enumerate(rows.items())}
    save_file(held, tmp_path / "lora/new_embeddings.safetensors")
    with pytest.raises(SourceError, match=message):
        reshard(base, tmp_path / "out", ReshardOptions(merge=(tmp_path / "lora",)))
