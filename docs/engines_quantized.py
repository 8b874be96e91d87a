"""Asks vLLM about what `reshard --quantize` writes, and keeps the answers for `docs/engines.md`.

Run by hand, from the root: ``python -m docs.engines_quantized VLLM_PYTHON [FORMAT ...]``; VLLM_PYTHON as for
`docs.engines`. A small Llama is quantized; vLLM and transformers, which decodes the same files with compressed-tensors
and rounds activations as the config says, both compute in bf16. As a measure, transformers also computes in fp32.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardctl.api import ReshardOptions, reshard
from shardctl.base.errors import ShardctlError
from shardctl.models.rounding.recipes import RECIPES
from shardctl.running.engines.engine_client import ask_engine
from shardctl.running.engines.score_check import MARGIN, compare_scores, measure_rounding
from shardctl.verify.engine_result import EngineQuestion, TokenScores

KEPT = Path(__file__).with_suffix(".json")
PROMPTS, PROMPT, TOKENS = 4, 16, 8
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
"""Every format's groups divide them; vLLM's attention on CPUs wants heads of 32 or more."""


def make(path: Path) -> None:
    """Save a Llama whose weights are random."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
    with torch.no_grad():
        for tensor in made.state_dict().values():
            noise = torch.randn(tensor.shape)
            tensor.copy_(noise * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 1 + noise / 10)
    made.save_pretrained(path)


def score(path: Path, prompts: list[list[int]], dtype: str) -> list[TokenScores]:
    """Have transformers continue prompts with the likeliest tokens, and score all."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    ids = torch.tensor(prompts)
    with torch.no_grad():
        for _ in range(TOKENS):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        scores = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1).numpy()
    return [
        TokenScores(tuple(each[: PROMPT - 1]), tuple(row[PROMPT:]), tuple(each[PROMPT - 1 : PROMPT - 1 + TOKENS]))
        for row, each in zip(ids.tolist(), scores, strict=True)
    ]


def ask(name: str, source: Path, target: Path, python: Path) -> dict[str, Any]:
    """Quantize the model to a format, and have both compute with it."""
    import torch

    reshard(source, target, ReshardOptions(quantize=name))
    prompts = torch.randint(
        3, SIZES["vocab_size"], (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(1)
    ).tolist()
    asked = EngineQuestion("vllm", str(target), tuple(map(tuple, prompts)), TOKENS, dtype="bf16")
    try:
        said, versions = ask_engine(asked, python, 400)
    except ShardctlError as error:
        return {"status": "not run", "said": error.message}
    wanted = score(target, prompts, "bfloat16")
    bound = MARGIN * measure_rounding(score(target, prompts, "float32"), wanted)
    found = compare_scores(wanted, said, bound)
    return {
        "status": "passed" if found.apart <= bound and not found.other else "differs",
        "said": found.other,
        "apart": found.apart,
        "bound": bound,
        "same": found.same,
        "tokens": found.tokens,
        "versions": versions,
    }


HEAD = """
## Quantized by shardctl

What vLLM says of a small Llama after `reshard --quantize FORMAT`, on the CPU and in bf16, beside transformers with
compressed-tensors on the same files (`python -m docs.engines_quantized`). *Allowed* is four times what bf16 moves
transformers from fp32. The kernels of a GPU were not asked.

| format | result | apart | allowed | same tokens | said |
|---|---|---|---|---|---|
"""


def build_section(kept: dict[str, dict[str, Any]]) -> str:
    """Build the part of the page about quantized models."""
    return HEAD + "".join(f"{describe(name, kept[name])}\n" for name in RECIPES if name in kept)


def describe(name: str, found: dict[str, Any]) -> str:
    """One line of the table."""
    if "apart" not in found:
        return f"| `{name}` | {found['status']} | | | | {found['said']} |"
    tokens = f"{found['same']} of {found['tokens']}"
    return (
        f"| `{name}` | {found['status']} | {found['apart']:.2f} | {found['bound']:.2f} | {tokens} | {found['said']} |"
    )


def main(python: str, names: list[str]) -> None:
    """Ask about formats, all if none is named."""
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        make(Path(folder, "llama"))
        for name in names or RECIPES:
            kept[name] = ask(name, Path(folder, "llama"), Path(folder, name), Path(python))
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
            print(describe(name, kept[name]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
