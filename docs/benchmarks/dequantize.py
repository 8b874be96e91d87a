"""Time and memory of taking fp8 blocks back to bf16, beside a script as trainers keep it; prints a Markdown table.

python docs/benchmarks/dequantize.py WORKDIR [--gigabytes 4] [--runs 3]

The source has one scale for each block of 128 x 128, as DeepSeek-V3. `cp -r` copies the result, whose bytes everybody
has to write. Every contender ends with `sync` and runs in turn with the others.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from reshard import print_table, run, warm
from safetensors.torch import save_file

import shardctl

HIDDEN, FFN, VOCABULARY, BLOCK = 4096, 14336, 32000, 128
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
SHARDCTL = [sys.executable, "-m", "shardctl", "reshard", "{src}", "{dst}", "--dtype", "bf16", "--memory", "256MiB"]
SCRIPT = """
import os, sys, glob
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
src, dst = sys.argv[1:]
os.makedirs(dst)
take_back = Fp8Dequantize(None)._dequantize_one
for file in sorted(glob.glob(src + "/*.safetensors")):
    state = load_file(file)
    found = {}
    for name, tensor in state.items():
        if not name.endswith("_scale_inv"):
            scale = state.get(name + "_scale_inv")
            found[name] = tensor if scale is None else take_back(tensor, scale, torch.bfloat16)
    save_file(found, dst + "/" + os.path.basename(file))
"""


def generate(root, gigabytes):
    """Write a Llama of about so many GB in fp8, a file for each layer; returns the bytes that its values take."""
    root.mkdir(parents=True)
    layers = max(1, round(gigabytes * 1e9 / sum(out * inputs for out, inputs in LAYER.values())))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HIDDEN // BLOCK,
        "num_key_value_heads": HIDDEN // BLOCK // 4,
        "intermediate_size": FFN,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    }
    (root / "config.json").write_text(json.dumps(config))
    places, nbytes = {}, 0
    for layer in range(layers):
        state = {f"{norm}_layernorm.weight": torch.ones(HIDDEN).bfloat16() for norm in ("input", "post_attention")}
        for name, (out, inputs) in LAYER.items():
            codes = torch.randint(0, 120, (out, inputs), dtype=torch.uint8)
            state[f"{name}.weight"] = codes.view(torch.float8_e4m3fn)
            state[f"{name}.weight_scale_inv"] = torch.rand(out // BLOCK, inputs // BLOCK)
            nbytes += 2 * codes.numel()
        state = {f"model.layers.{layer}.{name}": tensor for name, tensor in state.items()}
        if not layer:
            state |= {
                n: torch.randn(VOCABULARY, HIDDEN).bfloat16() for n in ("model.embed_tokens.weight", "lm_head.weight")
            }
            state["model.norm.weight"] = torch.ones(HIDDEN).bfloat16()
            nbytes += 4 * VOCABULARY * HIDDEN
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(state, root / file, {"format": "pt"})
        places |= dict.fromkeys(state, file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return nbytes


def main():
    """Parse the arguments and run."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("workdir", type=Path)
    options.add_argument("--gigabytes", type=float, default=4)
    options.add_argument("--runs", type=int, default=3)
    given = options.parse_args()
    print(f"shardctl {shardctl.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, Linux")
    source, result = given.workdir / "fp8", given.workdir / "bf16"
    shutil.rmtree(given.workdir, ignore_errors=True)
    nbytes = generate(source, given.gigabytes)
    places = {"{src}": str(source), "{dst}": str(result)}
    subprocess.run(
        [places.get(part, part) for part in [*SHARDCTL, "--to", "hf"]], check=True, stdout=subprocess.DEVNULL
    )
    contenders = {
        "`shardctl reshard --dtype bf16 --tp 4 --memory 256MiB`": ([*SHARDCTL, "--tp", "4"], source),
        "`shardctl reshard --dtype bf16 --to hf --memory 256MiB`": ([*SHARDCTL, "--to", "hf"], source),
        "`cp -r`": (["cp", "-r", "{src}", "{dst}"], result),
        "transformers' dequantization, file by file": ([sys.executable, "-c", SCRIPT, "{src}", "{dst}"], source),
    }
    found = {name: [] for name in contenders}
    for _ in range(given.runs):
        for name, (command, read) in contenders.items():
            found[name].append(run(command, read, given.workdir / "out", warm))
    print(f"\n{nbytes / 1e9:.2f} GB of bf16 values, {given.runs} runs in turn, medians\n")
    print_table(found, nbytes)
    shutil.rmtree(given.workdir)


if __name__ == "__main__":
    main()
