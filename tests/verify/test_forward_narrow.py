"""In bf16 and fp16 sound models of many layers are far from the bounds, and faults smaller than rounding are found."""

from __future__ import annotations

import shutil

import pytest
from forward_models import config_of, cut, run, save, values

from shardctl.tensors.mesh import Mesh

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
LAYER = "model.layers.11"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Gives a Llama of many layers and its ranks, each made once."""
    base = tmp_path_factory.mktemp("narrow")

    def give(layers, name="llama"):
        whole, shards = base / f"{name}-{layers}", base / f"{name}-{layers}-ranks"
        if not whole.exists():
            save(whole, config_of(name, **({"num_hidden_layers": layers, **SIZES} if layers else {})))
            cut(whole, shards, Mesh.of(tp=2))
        return whole, shards

    return give


@pytest.mark.parametrize("layers", [24, 48])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sound_models_of_many_layers_stay_under_a_third_of_the_bounds(made, layers, dtype):
    result = run(*made(layers), dtype=dtype)
    assert result.status == "passed", result.findings
    assert 0 < result.worst.error < result.tolerance.block / 3
    assert 0 < result.output_error < result.tolerance.logits / 3
    assert result.share.own == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_class_with_biases_of_sums_has_the_criterion_too(made, dtype):
    result = run(*made(0, "gpt2"), dtype=dtype)
    assert result.status == "passed", result.findings
    assert 0 < result.output_error < result.tolerance.logits / 3


def exchange_rows(shards):
    part = values(shards, f"{LAYER}.self_attn.v_proj.weight", 1)
    part[[2, 3]] = part[[3, 2]]


def scale_norm(shards):
    for rank in (0, 1):
        values(shards, f"{LAYER}.post_attention_layernorm.weight", rank)[...] *= 1.5


def exchange_heads(shards):
    part = values(shards, f"{LAYER}.self_attn.q_proj.weight", 1)
    part[:16] = part[:16].reshape(2, 8, -1)[::-1].reshape(16, -1).copy()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fault", [exchange_rows, scale_norm, exchange_heads])
def test_a_fault_in_one_of_many_layers_is_found(made, tmp_path, fault, dtype):
    whole, shards = made(24)
    shutil.copytree(shards, tmp_path / "broken")
    fault(tmp_path / "broken")
    result = run(whole, tmp_path / "broken", dtype=dtype)
    assert result.status == "failed"
    assert {finding.tensor for finding in result.findings if finding.tensor} == {LAYER}
