"""What Megatron-LM's layers of Mamba 2 keep, by tp: one rank of a process group that exists only in name.

    python docs/benchmarks/activations_megatron.py PACKAGES [--record FILE]

PACKAGES is a folder as for activations_recurrent.py that has megatron (megatron-core 0.15) too. Tensors are fake,
nothing is sent and no kernel is launched; the norm before a layer is a function that keeps what Transformer Engine's
does: its input and a number for each token. The gradient of the layers' output is given, for there is no head.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
# hidden, heads (of which there are 2 * hidden / HEAD), groups, layers, sequences, tokens
SHAPES = ((512, 16, 4, 3, 2, 512), (512, 16, 8, 2, 1, 8192), (1024, 32, 4, 2, 1, 4096))
STATE, HEAD = 128, 64


def alone(tp: int) -> None:
    """Make this the first of `tp` ranks, without the others."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Tracker:
        def fork(self, *_: object):
            return contextlib.nullcontext()

    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, create_gloo_process_groups=False)
    import megatron.core.ssm.mamba_mixer as mixer
    import megatron.core.tensor_parallel.layers as linear

    mixer.get_cuda_rng_tracker = linear.get_cuda_rng_tracker = lambda *_, **__: Tracker()


def end() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def fused_norm():
    """A norm that keeps what a fused one does."""
    import torch
    from fake_peak import FusedNorm

    class Norm(torch.nn.Module):
        def __init__(self, config, hidden_size, eps=1e-5) -> None:  # noqa: ARG002
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(hidden_size))

        def forward(self, x):
            return FusedNorm.apply(x, self.weight)

    return Norm


def measured(tp: int, shape):
    """The peak that torch counts."""
    import torch
    from fake_peak import peak_of
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    hidden, _, groups, layers, batch, tokens = shape
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=8,
        params_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        mamba_num_groups=groups,
        mamba_state_dim=STATE,
        mamba_head_dim=HEAD,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        perform_initialization=False,
        hidden_dropout=0.0,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    linear = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mixer = ModuleSpec(MambaMixer, params={}, submodules=linear)
    parts = MambaLayerSubmodules(norm=fused_norm(), mixer=mixer, mamba_bda=get_bias_dropout_add)
    pg = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])

    def build():
        torch.set_default_dtype(torch.bfloat16)
        try:
            made = [MambaLayer(config, parts, layer_number=n + 1, pg_collection=pg) for n in range(layers)]
            return torch.nn.ModuleList(made)
        finally:
            torch.set_default_dtype(torch.float32)

    def step(model):
        x = torch.zeros(tokens // tp, batch, hidden, dtype=torch.bfloat16, requires_grad=True)
        for layer in model:
            x = layer(x)
        return x.sum()

    return peak_of(build, step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("packages")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests" / "memory")]
    from activations_recurrent import without_devices

    without_devices(options.packages)
    found = []
    for tp in (1, 2, 4):
        for shape in SHAPES:
            alone(tp)
            peak = measured(tp, shape)
            end()
            hidden, heads, groups, layers, batch, tokens = shape
            config = {
                "model_type": "mamba2",
                "architectures": ["Mamba2ForCausalLM"],
                "hidden_size": hidden,
                "num_heads": heads,
                "n_groups": groups,
                "num_hidden_layers": layers,
                "vocab_size": 64,
            }
            run = {"tp": tp, "batch": batch, "sequence": tokens, "kept": peak.kept, "peak": peak.nbytes}
            found.append({**run, "config": config})
            print(tp, shape, f"kept {peak.kept:,}, peak {peak.nbytes:,} during {peak.during}", flush=True)
    if options.record is not None:
        options.record.write_text("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
