"""Time and memory of getting the model out of training checkpoints, beside the trainers' own tools; prints Markdown.

python docs/benchmarks/training.py WORKDIR [--gigabytes 4] [--runs 1] [--deepspeed PYTHON]

A distributed checkpoint of two FSDP ranks, and a ZeRO-3 directory of two, whose optimizer states are holes in the
files: nobody reads them. PYTHON is one that can import deepspeed; without it its tool is left out. Every contender
starts with the source in the page cache, ends with `sync`, and runs in turn with the others.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from generate import config, generate
from reshard import print_table, run

import shardctl
from shardctl.api import Mesh, ReshardOptions, reshard
from shardctl.base.dtype import BY_NAME
from shardctl.libraries.torch_save.item_writer import build_archive, build_tensor_value
from shardctl.libraries.torch_save.pickle_writer import PickleCall, PickleName
from shardctl.models import describe_model

RANKS = 2
FLOAT, HALF = BY_NAME["F32"], BY_NAME["BF16"]
HF = [sys.executable, "-m", "shardctl", "reshard", "{src}", "{dst}", "--to", "hf", "--memory", "256MiB"]
TORCH = """
import os, sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
os.makedirs(sys.argv[2])
dcp_to_torch_save(sys.argv[1], sys.argv[2] + "/model.pt")
"""
DEEPSPEED = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], max_shard_size=None)
"""
COPY = ["cp", "-r", "{src}", "{dst}"]


def zero3(root, gigabytes):
    """A ZeRO-3 directory with so many GB of fp32 master weights, as DeepSpeed's `_rigid_state_dict` lays them out."""
    folder = root / "global_step1"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step1")
    shapes = {tensor.name: tensor.shape for tensor in describe_model(config(gigabytes / 2)).own()}
    length = sum(-(-int(np.prod(shape)) // RANKS) for shape in shapes.values())
    noise = np.random.default_rng(0).standard_normal(1 << 24, dtype=np.float32).tobytes()
    sizes = {name: PickleCall(PickleName("torch", "Size"), (shape,)) for name, shape in shapes.items()}
    model = {
        "module": dict.fromkeys(shapes, build_tensor_value(HALF, (0,))),
        "buffer_names": [],
        "param_shapes": [sizes],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        "global_steps": 1,
        "dp_world_size": RANKS,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    state = {
        "step": build_tensor_value(FLOAT, (), 0),
        "exp_avg": build_tensor_value(FLOAT, (length,), 1),
        "exp_avg_sq": build_tensor_value(FLOAT, (length,), 2),
    }
    optimizer = {
        "zero_stage": 3,
        "partition_count": RANKS,
        "optimizer_state_dict": {"state": {0: state}, "param_groups": [{"lr": 0.001, "params": [0]}]},
        "fp32_flat_groups": [build_tensor_value(FLOAT, (length,), 3)],
    }
    for rank in range(RANKS):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        place(folder / f"{name}_model_states.pt", build_archive(model, [0]))
        item = build_archive({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}, [4, *3 * [4 * length]])
        path = folder / f"bf16_{name}_optim_states.pt"
        place(path, item)
        with path.open("r+b") as file:
            file.seek(item.starts[3])
            for at in range(0, 4 * length, len(noise)):
                file.write(noise[: 4 * length - at])


def place(path, item):
    """A file with everything but the bytes of its tensors, which are holes."""
    with path.open("wb") as file:
        file.truncate(item.size)
        for offset, data in item.literals:
            file.seek(offset)
            file.write(data)


def dcp(root, gigabytes):
    """A distributed checkpoint of two FSDP ranks."""
    generate(root.with_name("hf"), gigabytes)
    reshard(root.with_name("hf"), root, ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=RANKS)))
    shutil.rmtree(root.with_name("hf"))


def data(path):
    """The stretches of a file that are not holes."""
    with path.open("rb") as file:
        at = 0
        while at < path.stat().st_size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                return
            end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            yield path, at, end
            at = end


def warm(src):
    """Read everything, so that it is in the page cache; returns its bytes."""
    stretches = [stretch for path in sorted(src.rglob("*")) if path.is_file() for stretch in data(path)]
    for path, begin, end in stretches:
        with path.open("rb") as file:
            file.seek(begin)
            while file.tell() < end:
                file.read(min(1 << 24, end - file.tell()))
    return sum(end - at for _, at, end in stretches)


def compare(title, src, contenders, runs, work):
    """All contenders in turn, `runs` times."""
    nbytes = warm(src)
    found = {name: [] for name in contenders}
    for _ in range(runs):
        for name, command in contenders.items():
            found[name].append(run(command, src, work / "out", warm))
    print(f"\n{title}, {nbytes / 1e9:.2f} GB\n")
    print_table(found, nbytes)
    sys.stdout.flush()


def main():
    """Parse the arguments and run."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("workdir", type=Path)
    options.add_argument("--gigabytes", type=float, default=4)
    options.add_argument("--runs", type=int, default=1)
    options.add_argument("--deepspeed", metavar="PYTHON", default=sys.executable)
    given = options.parse_args()
    given.workdir.mkdir(parents=True, exist_ok=True)
    ours = "`shardctl reshard --to hf --memory 256MiB`"
    print(f"shardctl {shardctl.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, Linux")
    print(f"load before it began: {os.getloadavg()[0]:.1f}")
    for title, make, name, command in (
        ("DCP, 2 ranks, bf16", dcp, "torch `dcp_to_torch_save`", [sys.executable, "-c", TORCH]),
        ("ZeRO-3, 2 ranks, fp32", zero3, "DeepSpeed `zero_to_fp32`", [given.deepspeed, "-c", DEEPSPEED]),
    ):
        src = given.workdir / make.__name__
        shutil.rmtree(src, ignore_errors=True)
        make(src, given.gigabytes)
        contenders = {ours: HF, "`cp -r`": COPY, name: [*command, "{src}", "{dst}"]}
        probe = [given.deepspeed, "-c", "import deepspeed"]
        if make is zero3 and subprocess.run(probe, check=False, capture_output=True).returncode:
            del contenders[name]
        compare(title, src, contenders, given.runs, given.workdir)
        shutil.rmtree(src)


if __name__ == "__main__":
    main()
