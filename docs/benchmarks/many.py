"""What a tensor costs besides its bytes: resharding checkpoints of very many very small tensors.

python docs/benchmarks/many.py WORKDIR
"""

import shutil
import sys
import time
from pathlib import Path

import generate

from shardctl.api import Mesh, Wish, plan, reshard

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 128,
    "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def main():
    """Checkpoints of about 10,000, 30,000 and 100,000 tensors, for tp2."""
    root = Path(sys.argv[1])
    wish = Wish(mesh=Mesh.of(tp=2), memory=4 << 30)
    print("| tensors | plan, s | microseconds a tensor | reshard, s | microseconds a tensor |\n|---|---|---|---|---|")
    for layers in (1100, 3300, 11000):
        shutil.rmtree(root, ignore_errors=True)
        generate.config = lambda _, layers=layers: {**TINY, "num_hidden_layers": layers}
        generate.generate(root / "src")
        began = time.perf_counter()
        plan(root / "src", wish)
        planned = time.perf_counter()
        tensors = len(reshard(root / "src", root / "out", wish).record.tensors)
        done = time.perf_counter()
        times = [planned - began, done - planned]
        print(f"| {tensors:,} |" + "".join(f" {t:.1f} | {t / tensors * 1e6:.0f} |" for t in times), flush=True)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
