"""Makes a Llama checkpoint of any size with incompressible weights, without holding it in memory.

python docs/benchmarks/generate.py DIR [GIGABYTES]
"""

import json
import sys
from pathlib import Path

import numpy as np

from shardctl.base.dtype import BY_NAME
from shardctl.libraries.safetensors.header import encode_header
from shardctl.models import describe_model

SHARD = 5_000_000_000


def config(gigabytes):
    """A Llama of about so many GB in bf16; layers are added until it is large enough."""
    base = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "num_hidden_layers": 1,
    }
    embed = 2 * 2 * 32000 * 2048
    layer = 2 * (2048 * (2048 + 1024 + 1024 + 2048) + 3 * 2048 * 5632)
    return {**base, "num_hidden_layers": max(1, round((gigabytes * 1e9 - embed) / layer))}


def generate(root, gigabytes=4.0):
    """Write the checkpoint into the directory `root`; returns its bytes."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    settings = config(gigabytes)
    (root / "config.json").write_text(json.dumps(settings, indent=2))
    tensors = [(t.name, BY_NAME["BF16"], t.shape) for t in describe_model(settings).own()]
    groups, room = [[]], SHARD
    for row in tensors:
        size = row[1].nbytes(row[2])
        if size > room:
            groups, room = [*groups, []], SHARD
        groups[-1].append(row)
        room -= size
    noise = (np.random.default_rng(0).integers(0, 1 << 14, 1 << 23, dtype=np.uint16) | 0x3000).astype("<u2").tobytes()
    weight_map = {}
    for number, rows in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        encoded = encode_header(rows, {"format": "pt"})
        with (root / name).open("wb") as file:
            file.write(encoded.header)
            left = encoded.size - len(encoded.header)
            turn = 0
            while left:
                turn = (turn + 997) % 4096  # so that no two blocks are alike
                piece = noise[2 * turn : 2 * turn + min(left, len(noise) - 8192)]
                file.write(piece)
                left -= len(piece)
        weight_map |= {row[0]: name for row in rows}
    if len(groups) > 1:
        total = sum(row[1].nbytes(row[2]) for row in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(f.stat().st_size for f in root.iterdir())


if __name__ == "__main__":
    print(generate(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 4.0))
