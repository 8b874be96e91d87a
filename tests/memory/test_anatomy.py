"""What the layers of every family are made of, against the tables' own tensors and transformers' configs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from family_checks import FamilyChecks
from transformers.cache_utils import get_layer_types_and_kwargs

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.estimate.model.layer_graph import LayerAttention, LayerExperts, LayerScan, LayerState, build_layer_graph
from shardctl.models import describe_model, load_families

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
FIXTURES = sorted(path.stem for path in CONFIGS.glob("*.json"))
FAMILY = {family.name: family for family in load_families()}


def fixture(name, **changes):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    inner = (
        config.get("text_config") if changes and FAMILY[config["model_type"]].name not in {"clip", "siglip"} else None
    )
    if inner is None:
        return {**config, **changes}
    return {**config, "text_config": {**inner, **changes}}


EACH = FamilyChecks()


@EACH.add(lambda name: [{"architecture": cls} for cls in FAMILY[fixture(name)["model_type"]].classes])
def check_every_class_has_the_pipeline_layers_of_its_model(name, architecture):
    config = fixture(name, architectures=[architecture])
    assert len(build_layer_graph(config).layers) == describe_model(config).layers


def matrices(layer):
    """Elements of the projections of a layer, by its anatomy."""
    h, found = layer.hidden, 0
    if layer.attention is not None:
        one = layer.attention
        attention = h * one.heads * (one.head_dim + one.value_dim) + h * one.kv_heads * (one.head_dim + one.value_dim)
        found += attention * (2 if one.cross else 1)
    each = (3 if layer.gated else 2) * h
    found += each * layer.mlp
    if layer.experts is not None:
        experts = layer.experts
        routed = 2 * h * experts.width if experts.width else each * experts.count * experts.size  # or the latent's two
        found += routed + each * experts.shared + experts.count * h
    return found


_BESIDE = re.compile(r"bias|\.ada_rms_norm\.|\.index_[qk]+_proj|\.pos_(key_|query_|q_|)proj")
"""Tensors that the matrices of a layer do not count: biases, what chooses the tokens that are attended to, what
scores words against relative positions, and what makes a scale of a delay (Voxtral Realtime)."""


@EACH.add(lambda n: [] if n.startswith(("mamba", "falcon_mamba", "gemma3n", "gemma4", "jetmoe")) else [{}])
def check_layers_have_the_elements_that_their_tensors_have(name):
    """The tensors' shapes are those of transformers' state dicts (tests/models/test_families.py)."""
    config = fixture(name)
    layers = build_layer_graph(config).layers
    found = [0] * len(layers)
    for tensor in describe_model(config).own():
        (where, number), *_ = tensor.spec.where
        hidden = layers[number].hidden if where == "layer" and not tensor.row.on else 0
        if (
            hidden in tensor.shape
            and len(tensor.shape) > 1
            and min(tensor.shape) > 1
            and not _BESIDE.search(tensor.name)
        ):
            found[number] += prod(tensor.shape)
    for layer, elements in zip(layers, found, strict=True):
        if layer.state is not None or (layer.attention is not None and layer.attention.latent):
            continue
        one = layer.attention
        gate = layer.hidden * one.heads * one.head_dim if one is not None and one.gated else 0
        assert elements == matrices(layer) + gate


WINDOWED = [
    "cohere2", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "llama4_text", "ministral", "ministral3", "mistral",
    "mistral3", "mixtral", "olmo3", "phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3",
    "qwen3_moe", "starcoder2",
]  # fmt: skip
CHANGES = [
    {},
    {"sliding_window": 7, "attention_chunk_size": 9, "sliding_window_pattern": 3, "no_rope_layer_interval": 3},
    {"sliding_window": None},
    {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
    {"sliding_window": 16, "use_sliding_window": False, "no_rope_layers": [1, 0] * 6},
    {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 6},
]


ALWAYS_WINDOWED = {"cohere2", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "olmo3"}
"""Families of whose configs transformers cannot make a cache if the window is null."""
ONE_KIND = {"llama4_text", "mistral", "mistral3", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Families whose classes do not take kinds of layers, or call the windowed one something else."""


@pytest.mark.parametrize("name", [*WINDOWED, "llama", "cohere", "olmo2", "granite", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "-".join(changes) or "silent")
def test_windows_are_those_of_the_caches_that_transformers_would_make(name, changes):
    ignored = {"layer_types"} if name in ONE_KIND else set()
    if name != "llama4_text":
        ignored.add("attention_chunk_size")
    if name not in WINDOWED or (name in ALWAYS_WINDOWED and "sliding_window" in changes and len(changes) == 1):
        ignored |= set(changes)
    asked = {key: value for key, value in changes.items() if key not in ignored}
    config = fixture(name, **{"num_hidden_layers": 12, "layer_types": None, **asked})
    kind = getattr(transformers, config["architectures"][0]).config_class
    theirs = kind.from_dict(json.loads(json.dumps(config))).get_text_config(decoder=True)
    _, options = get_layer_types_and_kwargs(theirs)
    expected = [option.get("sliding_window") or None for option in options]
    assert [layer.attention.window for layer in build_layer_graph(config).layers] == expected


@EACH.add()
def check_models_that_generate_are_those_that_transformers_lets_generate(name):
    config = fixture(name)
    kind = getattr(transformers, config["architectures"][0])
    assert build_layer_graph(config).generates == kind.can_generate()


def test_what_encoders_and_decoders_are():
    t5 = build_layer_graph(fixture("t5"))
    assert [layer.encoder for layer in t5.layers] == [True, True, False, False, False]
    assert [layer.attention.cross for layer in t5.layers] == [False, False, True, True, True]
    assert len(build_layer_graph(fixture("t5", architectures=["T5EncoderModel"])).layers) == 2
    assert all(layer.encoder for name in ("bert", "vit", "clip") for layer in build_layer_graph(fixture(name)).layers)
    assert build_layer_graph(fixture("whisper")).source_positions == 32
    assert build_layer_graph(fixture("whisper")).positions == 16


@EACH.add()
def check_query_heads_are_those_of_the_config(name):
    """By transformers' attribute, whose spellings differ between config classes."""
    config = fixture(name)
    kind = getattr(transformers, config["architectures"][0]).config_class.from_dict(config)
    texts = kind.get_text_config()
    counts = {one.attention.heads for one in build_layer_graph(config).layers if one.attention is not None}
    assert counts <= {texts.num_attention_heads} if counts else not hasattr(texts, "num_attention_heads")


def test_several_blocks_in_a_layer_are_not_counted_as_one():
    assert len(build_layer_graph(fixture("albert")).layers) == 2
    with pytest.raises(UnsupportedError, match="several blocks in a layer"):
        build_layer_graph(fixture("albert", inner_group_num=2))


def test_the_text_model_decides_about_windows():
    """LLaVA 1.6 around Mistral; its own default is Llama, which has none."""
    changes = {"model_type": "mistral", "sliding_window": 4096}
    assert [one.attention.window for one in build_layer_graph(fixture("llava_next", **changes)).layers] == [4096] * 2
    assert [one.attention.window for one in build_layer_graph(fixture("llava_next", sliding_window=4096)).layers] == [
        None
    ] * 2


def test_codes_in_blocks_are_the_same_layers():
    """gpt-oss as the Hub has it: its experts' matrices are four-bit codes, in tensors of other shapes."""
    config = fixture("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    assert build_layer_graph(config) == build_layer_graph(fixture("gpt_oss"))
    assert all(layer.gated for layer in build_layer_graph(config).layers)


@EACH.add(lambda name: [] if name.startswith("t5") else [{}])
def check_heads_are_tied_that_transformers_ties(name):
    """But for T5, which transformers 5 always declares tied (tests/models/test_families.py)."""
    config = fixture(name)
    kind = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(config))
    theirs = model.get_output_embeddings() is not None and bool(model.all_tied_weights_keys)
    assert build_layer_graph(config).tied == theirs


def test_hybrids_by_layer():
    """Of DeepSeek-V3 one dense layer, of Qwen3-Next two kinds of attention, of Jamba Mamba and attention in turn."""
    latent = LayerAttention("latent", 4, 4, 12, 8, latent=16, query_rank=12, key_rank=12)
    assert [(one.attention, one.mlp, one.experts) for one in build_layer_graph(fixture("deepseek_v3")).layers] == [
        (latent, 48, None),
        (latent, 0, LayerExperts(4, 2, 16, shared=32)),
    ]
    full, rule = LayerAttention("full", 4, 2, 8, 8), LayerScan("delta", 48, heads=8, key_heads=4)
    delta = LayerState(channels=80, grouped=0, groups=1, window=4, recurrent=8 * 4 * 6, recurrent_fp32=True, scan=rule)
    assert [(one.attention, one.state) for one in build_layer_graph(fixture("qwen3_next")).layers] == [
        (None, delta), (replace(full, gated=True), None), (None, delta),
    ]  # fmt: skip
    scan = LayerScan("normed selective", 64, rank=4)
    mamba = LayerState(channels=64, grouped=0, groups=1, window=4, recurrent=64 * 8, recurrent_fp32=True, scan=scan)
    assert [(one.attention, one.state) for one in build_layer_graph(fixture("jamba-moe")).layers] == [
        (None, mamba), (full, None), (None, mamba), (full, None),
    ]  # fmt: skip
    chunks = LayerScan("chunked", 64, heads=4, chunk=256)
    assert build_layer_graph(fixture("mamba2")).layers[0].state == LayerState(
        64, 64, 4, 4, 64 * 8, recurrent_fp32=True, scan=chunks
    )


@pytest.mark.parametrize(
    "name", [n for n in FIXTURES if "num_experts_per_tok" in fixture(n) and not n.startswith("deepseek_v2")]
)
def test_a_silent_config_sends_each_token_to_as_many_experts_as_its_class_assumes(name):
    config = {key: value for key, value in fixture(name).items() if key != "num_experts_per_tok"}
    assumed = getattr(transformers, config["architectures"][0]).config_class().num_experts_per_tok
    if assumed is None:  # dots.llm1
        with pytest.raises(UnsupportedError, match="does not say how many experts a token goes to"):
            build_layer_graph(config)
        return
    assert {one.experts.chosen for one in build_layer_graph(config).layers if one.experts} == {assumed}


def test_what_no_family_knows_is_refused_with_a_hint():
    with pytest.raises(UnsupportedError, match="the layers of XYZForCausalLM are not known") as raised:
        build_layer_graph({"architectures": ["XYZForCausalLM"]})
    assert "weights are counted exactly" in raised.value.hint


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, "where a list of 2 kinds is expected"),
        ("llama", {"layer_types": ["sliding_attention"] * 2}, "layers of type 'sliding_attention'"),
        ("gemma2", {"layer_types": ["full_attention", "lightning"]}, "layers of type 'lightning'"),
        ("mistral", {"sliding_window": -3}, "sliding_window = -3"),
        ("llama4_text", {"no_rope_layers": [1]}, "where a list of 2 marks is expected"),
        ("llama", {"num_hidden_layers": 1 << 39}, "layers"),
    ],
)
def test_a_config_that_is_not_sound_is_refused(name, changes, error):
    with pytest.raises(SourceError, match=error):
        build_layer_graph(fixture(name, **changes))


def test_without_a_number_of_experts_for_each_token_only_the_weights_are_known():
    """DeepSeek-V2's class assumes null, which its modules can be built of, but not run."""
    config = fixture("deepseek_v2", num_experts_per_tok=None)
    with pytest.raises(UnsupportedError, match="how many experts a token goes to"):
        build_layer_graph(config)
    assert describe_model(config).parameters == describe_model(fixture("deepseek_v2")).parameters


def test_it_takes_milliseconds_and_nothing_heavy():
    config = fixture("deepseek_v3", num_hidden_layers=61, n_routed_experts=256)
    build_layer_graph(config)
    start = time.process_time()
    assert len(build_layer_graph(config).layers) == 61
    assert time.process_time() - start < 0.1
    script = (
        "import sys, shardctl.estimate.model.layer_graph, shardctl.estimate.serving.rank_serving;"
        "assert not {'numpy', 'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", FIXTURES)
def test_each_config(name, subtests):
    EACH.run(subtests, name)
