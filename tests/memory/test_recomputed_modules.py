"""What Megatron-LM's `--recompute-modules` leave of a layer: measured differences, and what the source says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.estimate.model.layer_graph import LayerGraph, build_layer_graph
from shardctl.estimate.model.rank_shards import RankShards
from shardctl.estimate.training.activations import RankActivations
from shardctl.estimate.training.recomputed_modules import count_module_operations
from shardctl.estimate.workload import TrainingWorkload
from shardctl.options import PlanOptions, ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.plan import plan

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
ONE = Mesh.of()


def activations(model: LayerGraph, *modules: str, tokens: int = 64, mesh: Mesh = ONE, **options: object):
    if modules:
        options |= {"recompute": "selective", "recompute_modules": modules}
    work = TrainingWorkload(tokens, **{"profile": "megatron", "dropout": False, **options})
    layers = len(model.layers)
    holding = RankShards(0, mesh.label(0), mesh.coordinate(0), 1, 0, range(layers), ())
    return RankActivations(model, holding, mesh, work, (layers,))


def kept(*args: object, **options: object) -> float:
    """Of all layers, in bytes."""
    return sum(kind.nbytes * len(kind.numbers) for kind in activations(*args, **options).kinds)


def build(name: str) -> LayerGraph:
    return build_layer_graph(json.loads((CONFIGS / f"{name}.json").read_text()))


NEMOTRON_3_NANO = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 2688,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1856,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "vocab_size": 131072,
    "mlp_hidden_act": "relu2",
    "tie_word_embeddings": False,
}


def test_nemotron_3_nano_keeps_as_much_less_as_nvidia_measured():
    # github.com/NVIDIA-NeMo/Megatron-Bridge, skills/nemo-mbridge-perf-activation-recompute (2026-08-12), 16 H100, 8,192
    # tokens, ep8, rank 0, in GB: moe_act 66.297 - 62.103 after the first iteration; layernorm beside moe 64.653 -
    # 63.639 after the second. Only experts have a norm that is a module.
    nemotron = build_layer_graph(NEMOTRON_3_NANO)
    options = {"tokens": 8192, "mesh": Mesh.of(dp=8, ep=8)}
    less = kept(nemotron, **options) - kept(nemotron, "moe_act", **options)
    assert less / 1e9 == pytest.approx(66.297 - 62.103, rel=0.002)
    less = kept(nemotron, "moe", **options) - kept(nemotron, "moe", "layernorm", **options)
    assert less / 1e9 == pytest.approx(64.653 - 63.639, rel=0.002)


def test_each_module_drops_what_it_makes_and_keeps_its_input():
    model = build("deepseek_v3")
    layer = model.layers[-1]
    attention, experts, n, width = layer.attention, layer.experts, 64, 2
    assert model.layers[0].experts is None
    sparse = sum(one.experts is not None for one in model.layers)
    whole = kept(model)

    def less(*modules: str) -> float:
        return whole - kept(model, *modules)

    assert less("moe_act") == n * experts.chosen * experts.size * width * sparse
    assert less("shared_experts") == 3 * n * experts.shared * width * sparse
    assert less("mlp") == sum(n * (3 * one.mlp + one.hidden) * width for one in model.layers if one.experts is None)
    assert less("layernorm") == n * layer.hidden * width * (sparse + len(model.layers))
    heads = attention.heads * (2 * attention.head_dim + attention.value_dim)
    latents = attention.query_rank + attention.key_rank
    rotary = attention.latent - attention.key_rank
    assert less("mla_up_proj") == n * (heads + latents - rotary) * width * len(model.layers)
    # All of the experts, the router and the shared ones, and nothing twice.
    assert less("moe") > less("moe_act") + less("shared_experts")
    assert less("moe", "moe_act", "shared_experts") == less("moe")
    assert less("moe", "layernorm") == less("moe") + less("layernorm")


def test_norms_in_the_kernel_of_a_projection_are_no_modules_of_their_own():
    # Llama 3 70B on H100: layernorm beside core_attn measured no less (Megatron Bridge, pull request 3107).
    model = build("llama")
    assert kept(model, "layernorm") == kept(model)
    assert kept(model, "mlp") < kept(model)


def test_an_output_that_was_freed_is_there_twice_when_it_was_computed_again():
    model = build("deepseek_v3")
    layer = model.layers[-1]
    routed = 64 * layer.experts.chosen * layer.experts.size * 2

    def worst(*modules: str) -> float:
        return activations(model, *modules).kind_of[len(model.layers) - 1].worst[1].nbytes

    assert worst("moe_act") == worst() + 2 * routed
    assert worst("shared_experts") == worst() + 3 * 64 * layer.experts.shared * 2


def test_what_is_not_known_is_refused():
    with pytest.raises(UnsupportedError, match="cp ranks may"):
        kept(build("deepseek_v3"), "mla_up_proj", mesh=Mesh.of(cp=2))
    with pytest.raises(UnsupportedError, match="not fused may"):
        kept(build("deepseek_v3"), "mla_up_proj", attention="eager")
    with pytest.raises(UnsupportedError, match="it has 4 norms"):
        kept(build("gemma2"), "mlp")


def test_operations_that_run_again_are_those_of_the_matrices():
    layer = build("deepseek_v3").layers[-1]
    one, experts = layer.attention, layer.experts
    shared = 2 * 10 * 3 * layer.hidden * experts.shared
    assert count_module_operations((layer,), ONE, 10, ("shared_experts",)) == shared
    routed = 2 * 10 * 3 * layer.hidden * experts.size * experts.chosen
    assert count_module_operations((layer,), ONE, 10, ("moe", "shared_experts")) == shared + routed
    up = 4 * 12 * one.query_rank + 4 * (8 + 8) * one.key_rank  # 4 heads of 8 elements, 4 with positions, and values
    assert count_module_operations((layer,), Mesh.of(tp=2), 10, ("mla_up_proj",)) == 10 * up
    assert count_module_operations((layer,), ONE, 10, ("core_attn", "moe_act", "layernorm", "mlp")) == 0


def plan_llama(**options: object):
    asked = PlanOptions(use="train", seq_len=64, **options)
    return plan(CONFIGS / "llama.json", ReshardOptions(), plan_options=asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "selective"}, "Megatron-LM's selective"),
        ({"profile": "megatron", "recompute": "full"}, "Megatron-LM's selective"),
        ({"profile": "megatron"}, "Megatron-LM's selective"),
        ({"profile": "megatron", "recompute": "selective", "recompute_modules": "mlp,moes"}, "does not know 'moes'"),
    ],
)
def test_modules_need_megatron_and_names(options, message):
    with pytest.raises(UsageError, match=message):
        plan_llama(**{"recompute_modules": "mlp", **options})


def test_a_plan_says_which_module_changes_nothing():
    options = {"profile": "megatron", "recompute": "selective"}
    planned = plan_llama(recompute_modules="moe_act, mlp", **options)
    assert planned.forecast.work.recompute_modules == ("moe_act", "mlp")
    said = [warning for warning in planned.warnings if "--recompute" in warning]
    assert said == ["--recompute-modules moe_act changes nothing: no layer of this model has what it drops"]
    planned = plan_llama(recompute_modules="core_attn,mlp", **options)
    assert any("core_attn drops almost nothing" in warning for warning in planned.warnings)
