"""How far the estimate of activations is from what torch keeps of models of the sizes people train.

    python docs/benchmarks/activations.py [MODEL ...]

Prints the table of activations.md. It needs torch and transformers, but neither a GPU nor the models' memory: tensors
are fake, and only their sizes are counted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import RankShards
from shardctl.estimate.training.activations import estimate_activations
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.mesh import Mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "memory"))
from fake_peak import Peak, peak_of_causal_lm

MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
# kind, layers, hidden, intermediate, heads, key heads, dim of a head, vocabulary, further values
MODELS = {
    "Llama-3.2-1B": ("llama", 16, 2048, 8192, 32, 8, 64, 128256, {"tie_word_embeddings": True}),
    "Llama-3-8B": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, {}),
    "Llama-3-70B": ("llama", 80, 8192, 28672, 64, 8, 128, 128256, {}),
    "Llama-2-7B": ("llama", 32, 4096, 11008, 32, 32, 128, 32000, {}),
    "Qwen2-7B": ("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, {}),
    "Gemma-7B": ("gemma", 28, 3072, 24576, 16, 16, 256, 256000, {}),
    "Mixtral-8x7B": ("mixtral", 32, 4096, 14336, 32, 8, 128, 32000, MIXTRAL),
    "Qwen3-8B": ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, {}),
    "Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, 6144, 32, 4, 128, 151936, QWEN_MOE),
}
RUNS = ((1, 2048, "none"), (4, 4096, "none"), (1, 8192, "none"), (1, 8192, "full"), (8, 4096, "full"))
ONE = Mesh.of()


def config_of(name: str):
    kind, layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, more = MODELS[name]
    return AutoConfig.for_model(
        kind,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        **more,
    )


def estimated(config, batch: int, sequence: int, recompute: str) -> tuple[int, str]:
    """The estimate, and the moment that it names."""
    values = config.to_dict()
    values["architectures"] = [AutoModelForCausalLM._model_mapping[type(config)].__name__]  # noqa: SLF001
    found = build_layer_graph(values)
    layers = len(found.layers)
    holding = RankShards(0, "only", ONE.coordinate(0), 1, 0, range(layers), ())
    work = TrainingWorkload(sequence, batch, profile="hf", precision="bf16", recompute=recompute)
    terms = estimate_activations(found, holding, ONE, work, stages=(layers,))
    return sum(t.nbytes for t in terms), terms[-1].name.removeprefix("alive in the backward pass of ")


def main(names: list[str]) -> None:
    print("| model | sequences x tokens | recompute | torch, GB | estimate, GB | error | the worst moment | seconds |")
    print("|---|---|---|---:|---:|---:|---|---:|")
    for name in names or MODELS:
        config = config_of(name)
        for batch, sequence, recompute in RUNS:
            start = time.perf_counter()
            peak: Peak = peak_of_causal_lm(config, batch, sequence, checkpointing=recompute == "full")
            took = time.perf_counter() - start
            guess, moment = estimated(config, batch, sequence, recompute)
            error = 100 * (guess / peak.nbytes - 1)
            shape = f"{batch} x {sequence}"
            cells = (f"{peak.nbytes / 1e9:.2f}", f"{guess / 1e9:.2f}", f"{error:+.2f} %", moment, f"{took:.1f}")
            print(f"| {name} | {shape} | {recompute} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
