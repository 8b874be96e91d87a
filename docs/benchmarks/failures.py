"""What the usual tools and shardctl do with a damaged checkpoint; prints a Markdown table.

python docs/benchmarks/failures.py WORKDIR

Each row damages a fresh copy of a tiny checkpoint; each column loads or converts it and says `error` (good),
or `accepted` with what came of the damaged tensor.
"""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

NAME = "model.layers.1.mlp.up_proj.weight"


def flip(path):
    """Flip one bit in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 0x10
    path.write_bytes(data)


def truncate(path):
    """Cut off the last bytes."""
    path.write_bytes(path.read_bytes()[:-64])


DAMAGES = {
    "a rank file is missing": lambda root: (root / "shard-00001-model-00001-of-00001.safetensors").unlink(),
    "one bit is flipped": lambda root: flip(root / "shard-00001-model-00001-of-00001.safetensors"),
    "a file is cut short": lambda root: truncate(root / "shard-00001-model-00001-of-00001.safetensors"),
}


def transformers(root, truth):
    """from_pretrained."""
    state = AutoModelForCausalLM.from_pretrained(root).state_dict()
    return difference(state, truth)


def consolidate(root, truth):
    """torch's own consolidation of such files."""
    out = root.parent / "consolidated"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    consolidate_safetensors_files(str(root), str(out), dict.fromkeys(truth, 1))
    state = {}
    for file in out.glob("*.safetensors"):
        state.update(load_file(file))
    return difference(state, truth)


def shardctl(root, _truth):
    """verify, level full."""
    command = [sys.executable, "-m", "shardctl", "verify", str(root), "--level", "full", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode else "accepted, and right"


def difference(state, truth):
    """How a loaded state differs from the true one."""
    wrong = [n for n in truth if n not in state or not torch.equal(state[n].float(), truth[n].float())]
    if not wrong:
        return "accepted, and right"
    zero = sum(1 for n in wrong if n in state and (state[n] == 0).any())
    return f"accepted: {len(wrong)} of {len(truth)} tensors wrong" + (f", {zero} with zeros" if zero else "")


def main():
    """Make the checkpoint, damage it, try every tool."""
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    root = Path(sys.argv[1])
    shutil.rmtree(root, ignore_errors=True)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(root / "src")
    truth = model.state_dict()
    reshard(root / "src", root / "ranks", ReshardOptions(mesh=Mesh.of(tp=2, pp=2)))
    tools = {"transformers `from_pretrained`": transformers, "torch `consolidate`": consolidate, "`shardctl`": shardctl}
    rows = {}
    for what, damage in {"nothing (control)": lambda _: None, **DAMAGES}.items():
        for tool, call in tools.items():
            copy = root / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(root / "ranks", copy)
            damage(copy)
            try:
                answer = call(copy, truth)
            except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is one
                answer = f"refused ({type(error).__name__})"
            rows[what, tool] = answer or "refused, place named"
    print("| damage | " + " | ".join(tools) + " |\n|---" * 1 + "|---" * len(tools) + "|")
    for what in ("nothing (control)", *DAMAGES):
        print(f"| {what} | " + " | ".join(rows[what, tool] for tool in tools) + " |")
    print(json.dumps({"torch": torch.__version__}))


if __name__ == "__main__":
    main()
