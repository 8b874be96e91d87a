"""How far the estimate is for layers with a recurrent state, whose kernels need a GPU and decide what is kept.

    python docs/benchmarks/activations_recurrent.py PACKAGES [MODEL ...] [--record FILE]
    python docs/benchmarks/activations_recurrent.py - [MODEL ...] --sequence 512

PACKAGES is a folder with the Python files of mamba_ssm, causal_conv1d, fla, triton and einops: of an sdist or wheel,
without anything compiled. transformers then calls their autograd functions, which allocate and save what they do on a
GPU; only the kernels themselves are left out, which write into tensors that are there. What the two compiled modules
allocate is written down here. Without packages, `-`, transformers falls back on its own loops over tokens.

Prints the table of activations.md; --record writes the peaks of small models instead, which the tests compare with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import types
from pathlib import Path

HERE = Path(__file__).parent
JAMBA = {"num_experts": 16, "num_experts_per_tok": 2, "attn_layer_period": 8, "attn_layer_offset": 4}
NEXT = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "head_dim": 256,
}


def _attention(hidden, intermediate, heads, kv_heads):
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _mamba(kind, layers, hidden, vocabulary, **more):
    return {"model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocabulary, **more}


def _mamba2(layers, hidden, vocabulary, heads, groups, **more):
    return _mamba("mamba2", layers, hidden, vocabulary, num_heads=heads, n_groups=groups, **more)


MODELS = {
    "mamba-130m": _mamba("mamba", 24, 768, 50280),
    "mamba-2.8b": _mamba("mamba", 64, 2560, 50280),
    "falcon-mamba-7b": _mamba("falcon_mamba", 64, 4096, 65024),
    "mamba2-2.7b": _mamba2(64, 2560, 50288, 80, 1),
    "Codestral-7B": _mamba2(64, 4096, 32768, 128, 8),
    "Jamba-1.5-Mini": _mamba("jamba", 32, 4096, 65536, **JAMBA, **_attention(4096, 14336, 32, 8)),
    "Qwen3-Next-80B": _mamba("qwen3_next", 48, 2048, 151936, **NEXT, **_attention(2048, 5120, 16, 2)),
}
RUNS = ((1, 2048, "none"), (4, 4096, "none"), (1, 8192, "none"), (1, 8192, "full"))

SMALL_NEXT = {
    **_attention(256, 768, 8, 2),
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 48,
    "linear_value_head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
SMALL_JAMBA = {**_attention(256, 768, 8, 2), "attn_layer_period": 2, "attn_layer_offset": 1}
SMALL = {
    "mamba": _mamba("mamba", 3, 256, 64),
    "mamba, wide vocabulary": _mamba("mamba", 2, 256, 4000),
    "mamba, wide states": _mamba("mamba", 2, 192, 64, state_size=64, expand=3, time_step_rank=32),
    "mamba, narrow sums": _mamba("mamba", 2, 256, 64, residual_in_fp32=False),
    "falcon_mamba": _mamba("falcon_mamba", 3, 256, 64),
    "mamba2": _mamba2(3, 512, 64, 16, 1),
    "mamba2, groups": _mamba2(2, 512, 64, 16, 4, state_size=64, chunk_size=128),
    "mamba2, wide vocabulary": _mamba2(2, 256, 4000, 8, 1),
    "jamba": _mamba("jamba", 4, 256, 64, num_experts=1, **SMALL_JAMBA),
    "jamba, experts": _mamba("jamba", 4, 256, 64, num_experts=4, num_experts_per_tok=2, **SMALL_JAMBA),
    "jamba, wide scan": _mamba(
        "jamba", 2, 256, 64, num_experts=1, mamba_expand=6, **{**SMALL_JAMBA, "intermediate_size": 512}
    ),
    "qwen3_next": _mamba("qwen3_next", 4, 256, 64, **SMALL_NEXT),
    "qwen3_next, wide vocabulary": _mamba("qwen3_next", 4, 256, 4000, **SMALL_NEXT),
    "qwen3_next, wide states": _mamba(
        "qwen3_next", 4, 256, 64, **{**SMALL_NEXT, "linear_key_head_dim": 128, "linear_value_head_dim": 256}
    ),
}
SMALL_RUNS = ((2, 512, "none"), (1, 4096, "none"), (2, 512, "full"))


def selective_scan_forward(u, delta, a, b, c, d, z, bias, softplus):  # noqa: ARG001
    """What `selective_scan_fwd` of mamba-ssm's csrc/selective_scan/selective_scan.cpp allocates."""
    import torch

    noted = torch.empty(*u.shape[:2], -(-u.shape[2] // 2048), 2 * a.shape[1], dtype=a.dtype)
    return [torch.empty_like(delta), noted, *([] if z is None else [torch.empty_like(z)])]


def selective_scan_backward(u, delta, a, b, c, d, z, bias, dout, x, out, dz, softplus, again):  # noqa: ARG001
    """What `selective_scan_bwd` of the same file allocates."""
    import torch

    dz = torch.empty_like(z) if z is not None and dz is None else dz
    out_z = [torch.empty_like(out)] if again else []
    du, ddelta, da = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)
    db, dc = torch.zeros_like(b, dtype=torch.float32), torch.zeros_like(c, dtype=torch.float32)
    made = [du, ddelta, da, db.to(b.dtype), dc.to(c.dtype), torch.zeros_like(d), torch.zeros_like(bias)]
    return [*made, *([] if z is None else [dz]), *out_z]


class NoDevice(contextlib.nullcontext):
    """A device to be on, where there is none."""

    def __init__(self, *_: object) -> None:
        super().__init__()


def without_devices(packages: str) -> None:
    """Import the packages so that they launch nothing."""
    sys.path.insert(0, packages)
    import torch
    from triton.runtime import autotuner, jit

    scan = types.ModuleType("selective_scan_cuda")
    scan.fwd, scan.bwd = selective_scan_forward, selective_scan_backward
    sys.modules["selective_scan_cuda"] = scan
    sys.modules["causal_conv1d_cuda"] = types.ModuleType("causal_conv1d_cuda")

    def nothing(*_: object, **__: object) -> None:
        """Launch no kernel."""

    def chosen(tuner, *_: object, **__: object) -> None:
        tuner.best_config = tuner.configs[0]

    jit.JITFunction.run = autotuner.Heuristics.run = nothing
    autotuner.Autotuner.run = chosen
    torch.cuda.device = NoDevice
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(multi_processor_count=132)  # an H100
    for name in ("causal_conv1d", "mamba_ssm", "fla.ops.gated_delta_rule"):
        __import__(name)  # transformers would go on without them


def measured(values, batch, sequence, recompute):
    """The peak that torch counts, and the config."""
    from fake_peak import peak_of_causal_lm
    from transformers import AutoConfig

    config = AutoConfig.for_model(**values)
    attention = "sdpa" if "num_attention_heads" in values else "eager"
    full = recompute == "full"
    return peak_of_causal_lm(config, batch, sequence, attention=attention, checkpointing=full), config


def record(path: Path) -> None:
    """Write the peaks of small models."""
    from transformers import AutoModelForCausalLM

    found = []
    for name, values in SMALL.items():
        for batch, sequence, recompute in SMALL_RUNS:
            peak, config = measured(values, batch, sequence, recompute)
            architecture = AutoModelForCausalLM._model_mapping[type(config)].__name__  # noqa: SLF001
            run = {"batch": batch, "sequence": sequence, "recompute": recompute}
            whole = {**values, "architectures": [architecture]}
            found.append({"name": name, **run, "kept": peak.kept, "peak": peak.nbytes, "config": whole})
            print(name, batch, sequence, recompute, peak.nbytes, flush=True)
    path.write_text("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n", encoding="utf-8")


def table(names: list[str], runs) -> None:
    """Print the table."""
    from activations import estimated

    print("| model | sequences x tokens | recompute | torch, GB | estimate, GB | error | the worst moment | seconds |")
    print("|---|---|---|---:|---:|---:|---|---:|")
    for name in names or MODELS:
        for batch, sequence, recompute in runs:
            start = time.perf_counter()
            peak, config = measured(MODELS[name], batch, sequence, recompute)
            took = time.perf_counter() - start
            guess, moment = estimated(config, batch, sequence, recompute)
            numbers = f"{peak.nbytes / 1e9:.2f} | {guess / 1e9:.2f} | {100 * (guess / peak.nbytes - 1):+.2f} %"
            print(f"| {name} | {batch} x {sequence} | {recompute} | {numbers} | {moment} | {took:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("packages")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--sequence", type=int, help="one sequence of so many tokens, nothing computed again")
    options = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests" / "memory")]
    if options.packages != "-":
        without_devices(options.packages)
    if options.record is not None:
        record(options.record)
    else:
        table(options.models, RUNS if options.sequence is None else ((1, options.sequence, "none"),))


if __name__ == "__main__":
    main()
