"""What a tensor costs besides its bytes: resharding checkpoints of very many very small tensors.

python docs/benchmarks/many.py WORKDIR
"""

import json
import shutil
import sys
import time
from pathlib import Path

import generate

from shardctl.api import Mesh, ReshardOptions, plan, reshard

TINY = json.loads((Path(__file__).parents[2] / "fixtures/configs/deepseek_v3.json").read_text())
"""The real model's names and experts, with shapes made up."""


def main():
    """DeepSeek-V3 with 256 experts and more and more layers: 10,000 to 94,000 tensors, for ep2."""
    root = Path(sys.argv[1])
    reshard_options = ReshardOptions(mesh=Mesh.of(dp=2, ep=2), experts="split", host_memory=4 << 30)
    print("| tensors | plan, s | microseconds a tensor | reshard, s | microseconds a tensor |\n|---|---|---|---|---|")
    for layers in (14, 40, 121):
        shutil.rmtree(root, ignore_errors=True)
        generate.config = lambda _, layers=layers: {**TINY, "num_hidden_layers": layers, "n_routed_experts": 256}
        generate.generate(root / "src")
        began = time.perf_counter()
        plan(root / "src", reshard_options)
        planned = time.perf_counter()
        tensors = len(reshard(root / "src", root / "out", reshard_options).record.tensors)
        done = time.perf_counter()
        times = [planned - began, done - planned]
        print(f"| {tensors:,} |" + "".join(f" {t:.1f} | {t / tensors * 1e6:.0f} |" for t in times), flush=True)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
