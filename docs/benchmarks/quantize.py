"""Time and memory of quantizing bf16 to fp8 blocks, beside a script with the functions of compressed-tensors.

python docs/benchmarks/quantize.py WORKDIR [--gigabytes 2] [--runs 1]

The script quantizes file by file, whole, with the functions that LLM Compressor calls; it cuts nothing for ranks.
`cp -r` copies the result, whose bytes everybody has to write. Every contender ends with `sync`.
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

HIDDEN, FFN, VOCABULARY, HEAD, HEADS = 2048, 5632, 32000, 64, 8
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
SHARDCTL = [sys.executable, "-m", "shardctl", "reshard", "{src}", "{dst}", "--quantize", "fp8-block"]
SHARDCTL += ["--memory", "256MiB"]
SCRIPT = """
import os, sys, glob
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, maybe_pad_tensor_for_block_quant
from safetensors.torch import load_file, save_file
src, dst = sys.argv[1:]
os.makedirs(dst)
scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
owner = BaseCompressor.get_value_from_registry("float-quantized")
for file in sorted(glob.glob(src + "/*.safetensors")):
    found = {}
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        padded = maybe_pad_tensor_for_block_quant(tensor, (128, 128))
        cut = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        scale, _ = calculate_qparams(cut.amin((1, 3)), cut.amax((1, 3)), scheme.weights)
        parts = owner.compress({"weight": tensor, "weight_scale": scale}, scheme)
        found |= {name.removesuffix("weight") + part: each.contiguous() for part, each in parts.items()}
    save_file(found, dst + "/" + os.path.basename(file), {"format": "pt"})
"""


def generate(root, gigabytes):
    """Write a Llama of about so many GB in bf16, a file for each layer; returns the bytes of its tensors."""
    root.mkdir(parents=True)
    layers = max(1, round(gigabytes * 1e9 / 2 / sum(out * inputs for out, inputs in LAYER.values())))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": HEADS,
        "intermediate_size": FFN,
    }
    (root / "config.json").write_text(json.dumps(config))
    places, nbytes = {}, 0
    for layer in range(layers):
        state = {f"{norm}_layernorm.weight": torch.ones(HIDDEN).bfloat16() for norm in ("input", "post_attention")}
        state |= {f"{name}.weight": (torch.randn(shape) * 0.02).bfloat16() for name, shape in LAYER.items()}
        state = {f"model.layers.{layer}.{name}": tensor for name, tensor in state.items()}
        if not layer:
            state |= {
                n: torch.randn(VOCABULARY, HIDDEN).bfloat16() for n in ("model.embed_tokens.weight", "lm_head.weight")
            }
            state["model.norm.weight"] = torch.ones(HIDDEN).bfloat16()
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(state, root / file, {"format": "pt"})
        places |= dict.fromkeys(state, file)
        nbytes += sum(tensor.nbytes for tensor in state.values())
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return nbytes


def main():
    """Parse the arguments and run."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("workdir", type=Path)
    options.add_argument("--gigabytes", type=float, default=2)
    options.add_argument("--runs", type=int, default=1)
    given = options.parse_args()
    print(f"shardctl {shardctl.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, Linux")
    source, result = given.workdir / "bf16", given.workdir / "fp8"
    shutil.rmtree(given.workdir, ignore_errors=True)
    nbytes = generate(source, given.gigabytes)
    places = {"{src}": str(source), "{dst}": str(result)}
    subprocess.run(
        [places.get(part, part) for part in [*SHARDCTL, "--to", "hf"]], check=True, stdout=subprocess.DEVNULL
    )
    contenders = {
        "`shardctl reshard --quantize fp8-block --tp 4 --memory 256MiB`": ([*SHARDCTL, "--tp", "4"], source),
        "`shardctl reshard --quantize fp8-block --to hf --memory 256MiB`": ([*SHARDCTL, "--to", "hf"], source),
        "`cp -r`": (["cp", "-r", "{src}", "{dst}"], result),
        "compressed-tensors' functions, file by file, whole": (
            [sys.executable, "-c", SCRIPT, "{src}", "{dst}"],
            source,
        ),
    }
    found = {name: [] for name in contenders}
    for _ in range(given.runs):
        for name, (command, read) in contenders.items():
            found[name].append(run(command, read, given.workdir / "out", warm))
    print(f"\n{nbytes / 1e9:.2f} GB of bf16 tensors, {given.runs} runs in turn, medians\n")
    print_table(found, nbytes)
    shutil.rmtree(given.workdir)


if __name__ == "__main__":
    main()
