"""Quantized models as they were published are planned at the size that their own files imply, from configs alone."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import pytest

from shardctl.base.errors import PartitionError, UsageError
from shardctl.models import describe_model
from shardctl.options import PlanOptions, ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs_quantized"
NVFP4 = 1 / 2 + 1 / 16
"""Bytes of an element: half a byte, and a scale of one byte for each 16."""


def config_of(name):
    return json.loads((CONFIGS / f"{name}_config.json").read_text())


def plain_tensors(name):
    """The tensors before quantization, by their names."""
    config = {key: value for key, value in config_of(name).items() if key != "quantization_config"}
    return {t.name: t for t in describe_model(config).own()}


def count(name, excluded, each, whole):
    """Bytes where linear weights of layers take `each` an element and `whole` besides, but for `excluded` ones."""
    total = 0.0
    for tensor in plain_tensors(name).values():
        module = tensor.name.removesuffix(".weight")
        parts = module.split(".")
        around = [".".join(parts[: n + 1]) for n in range(len(parts))]
        linear = len(tensor.shape) == 2 and ".layers." in module and not module.endswith("mlp.gate")
        left = any(fnmatchcase(one, pattern) for one in around for pattern in excluded)
        size = prod(tensor.shape)
        total += size * each + whole if linear and not left else size * tensor.dtype.bits / 8
    return total


@pytest.mark.parametrize(
    ("name", "each", "whole", "gigabytes"),
    [
        ("deepseek-v3.1-nvfp4", NVFP4, 4, 386.4),
        ("qwen3-235b-a22b-nvfp4", NVFP4, 4, 134.1),
        ("llama-3.1-70b-fp8", 1, 4, 72.7),
        ("qwen3-32b-fp8", 1, 4, 34.3),
    ],
)
def test_modelopts_have_the_size_that_their_lists_imply(name, each, whole, gigabytes):
    sidecar = json.loads((CONFIGS / f"{name}_hf_quant_config.json").read_text())["quantization"]
    found = inspect(CONFIGS / f"{name}_config.json")
    assert found.nbytes == count(name, sidecar["exclude_modules"], each, whole)
    assert round(found.nbytes / 1e9, 1) == gigabytes


def test_gpt_oss_has_its_experts_in_four_bits():
    found = inspect(CONFIGS / "gpt-oss-120b_config.json")
    layers, experts, size = 36, 128, 2880
    assert (
        sum(share.nbytes for share in found.dtypes if share.dtype == "U8") == layers * experts * 3 * size**2 * 17 // 32
    )
    assert round(found.nbytes / 1e9, 1) == 65.2


@pytest.mark.parametrize(
    ("sizes", "published"),
    [
        ({}, 65_248_815_744),
        ({"num_hidden_layers": 24, "num_local_experts": 32}, 13_761_264_768),
    ],
    ids=["gpt-oss-120b", "gpt-oss-20b"],
)
def test_gpt_oss_has_to_the_byte_the_size_that_its_index_states(tmp_path, sizes, published):
    """`total_size` in `model.safetensors.index.json` of openai/gpt-oss-120b and openai/gpt-oss-20b on the Hub."""
    config = config_of("gpt-oss-120b") | sizes
    if sizes and "layer_types" in config:
        config["layer_types"] = config["layer_types"][: sizes["num_hidden_layers"]]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert inspect(tmp_path / "config.json").nbytes == published


@pytest.mark.parametrize(("name", "group"), [("deepseek-v4-flash", 32), ("deepseek-v4-flash-nvfp4", 16)])
def test_experts_of_deepseek_v4_have_four_bits_beside_fp8(name, group):
    found = inspect(CONFIGS / f"{name}_config.json")
    layers, experts, hidden, inner = 43, 256, 4096, 2048
    codes = sum(share.nbytes for share in found.dtypes if share.dtype in ("I8", "U8"))
    assert codes == layers * experts * 3 * hidden * inner // 2
    scale = next(t for t in found.tensors if "experts.0.w1" in t.name and t.name.endswith("scale"))
    assert scale.shape == (inner, hidden // group)


def test_a_degree_that_its_blocks_do_not_allow_is_refused_with_those_that_they_do():
    """The shared experts' 2048 outputs and inputs are 16 blocks of 128 in DeepSeek-V3; 18432 are 144."""
    config = CONFIGS.parent / "configs_public" / "deepseek-v3.json"
    with pytest.raises((UsageError, PartitionError), match="blocks of 128") as caught:
        plan(config, ReshardOptions(mesh=Mesh.of(tp=32)), plan_options=PlanOptions(use="serve"))
    assert "16" in f"{caught.value} {caught.value.hint}"
