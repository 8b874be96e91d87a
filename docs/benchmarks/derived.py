"""Derives the tables of classes of transformers that shardctl has none for, and proves each on tiny models.

    python docs/benchmarks/derived.py [--seconds N] [MODEL_TYPE ...]

Each class that generates text is made from its own config with small sizes, saved by transformers, cut for tp=2 with
`--prove` (and for ep=2 where a rule speaks of experts), brought back, and compared by digest. The table says what came
of each: proved, whole (nothing of a layer is cut), wrong (not published), or why it was not tried.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardctl.errors import Mismatch, ShardctlError
from shardctl.mesh import Mesh
from shardctl.models import FAMILIES
from shardctl.options import DestinationOptions, InspectOptions, ReshardOptions
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build_tiny(architecture: str) -> torch.nn.Module:
    """Build a class with small sizes and random weights, norms and biases included."""
    kind = getattr(transformers, architecture)
    usual = kind.config_class()
    config = kind.config_class(**{key: value for key, value in SMALL.items() if hasattr(usual, key)})
    torch.manual_seed(0)
    model = kind(config).eval()
    if sum(p.numel() for p in model.parameters()) > 20_000_000:
        raise ValueError("it is not small with these sizes")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1))
    return model


def prove_class(architecture: str, folder: Path) -> tuple[str, str]:
    """Prove one class; returns what came of it, and how it was cut or why not."""
    build_tiny(architecture).save_pretrained(folder / "source")
    derivation = inspect(folder / "source", InspectOptions(show_rules=True)).derivation
    if derivation is None:
        return "whole", "nothing of a layer is cut"
    experts = any(cut.axis == "ep" for each in derivation.rules for dim in each.rule.cuts for cut in dim)
    experts = experts or any(each.rule.member is not None for each in derivation.rules)
    meshes = [Mesh.of(tp=2), *([Mesh.of(dp=2, ep=2)] if experts else ())]
    for mesh in meshes:
        to = folder / str(mesh).replace(" ", "")
        done = reshard(
            folder / "source", to, ReshardOptions(mesh=mesh), destination_options=DestinationOptions(prove=True)
        )
        reshard(to, folder / f"{to.name}-back", ReshardOptions(to="hf"))
        if len({digest(folder / "source").digest, done.record.digest, digest(folder / f"{to.name}-back").digest}) > 1:
            return "wrong", f"another digest after {mesh}"
    whole = len(derivation.uncut)
    return "proved", f"{' and '.join(map(str, meshes))}; {len(derivation.rules)} rules, {whole} not known"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("kinds", nargs="*")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    known = {name for family in FAMILIES for name in family.classes}
    named = {k: v if isinstance(v, str) else v[0] for k, v in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    wanted = {k: v for k, v in named.items() if v not in known and (not given.kinds or k in given.kinds)}
    counts: dict[str, int] = {}
    began = time.monotonic()
    print("| class | result | how |\n|---|---|---|")
    for architecture in dict.fromkeys(wanted.values()):
        if time.monotonic() - began > given.seconds:
            counts["not reached"] = counts.get("not reached", 0) + 1
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                result, how = prove_class(architecture, Path(folder))
            except Mismatch as error:
                result, how = "wrong", error.message
            except ShardctlError as error:
                result, how = "refused", error.message
            except Exception as error:  # noqa: BLE001 - whatever a class raises that these sizes do not suit
                result, how = "not built", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        counts[result] = counts.get(result, 0) + 1
        print(f"| `{architecture}` | {result} | {how[:160].replace('|', '/')} |", flush=True)
    print(f"\n{', '.join(f'{count} {result}' for result, count in counts.items())}")


if __name__ == "__main__":
    main()
