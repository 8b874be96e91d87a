"""The tables say exactly what transformers builds, for every class of every fixture."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest
import torch
import transformers
from family_checks import FamilyChecks
from model_oracle import BUILT, CONFIGS, FIXTURES, classes, dtype_of, fixture, list_classes, on_meta, state

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models import describe_model, load_families
from shardctl.models.tables.config import ModelConfig

EACH = FamilyChecks()
CASES = classes()


@EACH.add(list_classes)
def check_names_shapes_order_and_ties_are_those_of_the_state_dict(name, architecture):
    config = fixture(name, architectures=[architecture])
    model, real = describe_model(config), on_meta(config)
    theirs = state(real)
    assert model.state() == theirs
    order = [n for n in theirs if n not in model.aliases]
    # The head is declared before the base model; data flows the other way.
    if model.family in {"xlm-roberta", "camembert", "jina_embeddings_v3"}:
        order.sort(key=lambda n: not n.startswith("roberta.") and not architecture.endswith("Model"))
    assert [n for n in model.state() if n not in model.aliases] == order
    ties = {tie: t.name for t in model.own() for tie in t.ties}
    if name == "t5-gated-untied" and architecture == "T5ForConditionalGeneration":
        # transformers 5 always declares T5's head tied, and then un-ties it when it loads one that differs
        # (modeling_utils.py, tie_weights); the config says whether a checkpoint has a head of its own.
        assert ties == {k: v for k, v in real.all_tied_weights_keys.items() if k != "lm_head.weight"}
    else:
        assert ties == real.all_tied_weights_keys
    if architecture not in {"Llama4ForCausalLM", "MllamaForCausalLM"}:  # who have a prefix for when they are a part
        assert model.prefix in ("", real.base_model_prefix)


@pytest.mark.parametrize(
    ("name", "architecture", "changes"),
    [
        ("bert", "BertForSequenceClassification", {"id2label": {str(n): f"L{n}" for n in range(5)}}),
        ("llama", "LlamaForTokenClassification", {"num_labels": 7}),
        ("t5", "T5ForSequenceClassification", {"num_labels": 3}),
        ("gpt2", "GPT2DoubleHeadsModel", {"summary_use_proj": False}),
        ("gpt2", "GPT2DoubleHeadsModel", {"summary_proj_to_labels": False}),
        ("llama", "LlamaForCausalLM", {"num_key_value_heads": None}),
        ("llama", "LlamaForCausalLM", {"head_dim": None}),
        ("gpt2", "GPT2LMHeadModel", {"n_inner": 40}),
        ("albert", "AlbertForMaskedLM", {"inner_group_num": 2, "num_hidden_groups": 1}),
        ("deberta-v2", "DebertaV2Model", {"max_relative_positions": 16, "conv_groups": 2, "type_vocab_size": 0}),
        ("big_bird", "BigBirdModel", {"use_bias": False}),
        (
            "modernbert-decoder",
            "ModernBertDecoderForCausalLM",
            {"decoder_bias": False, "norm_bias": False, "mlp_bias": False},
        ),
        ("gpt_bigcode", "GPTBigCodeForCausalLM", {"multi_query": True}),
        ("falcon_mamba", "FalconMambaForCausalLM", {"expand": 16, "intermediate_size": 48}),
        ("mamba", "MambaForCausalLM", {"expand": 16, "intermediate_size": 48}),
        ("t5", "T5ForConditionalGeneration", {"num_decoder_layers": None}),
        ("falcon", "FalconForCausalLM", {"parallel_attn": None}),
        ("falcon", "FalconForCausalLM", {"multi_query": None, "new_decoder_architecture": False, "num_kv_heads": None}),
        ("solar_open", "SolarOpenForCausalLM", {"intermediate_size": None}),
    ],
)
def test_heads_and_sizes_follow_the_config(name, architecture, changes):
    config = fixture(name, architectures=[architecture], **changes)
    assert describe_model(config).state() == state(on_meta(config))


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("llama", ("num_key_value_heads", "tie_word_embeddings")),
        ("mistral", ("head_dim", "tie_word_embeddings")),
        ("qwen3", ("head_dim", "tie_word_embeddings")),
        ("gemma", ("head_dim", "tie_word_embeddings")),
        ("gemma2", ("head_dim", "num_key_value_heads")),
        ("gemma3_text", ("head_dim", "num_key_value_heads")),
        ("ministral3", ("head_dim", "tie_word_embeddings")),
        ("granite", ("num_key_value_heads",)),
        ("olmo2", ("num_key_value_heads",)),
        ("cohere", ("num_key_value_heads", "use_qk_norm")),
        ("glm4", ("head_dim", "num_key_value_heads")),
        ("phi3", ("num_key_value_heads",)),
        ("bert", ("max_position_embeddings", "type_vocab_size", "tie_word_embeddings")),
        ("gpt2", ("n_positions",)),
        ("t5", ("num_decoder_layers", "relative_attention_num_buckets")),
    ],
)
def test_a_silent_config_means_what_the_config_class_assumes(name, absent):
    config = {key: value for key, value in fixture(name).items() if key not in absent}
    assert describe_model(config).state() == state(on_meta(config))


def test_a_head_dim_of_null_is_the_hidden_size_by_the_heads():
    """As in vLLM's `get_head_size`; transformers builds no Qwen3 of such a config, whose class assumes 128."""
    config = fixture("qwen3", head_dim=None)
    share = config["hidden_size"] // config["num_attention_heads"]
    assert describe_model(config).tensors["model.layers.0.self_attn.q_norm.weight"].shape == (share,)
    del config["head_dim"]
    assert describe_model(config).tensors["model.layers.0.self_attn.q_norm.weight"].shape == (128,)


UPCAST_ON_LOADING = re.compile(r"\.gate\.weight$")
"""Routers, which transformers 5.24 keeps in fp32 once they are loaded; the files of these models hold them in bf16."""


@EACH.add()
def check_the_declared_dtype_is_the_one_transformers_would_use(name):
    config = fixture(name)
    kind = getattr(transformers, config["architectures"][0])
    real = kind._from_config(kind.config_class.from_dict(config), dtype=kind.config_class.from_dict(config).dtype)
    wide = re.compile("|".join(rf"(^|\.){part}($|\.)" for part in kind._keep_in_fp32_modules_strict or ("$^",)))
    model, usual = describe_model(config), dtype_of(real)
    whole = {name for name, tensor in real.state_dict().items() if not tensor.is_floating_point()}
    kept = {name for name, tensor in real.state_dict().items() if tensor.dtype == torch.float32}
    for tensor in model.own():
        if UPCAST_ON_LOADING.search(tensor.name):
            continue
        expected = (
            "I64" if tensor.name in whole else "F32" if wide.search(tensor.name) or tensor.name in kept else usual.name
        )
        assert tensor.dtype.name == expected, tensor.name


def test_every_class_exists_and_has_the_family_as_model_type_and_a_fixture_of_its_name(subtests):
    for family in BUILT:
        with subtests.test(family.name):
            for architecture in family.classes:
                assert getattr(transformers, architecture).config_class.model_type == family.name
            assert fixture(family.name)["model_type"] == family.name


def test_every_tensor_matches_exactly_one_row_and_every_row_is_used():
    used = set()
    blocks = fixture("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    inside = json.loads((CONFIGS.with_name("configs_hub") / "kimi_k3.json").read_text())["text_config"]
    for config in (*(fixture(name, architectures=[architecture]) for name, architecture in CASES), blocks, inside):
        model = describe_model(config)
        family = next(f for f in load_families() if f.name == model.family)
        base = rf"{re.escape(model.prefix)}\." if model.prefix else ""
        counted = family.facts(family.complete_config(ModelConfig(config))).indices
        numbers = {f"{{{index}}}": "|".join(map(str, counted[index].values)) for index in counted}
        patterns = [
            re.compile(
                base * row.name.startswith(".")
                + "".join(
                    f"(?:{numbers[part]})" if part in numbers else re.escape(part)
                    for part in re.split(r"(\{\w+\})", row.name.lstrip("."))
                )
            )
            for row in family.rows
        ]
        for tensor in (*model.tensors, *model.aliases):
            matches = [row for row, pattern in zip(family.rows, patterns, strict=True) if pattern.fullmatch(tensor)]
            # Of rows with one name and contrary conditions, the layer decides.
            used.add(model.tensors[tensor].row if len(matches) > 1 else matches[0])
            assert len({row.name for row in matches}) == 1, (model.architecture, tensor)
            assert len({row.when for row in matches}) == len(matches), (model.architecture, tensor)
    # What several tables share counts as used if one of them uses it.
    assert {row for family in BUILT for row in family.rows} == used


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
PUBLISHED = [
    (LLAMA_8B, 8_030_261_248),
    (
        {
            **LLAMA_8B,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
        70_553_706_496,
    ),
    (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        7_615_616_512,
    ),
    (
        {
            "architectures": ["MistralForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        7_241_732_096,
    ),
    (
        {
            "architectures": ["GemmaForCausalLM"],
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
        },
        8_537_680_896,
    ),
    (
        {
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
        },
        124_439_808,
    ),
    (
        {
            "architectures": ["BertModel"],
            "vocab_size": 30522,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
        109_482_240,
    ),
    (
        {
            "architectures": ["T5ForConditionalGeneration"],
            "vocab_size": 32128,
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 8,
        },
        60_506_624,
    ),
]


@pytest.mark.parametrize(("config", "parameters"), PUBLISHED, ids=lambda v: v if isinstance(v, int) else "")
def test_published_models_have_their_published_number_of_parameters(config, parameters):
    assert describe_model(config).parameters == parameters


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("bert", "BertModel"),
        ("gpt2", "GPT2LMHeadModel"),
        ("t5", "T5ForConditionalGeneration"),
    ],
)
def test_a_config_without_architectures_gets_the_usual_class(kind, architecture):
    config = fixture(kind)
    del config["architectures"]
    assert describe_model(config).architecture == architecture


def test_a_class_that_was_renamed_is_known_by_its_older_name():
    model = describe_model(fixture("t5", architectures=["T5WithLMHeadModel"]))
    assert model.architecture == "T5ForConditionalGeneration"


def test_an_unknown_architecture_is_named_and_rules_are_the_hint():
    with pytest.raises(UnsupportedError, match="NeverSeenForCausalLM") as caught:
        describe_model({"architectures": ["NeverSeenForCausalLM"], "model_type": "llama"})
    assert "--rules FILE" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"hidden_size": "32"}, "hidden_size = '32' where a positive whole number is expected"),
        ({"hidden_size": 1 << 50}, "hidden_size = "),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes' where true or false is expected"),
        ({"dtype": "float7"}, "dtype 'float7', which is not an element type"),
        ({"num_hidden_layers": 1 << 39}, "describes more than 500000 tensors"),
    ],
)
def test_a_damaged_config_is_refused_with_the_key(changes, message):
    with pytest.raises(SourceError, match=re.escape(message)):
        describe_model(fixture("llama", **changes))


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt2", "jamba", "qwen3_moe", "qwen3_next", "t5"])
def test_layers_without_number_are_refused_before_any_is_listed(name):
    counts = [key for key in fixture(name) if key.rpartition("_")[2] in {"layer", "layers"}]
    many = {key: 1 << 39 for key in counts if isinstance(fixture(name)[key], int)}
    began = time.process_time()
    with pytest.raises(SourceError, match=f"more than 500000 tensors: it has ({'|'.join(many)}) = "):
        describe_model(fixture(name, layer_types=None, **many))
    assert time.process_time() - began < 1


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "qwen3_moe"])
def test_experts_without_number_are_refused_before_any_is_described(name):
    many = {key: 1 << 39 for key in ("n_routed_experts", "num_local_experts", "num_experts") if key in fixture(name)}
    began = time.process_time()
    with pytest.raises(SourceError, match="more than 500000 tensors"):
        describe_model(fixture(name, **many))
    assert time.process_time() - began < 1


def test_a_hundred_thousand_tensors_are_described_within_a_second_or_so():
    began = time.process_time()
    model = describe_model({**LLAMA_8B, "num_hidden_layers": 10_000})
    assert len(model.tensors) > 100_000
    assert time.process_time() - began < 5  # a quarter of that where nothing else runs


def test_models_import_neither_numpy_nor_torch_nor_transformers():
    heavy = "{'numpy', 'torch', 'transformers', 'safetensors'}"
    code = f"import sys, shardctl.models; sys.exit(len({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", FIXTURES)
def test_each_config(name, subtests):
    EACH.run(subtests, name)
