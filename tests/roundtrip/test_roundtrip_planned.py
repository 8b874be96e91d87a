"""What `plan` says of ranks that a rule file cuts, and of MXFP4 blocks, is what `reshard` writes, byte for byte."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import config_of, stored

from shardctl.models import describe_model
from shardctl.options import PlanOptions, ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard

RULES = """
[rules]
"blocks.*.up.weight" = [["tp", "fsdp"], ""]
"blocks.*.down.weight" = ["fsdp", "tp"]
"embed.weight" = [["tp", "fsdp"], ""]
"**" = []

[layers]
pattern = "blocks.*"
last = ["out.**"]
"""


def written(file):
    """Bytes of the tensors in a safetensors file, by the format's own description."""
    with file.open("rb") as data:
        entries = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    entries.pop("__metadata__", None)
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values())


def assert_planned(source, target, mesh, source_options=None):
    """Of meshes without dp and cp, so that each rank has files of its own."""
    reshard_options = ReshardOptions(mesh=mesh)
    planned = plan(source, reshard_options, source_options=source_options, plan_options=PlanOptions(use="serve"))
    reshard(source, target, reshard_options, source_options=source_options)
    for rank in planned.ranks:
        files = [target / name for name in rank.files]
        assert rank.file_bytes == sum(file.stat().st_size for file in files)
        assert rank.weight_bytes == sum(map(written, files)), rank.label
    assert sorted(name for rank in planned.ranks for name in rank.files) == sorted(
        file.name for file in target.glob("*.safetensors")
    )
    assert planned.conversion.write_bytes == sum(
        file.stat().st_size for file in target.iterdir() if file.name != "shardctl.json"
    )


@pytest.mark.parametrize("text", ["tp=2,pp=2", "tp=2,fsdp=3", "pp=3"])
def test_a_rule_file_is_planned_as_it_is_cut(tmp_path, text):
    source = tmp_path / "source"
    source.mkdir()
    tensors = {"embed.weight": torch.randn(10, 6), "embed.scale": torch.tensor(0.5), "out.weight": torch.randn(10, 6)}
    for layer in range(5):
        tensors[f"blocks.{layer}.up.weight"] = torch.randn(8, 7).bfloat16()
        tensors[f"blocks.{layer}.down.weight"] = torch.randn(7, 8).half()
        tensors[f"blocks.{layer}.count"] = torch.tensor(layer)
    save_file(tensors, source / "model.safetensors")
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    assert_planned(source, tmp_path / "ranks", Mesh.parse(text), SourceOptions(rules=rules))


@pytest.mark.parametrize("text", ["tp=2,ep=2", "tp=2,etp=2", "fsdp=2,tp=2,ep=4"])
def test_mxfp4_blocks_and_scales_are_planned_as_they_are_written(tiny, tmp_path, text):
    config = {**config_of("gpt_oss"), "quantization_config": {"quant_method": "mxfp4"}}
    made = {
        t.name: torch.randint(0, 256, t.shape, dtype=torch.uint8)
        for t in describe_model(config).own()
        if t.name.endswith(("_blocks", "_scales"))
    }
    others = {n: t for n, t in stored(tiny("gpt_oss").path).items() if not n.endswith(("gate_up_proj", "down_proj"))}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file({**others, **made}, source / "model.safetensors", {"format": "pt"})
    assert_planned(source, tmp_path / "ranks", Mesh.parse(text))
