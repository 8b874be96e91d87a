"""What a model would be in another type is what a checkpoint in that type has, byte for byte."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from known_models import DEEPSEEK_V3, LLAMA_3_8B, LLAMA_3_70B, MIXTRAL_8X7B, stock

from shardctl.base.errors import PartitionError, UsageError
from shardctl.estimate.model.narrower_types import TYPES, is_linear, narrow_inventory
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.tensors.mesh import Mesh

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


def tiny(config, **more):
    return {
        **config,
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "intermediate_size": 1280,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        **more,
    }


TINY = {
    "llama": tiny(LLAMA_3_8B),
    "mixtral": tiny(MIXTRAL_8X7B, num_local_experts=4),
    "deepseek": tiny(
        DEEPSEEK_V3,
        num_key_value_heads=8,
        first_k_dense_replace=1,
        n_routed_experts=8,
        moe_intermediate_size=256,
        q_lora_rank=256,
        kv_lora_rank=128,
        n_group=1,
        topk_group=1,
    ),
}


def arrays(inventory):
    """How many arrays there are of each shape and width; a config leaves open which half type scales have."""
    found = Counter()
    for kind in inventory.kinds:
        found[kind.shape, kind.dtype.bits] += kind.count
    return found


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize(("name", "settings"), [("fp8", FP8), ("int4", GPTQ)])
def test_it_has_the_bytes_of_a_checkpoint_that_is_quantized_so(model, name, settings):
    real = stock({**TINY[model], "quantization_config": settings})
    modelled = narrow_inventory(stock(TINY[model]), name)
    assert modelled.nbytes == real.nbytes
    assert modelled.elements == real.elements
    assert arrays(modelled) == arrays(real)


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("text", ["tp=2", "fsdp=3", "pp=2,tp=2", "dp=2,tp=2,ep=4", "fsdp=2,tp=2,ep=2"])
@pytest.mark.parametrize(("name", "settings"), [("fp8", FP8), ("int4", GPTQ)])
def test_and_every_rank_has_them(model, text, name, settings):
    real = stock({**TINY[model], "quantization_config": settings})
    modelled = narrow_inventory(stock(TINY[model]), name)
    mesh = Mesh.parse(text)
    stages = (1, 1) if mesh.degree("pp") == 2 else (2,)
    try:
        expected = [one.nbytes for one in list_rank_shards(real, mesh, stages)]
    except PartitionError:
        with pytest.raises(PartitionError):
            list_rank_shards(modelled, mesh, stages)
        return
    assert [one.nbytes for one in list_rank_shards(modelled, mesh, stages)] == expected


def test_a_model_in_four_bits_is_about_a_quarter():
    inventory = stock(LLAMA_3_70B)
    sizes = {name: narrow_inventory(inventory, name).nbytes / 1e9 for name in TYPES}
    assert sizes["bf16"] == sizes["fp16"] == inventory.nbytes / 1e9 == pytest.approx(141.1, abs=0.1)
    assert sizes["fp32"] == pytest.approx(282.2, abs=0.1)
    assert sizes["fp8"] == pytest.approx(72.7, abs=0.1)
    assert sizes["int8"] == pytest.approx(72.7, abs=0.1)
    # As the GPTQ and AWQ checkpoints of it on the Hub: 39.8 GB.
    assert sizes["int4"] == pytest.approx(39.8, abs=0.5)


@pytest.mark.parametrize(
    ("config", "stays"),
    [
        ("mixtral", {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.block_sparse_moe.gate.weight"}),
        ("deepseek_v3", {"model.layers.1.mlp.gate.weight"}),
        ("gpt_oss", {"model.layers.0.mlp.router.weight"}),
        ("llama4_text", {"model.layers.1.feed_forward.router.weight"}),
        ("qwen2_moe", {"model.layers.1.mlp.shared_expert_gate.weight"}),
        ("mamba", {"backbone.layers.0.mixer.conv1d.weight", "backbone.layers.0.mixer.A_log"}),
        ("t5", {"encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "shared.weight"}),
        ("whisper", {"model.decoder.embed_tokens.weight"}),
        ("vit", {"vit.embeddings.patch_embeddings.projection.weight"}),
    ],
)
def test_what_is_no_linear_weight_of_a_layer_stays(config, stays):
    inventory = stock(json.loads((CONFIGS / f"{config}.json").read_text()))
    kept = {kind.example for kind in narrow_inventory(inventory, "int8").kinds} & {k.example for k in inventory.kinds}
    assert {k.example for k in inventory.kinds if not is_linear(k)} <= kept
    assert stays <= kept
    assert any(is_linear(k) for k in inventory.kinds)


def test_stacks_of_experts_are_quantized_each_for_itself():
    inventory = stock(json.loads((CONFIGS / "gpt_oss.json").read_text()))
    stack = next(k for k in inventory.kinds if k.example.endswith("experts.down_proj"))
    found = [k for k in narrow_inventory(inventory, "fp8").kinds if k.example.startswith(stack.example + ".")]
    assert [k.shape for k in found] == [stack.shape, (stack.shape[0], 1, 1)]
    assert list_rank_shards(narrow_inventory(inventory, "fp8"), Mesh.parse("dp=2,ep=2"), (inventory.layers,))


def test_nothing_of_it_is_trained():
    assert not any(k.trainable for k in narrow_inventory(stock(TINY["llama"]), "int8").kinds if "proj" in k.example)
    floats = narrow_inventory(stock(TINY["llama"]), "fp32")
    assert all(k.trainable for k in floats.kinds)


def test_what_is_quantized_is_not_estimated_in_another_type():
    quantised = stock({**TINY["llama"], "quantization_config": GPTQ})
    with pytest.raises(UsageError, match=r"q_proj.qweight is I32") as error:
        narrow_inventory(quantised, "fp8")
    assert "quantized from" in error.value.hint


def test_an_unknown_type_lists_those_there_are():
    with pytest.raises(UsageError, match="unknown type 'int3'") as error:
        narrow_inventory(stock(TINY["llama"]), "int3")
    assert error.value.hint == "use fp32, fp16, bf16, fp8, int8, nf4, int4"


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("fp8", 1280 * 512 + 4 * 10 * 4),
        ("int8", 1280 * 512 + 4 * 1280),
        ("int4", 1280 * 512 // 2 + 4 * (1280 // 2 + 2 * 1280)),
    ],
)
def test_one_weight_has_the_bytes_of_the_formula(name, nbytes):
    up = "model.layers.0.mlp.gate_proj"
    inventory = stock(TINY["llama"])
    weight = next(k for k in inventory.kinds if k.example == f"{up}.weight")
    assert weight.shape == (1280, 512)
    found = [k for k in narrow_inventory(inventory, name).kinds if k.example.startswith(up)]
    assert sum(k.count * k.dtype.nbytes(k.shape) for k in found) == weight.count * nbytes
