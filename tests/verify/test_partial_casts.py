"""A tensor that went through a narrower type alone is an error; a cast of the whole model without a record is not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.models import describe_model
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.record import RECORD
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

CONFIG = Path(__file__).parents[2] / "fixtures" / "configs" / "mixtral.json"
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A Mixtral of two layers in fp32."""
    place = tmp_path_factory.mktemp("whole") / "source"
    place.mkdir()
    config = {**json.loads(CONFIG.read_text()), "dtype": "float32"}
    generator = torch.Generator().manual_seed(0)
    tensors = {t.name: torch.randn(t.shape, generator=generator) for t in describe_model(config).own()}
    save_file(tensors, place / FILE, {"format": "pt"})
    (place / "config.json").write_text(json.dumps(config))
    return place


def cast(whole, place, pattern, dtype=torch.bfloat16):
    """Cast the tensors whose names have a pattern, as any tool might, and write no record."""
    place.mkdir()
    tensors = load_file(whole / FILE)
    chosen = [name for name in tensors if re.search(pattern, name)]
    assert chosen
    save_file({n: t.to(dtype) if n in chosen else t for n, t in tensors.items()}, place / FILE, {"format": "pt"})
    (place / "config.json").write_text((whole / "config.json").read_text())
    return place


def find_errors(place, whole):
    found = verify(place, VerifyOptions(level="full", against=whole))
    return [each for each in found.findings if each.severity == "error"]


@pytest.mark.parametrize(
    "pattern",
    [
        r"layers\.0\.self_attn\.q_proj",
        r"lm_head",
        r"embed_tokens|lm_head",
        r"norm",
        r"layers\.1\.",
        r"experts\.gate_up_proj|experts.*\.(w1|w3)\.",
    ],
    ids=["one tensor", "the head", "embedding and head", "every norm", "one layer", "half of the experts"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_part_that_was_rounded_is_an_error(whole, tmp_path, pattern, dtype):
    errors = find_errors(cast(whole, tmp_path / "cast", pattern, dtype), whole)
    assert [each.check for each in errors] == ["cast"]
    assert "were rounded to" in errors[0].message
    assert re.search(pattern, errors[0].tensor)


@pytest.mark.parametrize("kept", [r"(?!)", r"norm", r"norm|gate\.weight|lm_head"], ids=["all", "norms", "and others"])
def test_a_cast_of_the_whole_model_is_a_warning(whole, tmp_path, kept):
    place = cast(whole, tmp_path / "cast", rf"^(?!.*({kept}))")
    assert not find_errors(place, whole)


def test_a_tensor_of_another_type_than_the_rest_of_a_cast_is_an_error(whole, tmp_path):
    place = cast(whole, tmp_path / "cast", ".")
    tensors = load_file(place / FILE)
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name] = load_file(whole / FILE)[name].half()
    save_file(tensors, place / FILE, {"format": "pt"})
    assert [each.tensor for each in find_errors(place, whole) if each.check == "cast"] == [name]


def test_a_wider_type_loses_nothing_and_a_recorded_cast_explains_what_it_kept(whole, tmp_path):
    half = cast(whole, tmp_path / "half", ".")
    wide = cast(half, tmp_path / "wide", r"lm_head", torch.float32)
    assert not find_errors(wide, half)
    reshard(whole, tmp_path / "out", ReshardOptions(dtype="bf16", keep_fp32=r"norm|v_proj"))
    assert not find_errors(tmp_path / "out", whole)
    (tmp_path / "out" / RECORD).unlink()
    assert not find_errors(tmp_path / "out", whole)
