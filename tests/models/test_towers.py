"""Towers under tp: whole in tables, and in plans of serving cut as vLLM cuts them."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from shardctl.models import describe_model
from shardctl.options import PlanOptions, ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import compute_rank_boxes
from shardctl.verbs.plan import plan

FIXTURES = Path(__file__).parents[2] / "fixtures"
COUNTED = json.loads((FIXTURES / "vllm" / "towers.json").read_text())
SEEING = {"paligemma": {"vision_use_head": False}, "llama4": {"projector_input_dim": 24}}
LEFT_OUT = {"llava": ".post_layernorm.", "gemma4": ".std_"}
"""What vLLM does not build, or has as buffers."""
DATA_MODE = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"}
"""Those that vLLM holds whole with ``--mm-encoder-tp-mode data``; of Llama 4 it cuts what joins pictures to text."""


def config_of(name: str) -> dict:
    config = json.loads((FIXTURES / "configs" / f"{name}.json").read_text())
    if name in COUNTED:
        config["vision_config"] |= SEEING.get(name, {})
    return config


def count(name: str, mesh: Mesh, *, cut: bool) -> int:
    """The elements on rank 0 outside of the text model."""
    model = describe_model(config_of(name), kv_heads="replicate", cut_towers=cut)
    return sum(
        prod(box.shape)
        for tensor in model.own()
        if not {"language_model", "lm_head"} & {*tensor.name.split(".")}
        and LEFT_OUT.get(name, "?") not in tensor.name
        and not tensor.row.buffer
        for box in compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(0))
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", COUNTED)
def test_a_cut_tower_has_as_many_elements_as_in_vllm(name, tp):
    assert count(name, Mesh.of(tp=tp), cut=True) == COUNTED[name]["weights"][str(tp)]
    if name in DATA_MODE:
        assert count(name, Mesh.of(tp=tp), cut=False) == COUNTED[name]["data"][str(tp)]
    elif name != "llama4":  # vLLM has no such mode for them
        assert COUNTED[name]["data"] == COUNTED[name]["weights"]


def planned(name: str, place: Path, **options: object):
    (place / "config.json").write_text(json.dumps(config_of(name)))
    to = options.pop("to", None)
    mesh = options.pop("mesh", Mesh.of(tp=2))
    return plan(place, ReshardOptions(mesh=mesh, to=to), plan_options=PlanOptions(**options))


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "mistral3", "llava-pixtral", "llama4"])
def test_a_plan_of_serving_counts_what_a_rank_of_vllm_has(name, tmp_path):
    cut, whole = (planned(name, tmp_path, towers=towers).ranks[0].weight_bytes for towers in (None, "whole"))
    one, two = (count(name, Mesh.of(tp=tp), cut=True) for tp in (1, 2))
    assert whole - cut == 2 * (one - two) > 0


@pytest.mark.parametrize(
    ("name", "options", "begins", "has"),
    [
        (
            "qwen3_vl",
            {},
            "visual.** is cut",
            "91.3 KiB on each rank, of 0.2 MiB; --encoder-tp replicate counts it",
        ),
        (
            "qwen3_vl",
            {"towers": "whole"},
            "visual.** is taken to be whole",
            "0.2 MiB on each, as in vLLM with",
        ),
        ("qwen3_vl", {"use": "train"}, "visual.** is taken to be whole", "on each, as in training"),
        ("qwen3_vl", {"to": "ranks"}, "visual.** is taken to be whole", "on each, as --to ranks writes it"),
        (
            "gemma3",
            {"towers": "replicate"},
            "vision_tower.** is taken to be whole",
            "as --encoder-tp asks; vLLM cuts it",
        ),
        ("gemma4", {}, "vision_tower.** is taken to be whole", "40.2 KiB on each, as in vLLM"),
        ("mllama", {}, "vision_model.** is taken to be whole", "because how engines cut it is not known"),
    ],
)
def test_a_plan_says_what_a_rank_has_of_a_tower(name, options, begins, has, tmp_path):
    (line,) = (line for line in planned(name, tmp_path, **options).warnings if "**" in line)
    assert line.startswith(begins)
    assert has in line


def test_stages_need_no_word_about_towers(tmp_path):
    assert not any("**" in line for line in planned("qwen3_vl", tmp_path, mesh=Mesh.of(pp=2)).warnings)


def test_a_tower_that_a_mesh_cannot_divide_is_whole(tmp_path):
    config = config_of("qwen3_vl")
    config["vision_config"]["intermediate_size"] = 50
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan(tmp_path, ReshardOptions(mesh=Mesh.of(tp=4)))
    said = (
        "because vLLM cannot split model.visual.blocks.0.mlp.linear_fc1.weight [50, 32] over tp=4: 50 rows or columns"
    )
    assert [line for line in found.warnings if said in line and line.endswith("needs --mm-encoder-tp-mode data")]
