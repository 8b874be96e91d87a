"""Stages as transformers divides them: each process of its pipeline has what one rank's files hold."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.distributed.pipeline_parallel import PipelineStage

from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.pieces import parse_stages
from shardctl.verbs.reshard import reshard

PROGRAM = """
import json, os, sys, torch, transformers
from transformers.distributed import DistributedConfig
path, rank, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
torch.distributed.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=2)
model = transformers.AutoModelForCausalLM.from_pretrained(
    path, distributed_config=DistributedConfig(pp_size=2), dtype=torch.float32
)
with torch.no_grad():
    said = model(torch.arange(8)[None]).logits
names = [name for name, _ in model.named_parameters()]
json.dump([names, said.tolist() if rank == 1 else []], open(f"{out}.{rank}", "w"))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_layers_are_divided_as_transformers_divides_them():
    for layers in range(1, 20):
        for count in range(1, layers + 1):
            stage = SimpleNamespace(pp_size=count)
            ranges = [PipelineStage.layer_range_for_rank(stage, rank, layers) for rank in range(count)]
            assert parse_stages("transformers", layers, count) == tuple(stop - start for start, stop in ranges)


def test_before_5_24_the_last_stage_had_all_that_is_left_over():
    """As `layer_range_for_rank` of transformers 5.23 had it: 32 layers on three stages were 10, 10 and 12."""
    assert parse_stages("transformers@5.23", 32, 3) == (10, 10, 12)
    assert parse_stages("transformers@5.24", 32, 3) == parse_stages("transformers", 32, 3) == (11, 11, 10)
    assert parse_stages("transformers@5.23", 30, 3) == parse_stages("transformers", 30, 3)


@pytest.mark.slow
def test_a_pipeline_of_two_processes_computes_what_the_model_does(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).float()
    model.save_pretrained(tmp_path / "source")
    options = ReshardOptions(mesh=Mesh.of(pp=2), stages="transformers")
    reshard(tmp_path / "source", tmp_path / "cut", options)
    held = [
        {name for path in (tmp_path / "cut").glob(f"shard-0000{rank}-*") for name in load_file(path)} for rank in (1, 2)
    ]
    assert sum(name.endswith("input_layernorm.weight") for name in held[0]) == 3
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    runs = [
        subprocess.Popen([sys.executable, program, tmp_path / "cut", str(rank), tmp_path / "said"]) for rank in range(2)
    ]
    assert [run.wait(300) for run in runs] == [0, 0]
    (first, _), (last, logits) = (json.loads((tmp_path / f"said.{rank}").read_text()) for rank in range(2))
    assert [set(first), set(last)] == held
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(logits), model(torch.arange(8)[None]).logits)
