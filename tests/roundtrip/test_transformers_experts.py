"""Experts as transformers divides them with ep_size: each process holds what the files of its rank hold."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

PROGRAM = """
import json, os, sys, torch, transformers
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.distributed import DistributedConfig
path, rank, out, how = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
torch.distributed.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=2)
model = transformers.AutoModelForCausalLM.from_pretrained(
    path, distributed_config=DistributedConfig(**how), dtype=torch.float32
)
held, whole = {}, {}
for name, tensor in model.state_dict().items():
    assert isinstance(tensor, DTensor), name
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    held[name] = [list(offset), list(shape)]
    whole[name] = tensor.full_tensor()
json.dump(held, open(f"{out}.{rank}", "w"))
torch.save(whole, f"{out}.{rank}.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "how", "local"),
    [
        (Mesh.of(fsdp=2, ep=2), {"fsdp_size": 2, "ep_size": 2}, True),
        (Mesh.of(fsdp=2), {"fsdp_size": 2}, False),
    ],
    ids=["ep2", "fsdp2"],
)
def test_processes_hold_what_the_files_of_ranks_hold(tmp_path, mesh, how, local):
    torch.manual_seed(1)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG)).float().save_pretrained(tmp_path / "source")
    reshard(tmp_path / "source", tmp_path / "cut", ReshardOptions(mesh=mesh))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    runs = [
        subprocess.Popen([sys.executable, program, tmp_path / "cut", str(rank), tmp_path / "said", json.dumps(how)])
        for rank in range(2)
    ]
    assert [run.wait(300) for run in runs] == [0, 0]
    reshard(tmp_path / "source", tmp_path / "fused", ReshardOptions(to="hf", experts="fused"))
    source = load_file(tmp_path / "fused/model.safetensors")
    for rank in range(2):
        whole = torch.load(tmp_path / f"said.{rank}.pt")
        assert whole.keys() == source.keys()
        assert all(torch.equal(whole[name], source[name]) for name in source)
        held = json.loads((tmp_path / f"said.{rank}").read_text())
        stored = list_stored_boxes(tmp_path / "cut", rank)
        own = {name: box for name, box in held.items() if [box] == stored.get(name)}
        others = {name for name in held if name not in own}
        assert others == (set() if local else {name for name in held if "experts" in name})


def list_stored_boxes(folder, rank):
    """Of each array the boxes in the files of a rank: where they begin, and their shapes."""
    boxes = {}
    for path in sorted(folder.glob(f"shard-{rank + 1:05d}-*")):
        with safe_open(path, "pt") as file:
            info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 - not a dict
                boxes.setdefault(name, []).append([info[name]["saved_offsets"], file.get_slice(name).get_shape()])
    return boxes
