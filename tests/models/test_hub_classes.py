"""Families whose classes transformers lacks: their code is on the Hub, or in engines.

transformers' own renaming of the Hub's files (`conversion_mapping.py`) is the judge where it has one, else the modules
of vLLM 0.32, whose names and shapes stand here.
"""

from __future__ import annotations

import json
import re
from math import prod

import pytest
import transformers
from model_oracle import BUILT, CONFIGS, build_on_meta, state
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import describe_model, load_families
from shardctl.models.names.binding import find_canonical_name
from shardctl.models.tables.decoder import HEADS
from shardctl.tensors.box import Box, subtract_all
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import check_cuts, compute_rank_boxes

FOLDER = CONFIGS.with_name("configs_hub")
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
FAMILY = {family.name: family for family in load_families() if family not in BUILT}


def hub_config(name, **changes):
    """A tiny config, with some keys changed."""
    return {**json.loads((FOLDER / f"{name}.json").read_text()), **changes}


def test_every_family_has_a_config():
    assert {hub_config(name)["model_type"] for name in NAMES} == set(FAMILY)


def test_every_row_is_used():
    full = hub_config("step3p5", layer_types=["full_attention"] * 5)
    biased = hub_config("mistral_large4", multimodal_projector_bias=True)
    configs = (*map(hub_config, NAMES), full, biased)
    used = {tensor.row for config in configs for tensor in describe_model(config).tensors.values()}
    shared = {*HEADS, *(row for family in BUILT for row in family.rows)}
    rows = {row for family in FAMILY.values() for row in family.rows if ".language_model." not in row.name}
    spare = {row for row in rows if " width_" in f" {row.when}"}  # of which Nemotron-NAS has more than a model uses
    assert {row.name for row in rows - used - shared - spare} == set()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"fsdp": 3}, {"fsdp": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_every_element_is_held(name, degrees):
    model, mesh = describe_model(hub_config(name), kv_heads="replicate"), Mesh.of(**degrees)
    for tensor in model.tensors.values():
        check_cuts(tensor.name, tensor.shape, tensor.spec, mesh)
        held = [
            box
            for rank in range(mesh.world)
            for box in compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(rank))
        ]
        assert subtract_all(Box.whole(tensor.shape), held) == []


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_known(name):
    config = hub_config(name)
    assert len(build_layer_graph(config).layers) == describe_model(config).layers


def renamed_by_transformers(kind, name):
    """What transformers calls a tensor of the Hub's, before it joins or takes apart any and adds the base's prefix."""
    for rule in get_checkpoint_conversion_mapping(kind):
        pairs = zip(rule.source_patterns, rule.target_patterns, strict=False)
        if type(rule).__name__ == "GroupWeightRename":  # of which one applies
            name = next((re.sub(old, new, name) for old, new in pairs if re.search(old, name)), name)
        elif type(rule).__name__ != "WeightConverter":
            name, _ = rule.rename_source_key(name)
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def test_kimi_k25_has_the_tensors_of_transformers_class_under_the_names_of_the_hub():
    """`wqkv` becomes three tensors, and experts are stacked; all others are renamed only."""
    config = hub_config("kimi_k25")
    kind = transformers.Kimi_K25ForConditionalGeneration
    theirs = state(build_on_meta(kind, kind.config_class.from_dict(theirs_of_kimi(config))))
    model = describe_model(config)
    assert model.parameters == sum(map(prod, theirs.values()))
    for tensor in model.own():
        name = renamed_by_transformers("kimi_k25", tensor.name)
        if ".wqkv." in name:
            parts = [name.replace("wqkv", f"attn.{part}_proj") for part in "qkv"]
            assert {theirs[part] for part in parts} == {(tensor.shape[0] // 3, *tensor.shape[1:])}
        elif ".experts." not in name:
            assert theirs[name] == tensor.shape, name


def theirs_of_kimi(config):
    """The config as transformers 5.23 reads it: it does not know the keys of the Hub's vision models."""
    vision = config["vision_config"]
    sizes = {key.removeprefix("vt_"): value for key, value in vision.items() if key.startswith("vt_")}
    grid = {f"pos_emb_{key}": vision[f"init_pos_emb_{key}"] for key in ("height", "width")}
    return {
        **config,
        "vision_config": {**sizes, **grid, "patch_size": vision["patch_size"]},
        "projection_hidden_size": vision["mm_hidden_size"],
    }


def test_files_that_transformers_saves_are_kimis():
    model = describe_model(hub_config("kimi_k25", architectures=["Kimi_K25ForConditionalGeneration"]))
    assert model.architecture == "KimiK25ForConditionalGeneration"
    assert "language_model.model.layers.1.mlp.experts.3.up_proj.weight" in model.tensors
    meant = {
        "language_model.model.blocks.0.mlp.up_proj.weight": "language_model.model.layers.0.mlp.up_proj.weight",
        "model.mm_projector.pre_norm.bias": "mm_projector.pre_norm.bias",
        "vision_tower.encoder.patch_embed.proj.weight": "vision_tower.patch_embed.proj.weight",
        "vision_tower.encoder.blocks.0.wo.weight": "vision_tower.encoder.blocks.0.wo.weight",
    }
    assert {name: find_canonical_name(model, name) for name in meant} == meant


@pytest.mark.parametrize("tied", [False, True])
def test_the_outer_config_of_kimi_says_whether_the_head_is_the_embedding(tied):
    """transformers saves no head where it says so, whatever the config of the text model says."""
    model = describe_model(hub_config("kimi_k25", tie_word_embeddings=tied))
    assert ("language_model.lm_head.weight" in model.aliases) == tied


@pytest.mark.parametrize("word", ["VLMoe", "VL_Moe"])
def test_ernies_flat_config_is_the_nested_one(word):
    """The Hub's: the text model's keys beside `vision_config`, both numbers of experts, and a ratio for the tower."""
    nested = hub_config("ernie4_5_vl_moe")
    nested["vision_config"]["intermediate_size"] = 96
    flat = {
        **nested,
        **nested["text_config"],
        "model_type": "ernie4_5_moe_vl",
        "architectures": [f"Ernie4_5_{word}ForConditionalGeneration"],
    }
    flat |= {"moe_num_experts": [4, 4], "vision_config": {**nested["vision_config"], "mlp_ratio": 3}}
    del flat["text_config"], flat["vision_config"]["intermediate_size"]
    assert describe_model(flat).state() == describe_model(nested).state()
    assert build_layer_graph(flat).layers == build_layer_graph(nested).layers


def test_mimo_is_qwen2_and_predicts_as_vllms_modules_do():
    """`MiMoMultiTokenPredictorLayer` in vLLM's `mimo_mtp.py`, with the names of `hf_to_vllm_mapper` turned back."""
    config = hub_config("mimo")
    qwen = describe_model({**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    model = describe_model(config)
    assert model.state() == qwen.state()
    block = {
        name.removeprefix("model.layers.0."): shape
        for name, shape in qwen.state().items()
        if name.startswith("model.layers.0.")
    }
    ends = {f"{name}_layernorm.weight": (32,) for name in ("token", "hidden", "final")}
    expected = {**block, **ends, "input_proj.weight": (32, 64)}
    assert {t.name: t.shape for t in model.tensors.values() if t.optional and "mtp" in t.name} == {
        f"model.mtp_layers.0.{name}": shape for name, shape in expected.items()
    }


@pytest.mark.parametrize("name", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_gemma4s_assistants_have_the_tensors_of_transformers_class(name, monkeypatch):
    """transformers 5.23 refuses every such config, as no layer makes the keys and values that all of them take."""
    kind = getattr(transformers, hub_config(name)["architectures"][0])
    modes = property(lambda config: ["reuse"] * config.num_hidden_layers)
    monkeypatch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", modes)
    real = build_on_meta(kind, kind.config_class.from_dict(hub_config(name)))
    model = describe_model(hub_config(name))
    assert model.state() == state(real)
    assert {tie: t.name for t in model.own() for tie in t.ties} == real.all_tied_weights_keys
    assert all(layer.attention.shares_kv for layer in build_layer_graph(hub_config(name)).layers)


def test_deepseek_1_is_the_text_model_of_transformers_deepseek_ocr_2():
    """That has no class with a head; DeepSeek-OCR and the smaller DeepSeek-VL2 have the same inside."""
    config = hub_config("deepseek")
    kinds = {"mlp_layer_types": ["dense", "sparse"], "architectures": ["DeepseekOcr2TextModel"]}
    kind = transformers.models.deepseek_ocr2.DeepseekOcr2TextModel
    theirs = state(build_on_meta(kind, kind.config_class.from_dict({**config, **kinds})))
    names = {f"model.{name}": shape for name, shape in theirs.items()}
    assert describe_model(config).state() == names | {"lm_head.weight": (96, 32)}
    assert [layer.attention.kind for layer in build_layer_graph(config).layers] == ["full", "full"]
