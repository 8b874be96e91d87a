"""Stacks of experts in codes, as the Hub has Step-3.5 and 3.7's: each array of all experts of a layer in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_bits import bits

from shardctl.models import describe_model
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

CONFIG = json.loads((Path(__file__).parents[2] / "fixtures" / "configs_hub" / "step3p5.json").read_text())
BLOCK = 8
SPARED = ["lm_head", "self_attn", "mlp", "share_expert", "moe.gate"]
SETTINGS = {
    "blocks": {"weight_block_size": [BLOCK, BLOCK]},
    "one a weight": {},
}
"""What a config says of scales, by what they are."""


def round_to_codes(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and the numbers that they stand for."""
    *lead, rows, columns = weight.shape
    high, wide = (BLOCK, BLOCK) if kind == "blocks" else (rows, columns)
    blocks = weight.float().reshape(*lead, rows // high, high, columns // wide, wide)
    scale = blocks.abs().amax((-3, -1)) / 448
    spread = scale[..., :, None, :, None]
    codes = (blocks / spread).to(torch.float8_e4m3fn)
    numbers = (codes.float() * spread).reshape(weight.shape).bfloat16()
    return codes.reshape(weight.shape), scale if kind == "blocks" else scale[:, 0, 0].contiguous(), numbers


@pytest.fixture(scope="module", params=SETTINGS)
def stacked(request, tmp_path_factory):
    """A model with stacks in fp8, one with the same stacks as numbers, and the arrays of both."""
    layers = {"num_nextn_predict_layers": 0, "layer_types": CONFIG["layer_types"][:4]}
    config = {**CONFIG, "attention_bias": False, **layers}
    model, generator = describe_model(config), torch.Generator().manual_seed(3)
    plain = {t.name: torch.randn(t.shape, generator=generator).bfloat16() for t in model.own() if not t.row.buffer}
    stacks = {name: fusion.tensors for name, fusion in model.fusions.items() if ".moe." in name}
    inside = {name for names in stacks.values() for name in names}
    coded, numbers = ({name: t for name, t in plain.items() if name not in inside} for _ in range(2))
    ending = "_scale_inv" if request.param == "blocks" else "_scale"
    for name, names in stacks.items():
        codes, scale, meant = round_to_codes(torch.stack([plain[n] for n in names]), request.param)
        coded |= {name: codes, f"{name}{ending}": scale}
        numbers[name] = meant
    folder = tmp_path_factory.mktemp("stacked")
    settings = {"quant_method": "fp8", "modules_to_not_convert": SPARED, **SETTINGS[request.param]}
    for kind, arrays, said in (("coded", coded, {"quantization_config": settings}), ("numbers", numbers, {})):
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps(config | said))
        save_file(arrays, folder / kind / "model.safetensors", {"format": "pt"})
    assert len(stacks) == 6
    return folder, coded, numbers


def assert_same(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = load_file(path / "model.safetensors")
    assert found.keys() == wanted.keys()
    unlike = [n for n, t in wanted.items() if found[n].dtype != t.dtype or bits(found[n]) != bits(t)]
    assert unlike == []


@pytest.mark.parametrize("kind", ["coded", "numbers"])
def test_stacks_come_back_as_they_were(kind, stacked, tmp_path):
    reshard(stacked[0] / kind, tmp_path / "hf", ReshardOptions(to="hf"))
    assert_same(tmp_path / "hf", stacked[1] if kind == "coded" else stacked[2])
    for label, mesh in (("tp", Mesh.of(tp=2)), ("ep", Mesh.of(dp=2, ep=2))):
        made = reshard(stacked[0] / kind, tmp_path / label, ReshardOptions(mesh=mesh))
        assert made.record.digest == digest(stacked[0] / kind).digest
        assert verify(tmp_path / label, VerifyOptions(against=stacked[0] / kind)).ok


def test_codes_become_the_numbers_that_they_stand_for(stacked, tmp_path):
    folder, _, numbers = stacked
    reshard(folder / "coded", tmp_path / "hf", ReshardOptions(to="hf", dtype="bf16"))
    assert_same(tmp_path / "hf", numbers)
    made = reshard(folder / "coded", tmp_path / "tp", ReshardOptions(mesh=Mesh.of(tp=2), dtype="bf16"))
    assert made.record.digest == digest(folder / "numbers").digest


def test_a_plan_counts_what_is_stored(stacked):
    folder, coded, _ = stacked
    assert plan(folder / "coded").weight_bytes == sum(array.nbytes for array in coded.values())
