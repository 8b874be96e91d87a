"""Every family's kept bytes, layer by layer, are those that autograd saves of transformers' layers.

Compared is what each further sequence adds to a layer, to the byte. What does not depend on their number is left out:
copies of a norm's weights, tables of rotary positions that a layer makes itself, T5's biases of positions. Left out too
is what routers note of their choice: of a token, some numbers for each expert.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import torch
import transformers
from family_checks import FamilyChecks
from model_oracle import BUILT, FIXTURES, fixture
from saved_bytes import SavedTensor, ask, build_model, gpu_autocast, layer_paths, list_saved

from shardctl.base.errors import UnsupportedError
from shardctl.estimate.model.layer_graph import LayerGraph, build_layer_graph
from shardctl.estimate.model.rank_shards import RankShards
from shardctl.estimate.model.sizes import Size
from shardctl.estimate.training.activations import RankActivations
from shardctl.estimate.training.saved_activations import Flag
from shardctl.estimate.workload import AttentionKernel, Precision, TrainingWorkload
from shardctl.tensors.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.estimate.workload import Recompute
KINDS: Final[tuple[AttentionKernel, ...]] = get_args(AttentionKernel)
TOKENS: Final = 40
ROUTING: Final = {"router", "chosen"}

TWO_LENGTHS = "its two towers, or encoder and decoder, have other numbers of tokens"
NOT_COUNTED: Final[Mapping[str, str]] = {
    "clip": TWO_LENGTHS,
    "siglip": TWO_LENGTHS,
    "whisper": TWO_LENGTHS,
}
"""Fixtures that cannot be compared, with the reason."""
OWN_CLASS: Final = {"falcon", "falcon-rw", "gpt_neo", "gptj"}
"""Fixtures whose FlashAttention is a class of its own, which needs its package."""
SCANS: Final = {"short", "delta", "channel delta", "chunked", "stepwise"}
"""Recurrent layers that have no kernel, or of which a stand-in keeps what it does."""
OTHER_KERNELS: Final = "a selective scan keeps what its kernel saves; test_activations_recurrent.py compares those"
NOT_KNOWN: Final[Mapping[str, str]] = {
    "big_bird": "sparse blocks of attention",
    "deberta": "in fp32 only",
    "longt5": "attention to what is near",
    "longt5-summary": "attention to what is near",
}
"""Fixtures of which `plan` says that it does not know what training keeps, with a part of what it says."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny products: with several threads on a busy machine they mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def describe(name: str) -> dict[str, Any]:
    """The config of a fixture, with room for the tokens, and no layer that is dropped whole."""
    config = fixture(name)
    for key in ("max_position_embeddings", "max_target_positions"):
        if isinstance(config.get(key), int):
            config[key] = max(64, config[key])
    if "zero_expert_num" in config:  # how many tokens go to idle experts is a router's choice
        config["zero_expert_num"] = 0
    return config | {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


def estimate(
    anatomy: LayerGraph,
    kind: AttentionKernel,
    batch: int,
    precision: Precision = "bf16",
    recompute: Recompute = "none",
) -> list[float]:
    """What the estimate says that each layer keeps, less routing."""
    vision = not anatomy.vocabulary and anatomy.positions
    work = TrainingWorkload(
        anatomy.positions if vision else TOKENS,
        batch,
        profile="hf",
        attention=kind,
        precision=precision,
        recompute=recompute,
    )
    whole = Mesh.of()
    holding = RankShards(0, "", whole.coordinate(0), 1, 0, range(len(anatomy.layers)), ())
    found = RankActivations(anatomy, holding, whole, work, (len(anatomy.layers),))
    return [
        sum(
            width * count
            for amount in found.kind_of[number].kept.values()
            for name, width, count in amount.factors
            if name not in ROUTING
        )
        for number in range(len(anatomy.layers))
    ]


def is_routing(saved: SavedTensor) -> bool:
    """Whether a tensor says to which experts tokens go, and with which weights."""
    notes = not saved.dtype.is_floating_point and saved.dtype != torch.bool
    if "Experts" in saved.kind or re.search("Mo[eE](Attention)?$", saved.kind):
        return notes or saved.shape[-1] == 1
    router = re.search(r"Router|SqrtSoftplus|(?<!Forget)Gate$|TopK|DbrxFFN", saved.kind)
    return router is not None and (not saved.dtype.is_floating_point or saved.shape[-1] < TOKENS // 2)


def measure(model: torch.nn.Module, paths: list[str], batch: int, *, replaced: bool = True) -> list[int]:
    """What autograd saves of each layer, less routing."""
    saved = [one for one in list_saved(model, paths, batch, TOKENS, replaced=replaced) if not is_routing(one)]
    return [sum(one.nbytes for one in saved if one.layer == number) for number in range(len(paths))]


def build_or_skip(name: str, kind: AttentionKernel) -> tuple[torch.nn.Module, dict[str, Any]]:
    if kind == "flash" and name in OWN_CLASS:
        pytest.skip(f"{name}'s class for FlashAttention needs its package")
    config = describe(name)
    model = build_model(config, kind)
    if model is None:
        pytest.skip(f"transformers has no {kind} attention for {name}")
    return model, config


EACH = FamilyChecks()
RUNNABLE = [n for n in FIXTURES if n not in {*NOT_COUNTED, *NOT_KNOWN, "llama4"}]
"""Without the wrapper of Llama 4, for which transformers 5.24 reads `image_outputs` of an output that has none."""


@EACH.add(lambda _: [{"kind": kind} for kind in KINDS])
def check_layers_keep_what_autograd_saves(name, kind):
    torch.manual_seed(0)
    model, config = build_or_skip(name, kind)
    anatomy, paths = build_layer_graph(config), layer_paths(config)
    mixes = [layer.state is None or layer.state.scan.kind in SCANS for layer in anatomy.layers]
    few, more = (estimate(anatomy, kind, batch) for batch in (2, 4))
    some, many = (measure(model, paths, batch) for batch in (2, 4))
    expected = [b - a for a, b, counted in zip(some, many, mixes, strict=True) if counted]
    assert [b - a for a, b, counted in zip(few, more, mixes, strict=True) if counted] == expected
    assert any(mixes) or name in STATES_ONLY


OTHER_SIZES: Final[tuple[tuple[str, Mapping[str, object]], ...]] = (
    ("deepseek_v4", {"hc_mult": 4, "hc_sinkhorn_iters": 3}),
    ("hy_v4", {"hc_mult": 4, "v_head_dim": 6}),
    ("glm5_next", {"text_config": {"hc_mult": 3, "hc_sinkhorn_iters": 7, "linear_lower_bound": None}}),
    ("minimax_m3_vl_text", {"index_block_size": 7}),
    ("bitnet", {"num_key_value_heads": 4}),
    ("recurrent_gemma", {"lru_width": 48, "conv1d_width": 6, "attention_window_size": 16}),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "changed"), OTHER_SIZES, ids=lambda one: one if isinstance(one, str) else "")
def test_layers_of_other_sizes_keep_what_autograd_saves(name, changed, kind, monkeypatch):
    """With sizes that are not each other's multiples, and a number of tokens that no rate of compression divides."""
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", 39)
    torch.manual_seed(0)
    config = describe(name)
    for key, value in changed.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    model, anatomy, paths = build_model(config, kind), build_layer_graph(config), layer_paths(config)
    if model is None:
        pytest.skip(f"transformers has no {kind} attention for {name}")
    few, more = (estimate(anatomy, kind, batch) for batch in (2, 4))
    some, many = (measure(model, paths, batch) for batch in (2, 4))
    assert [b - a for a, b in zip(few, more, strict=True)] == [b - a for a, b in zip(some, many, strict=True)]


STATES_ONLY: Final = {"mamba", "falcon_mamba"}
"""Every layer has a recurrent state: """ + OTHER_KERNELS


OTHERWISE_CAST: Final[Mapping[str, float]] = {
    "albert": 0.06,
    "apertus": 0.06,
    "bailing_hybrid": 0.01,
    "deberta-v2": 0.03,
    "electra": 0.14,
    "ernie4_5_moe": 0.03,
    "exaone4": 0.08,
    "falcon-rw": 0.18,
    "gemma3n_text": 0.12,
    "gemma4": 0.05,
    "gemma4-audio": 0.04,
    "gemma4_text": 0.04,
    "gemma4_text-moe": 0.05,
    "gemma4_unified_text": 0.04,
    "glm4": 0.08,
    "glm4-predicting": 0.08,
    "gpt2-cross-untied": 0.04,
    "gpt_neo": 0.05,
    "gpt_oss": 0.02,
    "gptj": 0.05,
    "hunyuan_v1_dense": 0.06,
    "hunyuan_v1_moe": 0.05,
    "hyperclovax": 0.08,
    "jetmoe": 0.09,
    "llama4": 0.07,
    "llama4_text": 0.08,
    "longcat_flash": 0.08,
    "mimo_v2_flash": 0.03,
    "nemotron_h": 0.06,
    "persimmon": 0.21,
    "phi": 0.09,
    "qwen4_exp": 0.15,
    "qwen4_exp_text": 0.15,
    "stablelm": 0.09,
    "voxtral_realtime": 0.04,
}
"""Fixtures whose layers keep something else under autocast than the estimate says, and by how much of it at most."""


@EACH.add(lambda _: [{"kind": kind} for kind in ("sdpa", "eager")])
def check_layers_keep_what_autograd_saves_under_autocast(name, kind):
    torch.manual_seed(0)
    config = describe(name)
    model, anatomy, paths = build_model(config, kind, torch.float32), build_layer_graph(config), layer_paths(config)
    if model is None:
        pytest.skip(f"transformers has no {kind} attention for {name}")
    if name == "dbrx":
        pytest.skip("its experts add bf16 to fp32 under autocast, which torch refuses")
    with gpu_autocast():
        some, many = (measure(model, paths, batch) for batch in (2, 4))
    few, more = (estimate(anatomy, kind, batch, "mixed") for batch in (2, 4))
    for number, layer in enumerate(anatomy.layers):
        if layer.state is None:
            near = OTHERWISE_CAST.get(name, 0)
            assert more[number] - few[number] == pytest.approx(many[number] - some[number], rel=near, abs=0)


@pytest.mark.parametrize("name", RUNNABLE)
def test_each_config(name, subtests):
    EACH.run(subtests, name)


@pytest.mark.parametrize("name", ["llama", "deepseek_v4", "glm5_next", "hy_v4", "qwen4_exp", "gemma3n_text"])
def test_layers_that_are_computed_again_keep_their_input(name):
    config = describe(name)
    model, anatomy = build_model(config, "eager"), build_layer_graph(config)
    given = []
    for path in layer_paths(config):
        model.get_submodule(path).register_forward_pre_hook(lambda _, args: given.append(args[0].nbytes))
    model(**ask(model, 2, TOKENS))
    assert estimate(anatomy, "eager", 2, recompute="full") == given


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_is_not_known_is_said(name):
    anatomy = build_layer_graph(describe(name))
    with pytest.raises(UnsupportedError, match=NOT_KNOWN[name]):
        estimate(anatomy, "eager", 2)


def test_what_kimi_k3_keeps_is_not_known():
    anatomy = build_layer_graph(fixture("kimi_linear") | {"routed_expert_hidden_size": 16})
    with pytest.raises(UnsupportedError, match="parts of Kimi-K3 that transformers has no class for"):
        estimate(anatomy, "eager", 2)


def test_families_that_transformers_attends_eagerly_for_say_so(subtests):
    configs = {config["model_type"]: config for config in map(fixture, reversed(FIXTURES))}
    for family in BUILT:
        with subtests.test(family.name):
            cls = getattr(transformers, next(iter(family.classes)))
            eager = not (cls._supports_sdpa or cls._supports_flash_attn)
            anatomy = build_layer_graph(configs[family.name])
            assert anatomy.style.unfused == (eager and any(layer.attention for layer in anatomy.layers))


def test_what_families_keep_besides_is_counted_by_what_estimates_know():
    for one in (one for family in BUILT if family.traits for one in family.traits.further):
        assert one.size in get_args(Size), one
        assert {*one.given} <= {*get_args(Flag)}, one


def test_every_family_that_transformers_builds_is_compared_or_named():
    assert {family.name for family in BUILT} == {fixture(name)["model_type"] for name in FIXTURES}
    assert {*NOT_COUNTED, *NOT_KNOWN, *STATES_ONLY} <= {*FIXTURES}
    assert NOT_COUNTED.keys().isdisjoint(NOT_KNOWN)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "deepseek_v3"])
def test_the_fused_kernel_of_a_cpu_keeps_what_its_stand_in_does(name):
    model, config = build_or_skip(name, "sdpa")
    if name == "deepseek_v3":  # for values as wide as keys
        model, config = build_model(config | {"v_head_dim": 12}, "sdpa"), config | {"v_head_dim": 12}
    paths = layer_paths(config)
    assert measure(model, paths, 2) == measure(model, paths, 2, replaced=False)
