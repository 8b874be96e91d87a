"""What families say of their layers is what transformers builds and what its config classes assume."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
import torch
import transformers
from model_oracle import BUILT, CONFIGS, FIXTURES, fixture, on_meta, state
from transformers.activations import ACT2FN

from shardctl.base.errors import UnsupportedError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import ModelConfig, describe_model, families, load_families
from shardctl.models.names.extra_names import IGNORED_PATTERNS
from shardctl.models.tables.family import Family
from shardctl.models.tables.layer_features import LayerFeatures

PUBLIC = sorted(path.stem for path in CONFIGS.with_name("configs_public").glob("*.json"))
KEPT = {
    (): "layer",
    ("bfloat16", "float32"): "rms",
    ("float32", "float32"): "rms32",
    ("float32", "float32", "float32"): "layer32",
    ("float32",): "bare32",
    ("bfloat16", "float32", "float32"): "layer",
}
"""The kind of a norm, by the types of what it keeps of a bf16 input besides the input itself. The last is
DeBERTa's own, of which no estimate is made."""
HEAD_NORM = re.compile(r"(^|\.)(q|k|qk|query|key)_(layer)?norm(\.|$)")
WITHIN_MIXERS = re.compile(
    r"(^|\.)(mixer|mamba|linear_attn|indexer|router|\w+_hc)\.|_sub_norm$|_a_layernorm$|self_attn\.o_norm$|\.(q_a|q_b|kv|v)_norm$"
)
"""Norms inside recurrent layers (of KDA in the module of attention), indexers, routers and what mixes streams, of
values, of what latent attention compresses, and of what BitNet's attention and MLP hand to their last matrix."""


def kept_by(norm):
    """The kind of a norm module: it runs, and autograd says what it keeps."""
    weight = next(norm.parameters(), None)
    shape = weight.shape if weight is not None else getattr(norm, "normalized_shape", (8,))
    x = torch.ones((2, *shape), device="meta", dtype=torch.bfloat16)
    x.requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    own = {parameter.untyped_storage()._cdata for parameter in (*norm.parameters(), x)}
    kind = KEPT[tuple(sorted(str(t.dtype)[6:] for at, t in kept.items() if at not in own and t.numel() >= x.numel()))]
    return "rms16" if kind == "rms" and x.untyped_storage()._cdata in kept else kind


def modules_of_layers(config):
    """The modules of each pipeline layer by their names within it, in the order of the layers."""
    model, real = describe_model(config), on_meta(config).to(torch.bfloat16)
    paths = {}
    for tensor in model.own():
        where, number = tensor.spec.where[0]
        if where == "layer" and not tensor.row.on:
            depth = tensor.row.name.split("}")[0].lstrip(".").count(".") + 1
            base = model.prefix.count(".") + 1 if model.prefix and tensor.row.name.startswith(".") else 0
            paths.setdefault(number, ".".join(tensor.name.split(".")[: base + depth]))
    return [dict(real.get_submodule(paths[number]).named_modules()) for number in sorted(paths)]


def shrunk(config):
    """The config with few layers, for building it takes as long as it has layers."""
    return {k: min(v, 4) if k in {"num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"} else v
            for k, v in config.items()}  # fmt: skip


def texts(**changes):
    return {"text_config": {"num_hidden_layers": 2, **changes}}


CASES = [
    *((name, {}) for name in FIXTURES),
    ("phi", {"qk_layernorm": True}),
    ("phi", {"qk_layernorm": False, "hidden_act": "gelu"}),
    ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    ("stablelm", {"qk_layernorm": False}),
    ("cohere", {"use_qk_norm": True}),
    ("cohere", {"use_qk_norm": False}),
    ("glm4_moe", {"use_qk_norm": True}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": True}),
    ("llama4_text", {"use_qk_norm": False}),
    ("llama4_text", {"no_rope_layers": [0, 1]}),
    ("llama4_text", {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "layer_types": None, "moe_layers": None}),
    ("falcon", {"num_ln_in_parallel_attn": 1}),
    ("falcon", {"new_decoder_architecture": False, "num_kv_heads": None}),
    ("falcon", {"new_decoder_architecture": False, "num_kv_heads": None, "parallel_attn": False}),
    ("falcon-rw", {"parallel_attn": True, "activation": "relu"}),
    ("opt", {"layer_norm_elementwise_affine": False, "enable_bias": False}),
    ("gpt_neox", {"use_parallel_residual": True, "hidden_act": "gelu_new"}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_fast"}),
    ("olmo2", {"attention_bias": True}),
    ("starcoder2", {"use_bias": False}),
    ("gpt2", {"activation_function": "relu"}),
    ("t5", {"feed_forward_proj": "gated-gelu"}),
    ("llava", texts(model_type="gemma")),
    ("llava", texts(model_type="qwen2")),
    ("llava", texts(model_type="mistral")),
    ("paligemma", texts(model_type="gemma2")),
    ("siglip", {"text_config": {"num_hidden_layers": 1}, "vision_config": {"num_hidden_layers": 1}}),
]


def silent(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def check_norms_and_activations(config):
    found = build_layer_graph(config)
    built = modules_of_layers(config)
    assert len(built) == len(found.layers)
    for layer, modules in zip(found.layers, built, strict=True):
        norms = {n: m for n, m in modules.items() if "Norm" in type(m).__name__ and not [*m.children()]}
        heads = {n for n in norms if HEAD_NORM.search(n) and not WITHIN_MIXERS.search(n)}
        whole = {n for n in norms if n not in heads and not WITHIN_MIXERS.search(n)}
        assert layer.norms == len(whole), whole
        assert {kept_by(norms[n]) for n in whole} == {found.style.norm}
        assert {kept_by(norms[n]) for n in heads} == ({layer.head_norm} - {None}), heads
        kinds = {
            type(m)
            for n, m in modules.items()
            if not n.endswith("score_fn")  # of routers
            and not (n.endswith(("mixer.act", "mamba.act")) and layer.state and any(one.feeds for one in found.layers))
            and type(m).__module__ in {"transformers.activations", "torch.nn.modules.activation"}
        }
        name = {"gated-gelu": "gelu_new"}.get(found.style.activation, found.style.activation)
        same = {"gelu": {torch.nn.GELU}}.get(name, set())  # MPT's
        assert kinds <= {type(ACT2FN[name]), *same} if name in ACT2FN else not kinds
    biased = any(name.endswith("relative_attention_bias") for name, _ in on_meta(config).named_modules())
    assert found.style.position_biases == biased


@pytest.mark.parametrize(
    ("name", "changes"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "as it is"
)
def test_norms_and_activations_are_those_that_transformers_builds(name, changes):
    check_norms_and_activations(fixture(name, **changes))


@pytest.mark.parametrize("name", PUBLIC)
def test_norms_and_activations_of_published_models_are_those_that_transformers_builds(name):
    check_norms_and_activations(shrunk(json.loads((CONFIGS.with_name("configs_public") / f"{name}.json").read_text())))


@pytest.mark.parametrize("name", [name for name in FIXTURES if "num_experts_per_tok" in fixture(name)])
def test_weights_of_experts_are_of_the_type_that_routers_make_them(name):
    config = fixture(name)
    for layer, modules in zip(build_layer_graph(config).layers, modules_of_layers(config), strict=True):
        routers = [m for m in modules.values() if type(m).__name__.endswith("Router")]
        assert bool(routers) == (layer.experts is not None)
        for router in routers:
            more = {
                "expert_bias": torch.zeros(layer.experts.count, device="meta"),
                "e_score_correction_bias": torch.zeros(layer.experts.count, device="meta"),
                "input_ids": torch.zeros(3, device="meta", dtype=torch.long),
            }
            asked = {key: more[key] for key in signature(router.forward).parameters if key in more}
            size = (1, 3, layer.hidden) if name == "afmoe" else (3, layer.hidden)
            made = router(torch.ones(size, device="meta", dtype=torch.bfloat16), **asked)
            assert made[1].dtype == (torch.float32 if layer.experts.wide else torch.bfloat16)


def text_part(family):
    """The traits of a family's text model and the config that its class assumes."""
    classes = next(iter(family.classes))
    config = getattr(transformers, classes).config_class()
    traits, _ = family.text(ModelConfig(fixture(family.name))) if family.text else (family.traits, None)
    return traits, getattr(config, "text_config", config) if family.text else config


ELSEWHERE = re.compile(
    r"layerdrop|classif|pooler|qa_dropout|summary|embd?_pdrop|embed(ding)?_dropout|activation_dropout"
)
"""Dropout of heads and embeddings, and of whole layers; that within an MLP is 0 wherever a config is silent."""


NO_WINDOW = {"qwen3_vl_moe": {"sliding_window"}, "modernbert-decoder": {"sliding_window"}}
"""Keys that a class sets itself whatever a config says: to None, or from another."""


@pytest.mark.parametrize("family", BUILT, ids=lambda family: family.name)
def test_a_silent_config_means_what_its_class_assumes(family):
    traits, assumed = text_part(family)
    pairs = (traits.activation, traits.dropout, traits.attention_dropout, traits.score_cap, traits.logit_cap)
    for key, usual in (*pairs, traits.fp32_sums):
        if key:
            assert (getattr(assumed, key, usual) or type(usual)()) == usual, key
    spoken = {traits.dropout[0], traits.attention_dropout[0]}
    dropouts = {key for key in assumed.to_dict() if "drop" in key and not ELSEWHERE.search(key)}
    assert dropouts <= spoken
    assert getattr(assumed, "num_experts_per_tok", None) == traits.experts_per_token
    windows = {"sliding_window", "attention_chunk_size", "attention_window_size", "local_attention"}
    windowed = windows & set(assumed.to_dict()) - NO_WINDOW.get(family.name, set())
    assert windowed == ({traits.window.key} if traits.window else set())
    caps = {"attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"} & set(assumed.to_dict())
    assert caps == {traits.score_cap[0], traits.logit_cap[0]} - {""}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gpt2", "activation_function"),
        ("gptj", "activation_function"),
        ("phi", "hidden_act"),
        ("t5", "feed_forward_proj"),
    ],
)
def test_a_silent_config_has_the_activation_that_transformers_builds(name, key):
    check_norms_and_activations(silent(fixture(name), key))


def replace_families(monkeypatch, *families):
    describe = sys.modules["shardctl.models.describe"]
    monkeypatch.setattr(describe, "load_families", lambda: families)
    monkeypatch.setattr(describe, "load_family", {family.name: family for family in families}.get)


def test_a_family_that_does_not_say_what_its_layers_compute_is_named(monkeypatch):
    llama = next(family for family in load_families() if family.name == "llama")
    for traits in (None, LayerFeatures(activation=("hidden_act", "silu"))):
        mute = replace(llama, traits=traits)
        others = tuple(family for family in load_families() if family is not llama)
        replace_families(monkeypatch, *others, mute)
        with pytest.raises(UnsupportedError, match=r"of llama .*is not known"):
            build_layer_graph(fixture("llama"))
        assert describe_model(fixture("llama")).parameters


def test_the_family_in_extending_md_is_whole(monkeypatch):
    page = (CONFIGS.parents[1] / "docs" / "extending.md").read_text()
    text = re.search(r"## A family of models.*?```python\n(.*?)```", page, re.DOTALL)[1]
    assert text == Path(families.__file__).with_name("arcee.py").read_text()
    said: dict[str, object] = {}
    exec(text, said)  # noqa: S102
    family = next(value for value in said.values() if isinstance(value, Family))
    replace_families(monkeypatch, family)
    for architecture in family.classes:
        config = {**fixture("llama"), "model_type": family.name, "architectures": [architecture]}
        for changes in ({}, {"attention_bias": True, "mlp_bias": True}):
            values = silent(config | changes, "hidden_act")
            assert describe_model(values).state() == state(on_meta(values))
            check_norms_and_activations(values)


ELSEWHERE_SAID = {
    "extra_names.py": set(IGNORED_PATTERNS),
    "automodel_names.py": {"deepseek_v3", "glm4_moe", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"},
    "maxtext_names.py": {"deepseek_v2", "deepseek_v3", "gpt_oss", "olmo3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"},
    "meta_names.py": {"llama", "mistral"},
    "torchtitan_names.py": {"llama"},
    "torchtitan_tables.py": {"deepseek_v3", "gpt_oss", "kimi_k25", "llama", "qwen3", "qwen3_moe"}
    | {"qwen3_5_moe", "qwen3_5_moe_text"},
    "trainer_tables.py": {"gemma", "gemma2", "llama", "mistral", "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen3"},
    "windows.py": {"mamba"},
}
"""Automodel's names were compared for eight families, MaxText has arrays of eight that are only moved, Meta's
checkpoints are of two, torchtitan has own names for ten and turns the pairs of one, torchtune and OLMo have tables of
ten; what transformers ignores is said by family; "mamba" is a kind of layer, too."""


def test_no_model_type_is_named_outside_the_files_of_families():
    """A second list by `model_type` is a wrong answer that waits."""
    root = Path(families.__file__).parents[1]
    names = {family.name for family in load_families()}
    for path in (*root.glob("*.py"), *root.with_name("estimate").glob("*.py")):
        said = names & set(re.findall(r'"([\w-]+)"', path.read_text()))
        assert said == ELSEWHERE_SAID.get(path.name, set()), path
