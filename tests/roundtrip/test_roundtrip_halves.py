"""A part split off a model is one by itself: transformers loads it whole, and it computes what it did inside."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import add_predicting_layers, assert_same, config_of, save, stored
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UnsupportedError
from shardctl.cli.program import run
from shardctl.models import describe_model
from shardctl.models.submodels.part_models import find_text_half, find_vision_half
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.manifest import Manifest, Tensor
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

TEXTS = {
    "qwen2_vl-flat": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM",
    "qwen3_vl_moe": "Qwen3MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "llava": "LlamaForCausalLM",
    "mistral3": "MistralForCausalLM",
    "mllama": "MllamaForCausalLM",
    "minimax_m3_vl": "MiniMaxM3VLForCausalLM",
}
"""Wrappers, and the class of the text model inside."""
TOWERS = (
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "gemma3",
    "gemma4",
    "llava",
    "llava-pixtral",
    "llama4",
    "mistral3",
    "mllama",
)
"""Wrappers whose vision model transformers has as a model of its own."""


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    """Make a wrapper that transformers saved, by the name of its fixture; each once."""
    made = {}

    def make(name):
        if name not in made:
            config = {**config_of(name), "dtype": "float32"}
            made[name] = save(tmp_path_factory.mktemp(name) / "source", config)
        return made[name]

    return make


def load_strictly(kind, path):
    """Load what transformers finds, if nothing is missing and nothing left over."""
    model, told = kind.from_pretrained(path, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model.eval()


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_half_computes_what_it_did_inside(wrapped, tmp_path, name):
    whole = wrapped(name)
    done = reshard(whole.path, tmp_path / "text", ReshardOptions(only="text"))
    lone = {"mllama", "minimax_m3_vl"}  # which no Auto has
    kind = getattr(transformers, TEXTS[name]) if name in lone else transformers.AutoModelForCausalLM
    alone = load_strictly(kind, tmp_path / "text")
    assert type(alone).__name__ == TEXTS[name]
    tokens = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wrapper = load_strictly(whole.kind, whole.path)
        # Llama 4's wrapper in transformers 5.24 reads `image_outputs` of an output that has none.
        inside = (wrapper.language_model if name == "llama4" else wrapper)(input_ids=tokens).logits
        assert torch.equal(alone(input_ids=tokens).logits, inside)
    assert done.record.options["only"] == "text"
    assert not done.record.filtered
    assert any(line.startswith("left out: ") and "vis" in line and "B)" in line for line in done.warnings)
    found = verify(tmp_path / "text", VerifyOptions(level="full", against=whole.path))
    assert found.ok, found.findings


@pytest.mark.parametrize("name", TOWERS)
def test_the_vision_half_computes_what_it_did_inside(wrapped, tmp_path, name):
    whole = wrapped(name)
    reshard(whole.path, tmp_path / "eyes", ReshardOptions(only="vision"))
    inner = getattr(whole.model, "model", whole.model)
    tower = next(getattr(inner, word) for word in ("visual", "vision_tower", "vision_model") if hasattr(inner, word))
    alone = load_strictly(type(tower), tmp_path / "eyes")
    assert_same(dict(alone.state_dict()), dict(tower.state_dict()))
    assert verify(tmp_path / "eyes", VerifyOptions(level="full", against=whole.path)).ok


def test_a_half_goes_into_ranks_and_other_layouts(tmp_path):
    config = config_of("qwen3_vl")
    whole = save(tmp_path / "whole", {**config, "text_config": {**config["text_config"], "attention_bias": False}})
    reshard(whole.path, tmp_path / "text", ReshardOptions(only="text"))
    reshard(whole.path, tmp_path / "ranks", ReshardOptions(only="text", mesh=Mesh.of(tp=2, pp=2)))
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=whole.path)).ok
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=tmp_path / "text")).ok
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(tmp_path / "text"))
    assert verify(tmp_path / "back", VerifyOptions(level="full", against=whole.path)).ok
    with pytest.raises(UnsupportedError):
        reshard(whole.path, tmp_path / "megatron", ReshardOptions(to="megatron", mesh=Mesh.of(tp=2)))
    for layout in ("vllm", "megatron"):
        reshard(whole.path, tmp_path / layout, ReshardOptions(only="text", to=layout, mesh=Mesh.of(tp=2)))
        assert verify(tmp_path / layout, VerifyOptions(level="full", against=whole.path)).ok


def test_a_half_that_was_changed_is_told_from_its_source(wrapped, tmp_path):
    whole = wrapped("qwen3_vl")
    reshard(whole.path, tmp_path / "text", ReshardOptions(only="text"))
    file = tmp_path / "text" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file, {"format": "pt"})
    assert not verify(tmp_path / "text", VerifyOptions(level="full", against=whole.path)).ok


@pytest.mark.parametrize("part", ["experts", "model.language_model.layers.*.self_attn.**"])
def test_other_parts_keep_their_names_and_say_what_is_left(wrapped, tmp_path, capfd, part):
    whole = wrapped("qwen3_vl_moe")
    assert run(["reshard", str(whole.path), str(tmp_path / "part"), "--only", part]) == 0
    assert "left out: " in capfd.readouterr().err
    word = ".experts." if part == "experts" else ".self_attn."
    expected = {name: tensor for name, tensor in stored(whole.path).items() if word in name and "visual" not in name}
    assert_same(stored(tmp_path / "part"), expected)
    assert json.loads((tmp_path / "part" / "config.json").read_text())["model_type"] == "qwen3_vl_moe"
    assert verify(tmp_path / "part", VerifyOptions(level="full", against=whole.path)).ok


def test_the_layers_that_predict_are_split_off(tmp_path):
    source = save(tmp_path / "source", config_of("qwen3_next")).path
    add_predicting_layers(source)
    reshard(source, tmp_path / "mtp", ReshardOptions(only="mtp"))
    assert_same(stored(tmp_path / "mtp"), {n: t for n, t in stored(source).items() if n.startswith("mtp.")})
    assert verify(tmp_path / "mtp", VerifyOptions(level="full", against=source)).ok


def test_a_plan_of_a_half_is_that_of_the_half(wrapped, tmp_path, capfd):
    whole = wrapped("qwen3_vl")
    reshard(whole.path, tmp_path / "text", ReshardOptions(only="text"))
    sizes = []
    for arguments in ([str(whole.path), "--only", "text"], [str(tmp_path / "text")]):
        assert run(["plan", *arguments, "--tp", "2", "--for", "serve", "--json"]) == 0
        document = json.loads(capfd.readouterr().out)
        sizes.append((document["architecture"], [rank["weight_bytes"] for rank in document["ranks"]]))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("part", "code"), [("eyes", 2), ("mtp", 2), ("vision", 4), ("text", 4)])
def test_a_part_that_is_not_there_is_refused(tmp_path, capfd, part, code):
    source = save(tmp_path / "source", config_of("qwen3"))
    assert run(["reshard", str(source.path), str(tmp_path / "part"), "--only", part]) == code
    assert "--only" in capfd.readouterr().err
    assert not (tmp_path / "part").exists()


INNER = {
    "Glm4v": "Glm4ForCausalLM",
    "Glm4vMoe": "Glm4MoeForCausalLM",
    "GlmOcr": "Glm4ForCausalLM",
    "PaddleOCRVL": "LlamaForCausalLM",
    "Qwen2_5OmniThinker": "Qwen2ForCausalLM",
    "Qwen3OmniMoeThinker": "Qwen3MoeForCausalLM",
}
"""Wrappers without a table whose text model has the layers of a family, and the class of that."""
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}
SEEN = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "image_size": 28,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
HEARD = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "output_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "n_window": 4,
    "downsample_hidden_size": 8,
}


def shrink(kind):
    """A config class with small sizes, and with as many parts of a rotary embedding as a head has room for."""
    made = {}
    for key, sizes in (("text_config", SIZES), ("vision_config", SEEN), ("audio_config", HEARD)):
        part = kind.sub_configs.get(key)
        if part is not None:
            made[key] = {name: size for name, size in sizes.items() if name in part().to_dict() or name == "head_dim"}
    turned = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    if kind.model_type == "glm4v_moe":
        turned |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 0, 0]}
    made["text_config"]["rope_parameters"] = turned
    return kind(**made)


@pytest.mark.parametrize("stem", INNER)
def test_a_text_model_with_the_layers_of_a_family_computes_alone_what_it_did_inside(tmp_path, stem):
    kind = getattr(transformers, f"{stem}ForConditionalGeneration")
    values = json.loads(shrink(kind.config_class).to_json_string(use_diff=False))
    whole = save(tmp_path / "whole", values | {"architectures": [kind.__name__], "dtype": "float32"})
    reshard(whole.path, tmp_path / "text", ReshardOptions(only="text"))
    alone = load_strictly(transformers.AutoModelForCausalLM, tmp_path / "text")
    assert type(alone).__name__ == INNER[stem]
    tokens = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        inside = load_strictly(kind, whole.path)(input_ids=tokens).logits
        assert torch.equal(alone(input_ids=tokens).logits, inside)
    done = reshard(whole.path, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert any(" inside, " in line and "which is cut by its table" in line for line in done.warnings)
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(whole.path))
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", forward=True, against=whole.path)).ok


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        *("glm4v", "glm4v_moe", "glm_ocr", "granite4_vision", "granite_docling", "hunyuan_vl", "paddleocr_vl"),
    ],
)
def test_a_config_that_is_silent_gets_what_its_own_class_assumes(name):
    kind = type(CONFIG_MAPPING[name]().text_config)
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8}
    inner = {"model_type": kind.model_type, **sizes, "num_key_value_heads": 4, "head_dim": 4}
    stem = kind.__name__.removesuffix("TextConfig")
    config = {"model_type": name, "architectures": [f"{stem}ForConditionalGeneration"]}
    config |= {"text_config": inner, "vision_config": {}}
    tensors = {t.name: Tensor(t.name, t.dtype, t.shape, ()) for t in describe_model(config).tensors.values()}
    half = find_text_half(config, Manifest("", tensors, {}), ())
    alone = CONFIG_MAPPING[half.config["model_type"]].from_dict(dict(half.config)).to_dict()
    assumed = kind.from_dict(inner).to_dict()
    for values in (alone, assumed):
        values["rope_parameters"] = {"partial_rotary_factor": 1.0, **values["rope_parameters"]}
    unlike = {key for key in assumed.keys() & alone.keys() if assumed[key] != alone[key]}
    tokens = {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert unlike <= {"model_type", *tokens, "tie_word_embeddings", "architectures"}


def test_a_text_half_whose_head_is_never_tied_says_so():
    inner = {**config_of("nemotron_h"), "architectures": None}
    tensors = {f"language_model.{t.name}": t for t in describe_model(config_of("nemotron_h")).tensors.values()}
    tensors = {name: Tensor(name, t.dtype, t.shape, ()) for name, t in tensors.items()}
    config = {"architectures": ["SeerForConditionalGeneration"], "text_config": inner}
    assert find_text_half(config, Manifest("", tensors, {}), ()).config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("kind", "name", "own", "told"),
    [
        ("git", "git.image_encoder.vision_model.norm.bias", "vision_model.norm.bias", ""),
        ("llava", "model.vision_tower.vision_model.norm.bias", "vision_model.norm.bias", ""),
        ("qianfan_ocr", "vision_model.embeddings.class_embedding", "embeddings.class_embedding", "cls_token"),
    ],
)
def test_a_vision_half_has_the_names_of_its_class_or_says_that_they_are_others(kind, name, own, told):
    config = {"model_type": kind, "vision_config": {"model_type": f"{kind}_vision"}}
    half = find_vision_half(config, Manifest("", {name: Tensor(name, BY_NAME["F32"], (4,), ())}, {}))
    assert half.names == {name: own}
    assert told in half.renamed
    assert bool(told) == bool(half.renamed)


def test_a_model_is_no_half_of_itself(tmp_path, capfd):
    source = save(tmp_path / "source", config_of("dbrx"))
    assert run(["reshard", str(source.path), str(tmp_path / "part"), "--only", "text"]) == 4
    assert "has no text model inside" in capfd.readouterr().err


def test_a_half_whose_class_by_itself_lacks_a_kind_of_layer_is_refused(tmp_path, capfd):
    inner = {"model_type": "unlimited_ocr_text", "layer_types": ["reference_sliding_attention"], "vocab_size": 96}
    inner |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    inner |= {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
    config = {"architectures": ["UnlimitedOcrForConditionalGeneration"], "text_config": inner}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    shapes = {t.name: t.shape for t in describe_model(config).tensors.values()}
    save_file({n: torch.zeros(shape) for n, shape in shapes.items()}, tmp_path / "whole" / "model.safetensors")
    assert run(["reshard", str(tmp_path / "whole"), str(tmp_path / "part"), "--only", "text"]) == 4
    assert "'reference_sliding_attention'" in capfd.readouterr().err
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize(
    "outside", [["lm_head", "model.visual"], ["lm_head", "model.visual", "model.language_model.layers.0.mlp"]]
)
def test_a_quantized_text_half_stays_quantized_and_becomes_numbers(tmp_path, outside):
    config = {**config_of("qwen3_vl"), "tie_word_embeddings": False}
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": outside}
    quantised = {**config, "quantization_config": settings}
    generator = torch.Generator().manual_seed(2)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps(quantised))
    state = {
        tensor.name: torch.rand(tensor.shape, generator=generator).to(getattr(torch, tensor.dtype.torch))
        for tensor in describe_model(quantised).own()
    }
    save_file(state, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    reshard(tmp_path / "whole", tmp_path / "text", ReshardOptions(only="text"))
    made = json.loads((tmp_path / "text" / "config.json").read_text())
    assert stored(tmp_path / "text").keys() == describe_model(made).state().keys()
    inside = {name.replace("model.language_model.", "model."): t for name, t in state.items() if "visual" not in name}
    assert_same(stored(tmp_path / "text"), inside)
    assert verify(tmp_path / "text", VerifyOptions(level="full", against=tmp_path / "whole")).ok
    reshard(tmp_path / "whole", tmp_path / "numbers", ReshardOptions(only="text", dtype="bf16"))
    reshard(tmp_path / "text", tmp_path / "later", ReshardOptions(dtype="bf16"))
    assert_same(stored(tmp_path / "numbers"), stored(tmp_path / "later"))
    assert "quantization_config" not in json.loads((tmp_path / "numbers" / "config.json").read_text())
    assert verify(tmp_path / "numbers", VerifyOptions(level="full", against=tmp_path / "whole")).ok
