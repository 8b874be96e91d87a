"""Wrappers without a table: the text half is cut as its own family says, towers are whole, and all come back."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import assert_same, config_of, save, stored

from shardctl.cli.program import run
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": [28, 28],
    "patch_size": [14, 14],
}
TEXTS = {"InternVL": "qwen2", "Idefics3": "llama", "DeepseekVL": "llama", "Qwen2Audio": "qwen2", "VipLlava": "llama"}
"""Wrappers whose text half is called differently, and the fixture of that."""
BASES = {
    "InternVL": "language_model.model.",
    "Idefics3": "model.text_model.",
    "DeepseekVL": "model.language_model.",
    "Qwen2Audio": "language_model.model.",
    "VipLlava": "language_model.model.",
}
"""What stands before the names of the text half's base model on the Hub."""
TOWERS = {
    "InternVL": {"vision_config": VISION},
    "Idefics3": {"vision_config": {**VISION, "image_size": 28, "patch_size": 14}, "scale_factor": 2},
    "DeepseekVL": {
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    },
    "Qwen2Audio": {
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 10,
        }
    },
    "VipLlava": {"vision_config": {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}},
}


@pytest.fixture(scope="module", params=TEXTS)
def wrapper(request, tmp_path_factory):
    """A wrapper that transformers saved, and its text half alone."""
    name = request.param
    text = dict(config_of(TEXTS[name]))
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    config = kind.config_class(text_config=text, **TOWERS[name])
    values = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [kind.__name__], "dtype": "float32"}
    tiny = save(tmp_path_factory.mktemp(name) / "source", values)
    alone = tmp_path_factory.mktemp(name) / "text"
    alone.mkdir()
    base, whole = BASES[name], stored(tiny.path)
    inner = {f"model.{n.removeprefix(base)}": t for n, t in whole.items() if n.startswith(base)}
    head = next((n for n in whole if n.endswith("lm_head.weight")), None)
    inner |= {"lm_head.weight": whole[head]} if head is not None else {}
    save_file(inner, alone / "model.safetensors", {"format": "pt"})
    kept = {**text, "tie_word_embeddings": "lm_head.weight" not in inner}
    (alone / "config.json").write_text(json.dumps(kept))
    return name, tiny, alone


def read_rank(folder, rank):
    """Every array that a rank's files have, by name."""
    found = {}
    for path in sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors")):
        found |= load_file(path)
    return found


def test_the_text_half_is_cut_as_by_itself_and_the_rest_is_whole(wrapper, tmp_path):
    name, tiny, alone = wrapper
    done = reshard(tiny.path, tmp_path / "whole", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(alone, tmp_path / "alone", ReshardOptions(mesh=Mesh.of(tp=2)))
    source = stored(tiny.path)
    for rank in range(2):
        mine, text = read_rank(tmp_path / "whole", rank), read_rank(tmp_path / "alone", rank)
        assert mine.keys() == source.keys()
        for key, array in mine.items():
            inner = f"model.{key.removeprefix(BASES[name])}" if key.startswith(BASES[name]) else "lm_head.weight"
            cut = key.startswith(BASES[name]) or key.endswith("lm_head.weight")
            assert torch.equal(array, text[inner] if cut else source[key]), key
    assert any(
        f"has {TEXTS[name]} inside, {BASES[name]}**, which is cut by its table" in line for line in done.warnings
    )


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(tp=2, pp=2, fsdp=2)], ids=str)
def test_there_and_back_is_the_identity(wrapper, tmp_path, mesh):
    _, tiny, _ = wrapper
    reshard(tiny.path, tmp_path / "ranks", ReshardOptions(mesh=mesh))
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=tiny.path)).ok
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(tiny.path))
    assert digest(tmp_path / "ranks").digest == digest(tiny.path).digest


def test_the_plan_counts_the_cache_of_the_text_half(wrapper, capfd):
    _, tiny, _ = wrapper
    assert run(["plan", str(tiny.path), "--tp", "2", "--for", "serve", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["purpose"]["why_not"] in ("", None)


@pytest.mark.parametrize("change", ["unknown", "missing"])
def test_a_text_half_that_does_not_fit_its_table_is_cut_by_derived_rules_and_a_warning_says_why(
    wrapper, tmp_path, change
):
    name, tiny, _ = wrapper
    tensors = stored(tiny.path)
    odd = f"{BASES[name]}layers.0.self_attn.{'extra' if change == 'unknown' else 'o_proj'}.weight"
    tensors = (
        tensors | {odd: torch.ones(4, 4)} if change == "unknown" else {n: t for n, t in tensors.items() if n != odd}
    )
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_bytes((tiny.path / "config.json").read_bytes())
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    for mesh in (Mesh.of(tp=2), Mesh.of(fsdp=2)):
        done = reshard(tmp_path / "source", tmp_path / str(mesh), ReshardOptions(mesh=mesh))
        assert any(f"has {TEXTS[name]} inside: " in line and odd in line for line in done.warnings)
        how = "derived" if mesh.degree("tp") > 1 else "no table for"
        assert any(how in line for line in done.warnings)
        assert digest(tmp_path / str(mesh)).digest == digest(tmp_path / "source").digest


def test_of_a_config_alone_the_text_half_is_planned_and_a_warning_says_that_towers_are_not_counted(
    wrapper, capfd, monkeypatch
):
    """Where transformers is not installed, which would describe the towers."""
    name, tiny, alone = wrapper
    monkeypatch.setattr("shardctl.checkpoint.config_only.find_spec", lambda _: None)
    assert run(["plan", str(tiny.path / "config.json"), "--tp", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    counted = sum(tensor.numel() for tensor in stored(alone).values())
    assert found["parameters"] == counted
    line = f"only the {TEXTS[name]} inside {name}ForConditionalGeneration is counted, without its towers"
    assert line in found["warnings"]


HUB = {
    "DotsOCRForCausalLM": ("qwen2", "", "model.", "", "vision_tower.blocks.0.attn.qkv.weight"),
    "GOTQwenForCausalLM": ("qwen2", "", "model.", "", "model.vision_tower_high.blocks.0.attn.qkv.weight"),
    "InternVLChatModel": ("qwen2", "llm_config", "language_model.model.", "language_model.", "mlp1.1.weight"),
    "LlavaLlamaForCausalLM": ("llama", "", "model.", "", "model.mm_projector.0.weight"),
    "LlavaQwenForCausalLM": ("qwen2", "", "model.", "", "model.image_newline"),
    "MiniCPMO": ("qwen3", "", "llm.model.", "llm.", "vpm.encoder.layers.0.self_attn.q_proj.weight"),
    "MiniCPMV": ("qwen2", "", "llm.model.", "llm.", "resampler.attn.in_proj_weight"),
    "Ovis2_5": ("qwen3", "llm_config", "llm.model.", "llm.", "vte.weight"),
}
"""Classes of the Hub's own code: the text model inside, the key of its config, if it has one of its own, what stands
before the names of its base model and of its head, and a tensor beside them.

Those of dots.ocr, InternVL, MiniCPM and Ovis 2.5 are as vLLM 0.32 reads them; the others are written down from memory
of their repositories, and nothing here has read them."""


def save_hub_class(name, folder):
    """Save a checkpoint of a class that transformers lacks; returns the text model inside."""
    kind, key, base, head, beside = HUB[name]
    text = {**config_of(kind), "dtype": "float32", "tie_word_embeddings": False}
    alone = save(folder / "alone", text)
    tensors = {
        f"{base}{n.removeprefix('model.')}" if n.startswith("model.") else f"{head}{n}": t
        for n, t in stored(alone.path).items()
    }
    outer = {"architectures": [name], "model_type": "odd", "auto_map": {}, "vision_config": {"hidden_size": 32}}
    (folder / "source").mkdir()
    save_file(tensors | {beside: torch.ones(8, 4)}, folder / "source" / "model.safetensors", {"format": "pt"})
    values = {**outer, key: text} if key else {**text, **outer}
    (folder / "source" / "config.json").write_text(json.dumps(values))
    return alone


@pytest.mark.parametrize("name", HUB)
def test_the_text_model_of_a_class_that_transformers_lacks_is_cut_planned_and_split_off(tmp_path, capfd, name):
    alone, (kind, _, base, _, beside) = save_hub_class(name, tmp_path), HUB[name]
    done = reshard(tmp_path / "source", tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert any(f"{name} has {kind} inside, {base}**, which is cut by its table" in line for line in done.warnings)
    assert all(torch.equal(read_rank(tmp_path / "ranks", rank)[beside], torch.ones(8, 4)) for rank in range(2))
    assert digest(tmp_path / "ranks").digest == digest(tmp_path / "source").digest
    reshard(tmp_path / "source", tmp_path / "text", ReshardOptions(only="text"))
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert type(model) is alone.kind
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokens = torch.arange(3, 14)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, alone.model(input_ids=tokens).logits)
    assert run(["plan", str(tmp_path / "source"), "--tp", "2", "--for", "serve", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["purpose"]["why_not"] in ("", None)


def test_a_config_that_leaves_the_text_model_open_is_not_guessed(tmp_path, capfd):
    save_hub_class("MiniCPMO", tmp_path)
    assert run(["plan", str(tmp_path / "source" / "config.json"), "--tp", "2"]) != 0
    assert "MiniCPMO is not known" in capfd.readouterr().err


def test_gemma_3n_with_its_towers_is_cut_as_without(tmp_path):
    """transformers builds its vision model with timm only, so that its names here are made up after those of timm's."""
    alone = save(tmp_path / "alone", {**config_of("gemma3n_text"), "dtype": "float32"})
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored(alone.path).items()
    }
    towers = {
        "model.vision_tower.timm_model.conv_stem.conv.weight": torch.randn(8, 3, 3, 3),
        "model.audio_tower.conformer.0.norm.weight": torch.randn(16),
        "model.embed_vision.embedding_projection.weight": torch.randn(32, 16),
    }
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file(tensors | towers, whole / "model.safetensors", {"format": "pt"})
    text = json.loads((alone.path / "config.json").read_text())
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text,
        "vision_config": {"model_type": "gemma3n_vision"},
        "audio_config": {"model_type": "gemma3n_audio"},
    }
    (whole / "config.json").write_text(json.dumps(config))
    done = reshard(whole, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert any("has gemma3n_text inside, model.language_model.**" in line for line in done.warnings)
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(whole))
    reshard(whole, tmp_path / "text", ReshardOptions(only="text"))
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    tokens = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = alone.kind.from_pretrained(alone.path).eval()(input_ids=tokens).logits
        assert torch.equal(half(input_ids=tokens).logits, expected)
