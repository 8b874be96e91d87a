"""Writes `docs/consumers.md`: runs of trainers, converted with `--for` each consumer, loaded there and computed.

Run by hand, from the root: ``DS_ACCELERATOR=cpu python -m docs.consumers TRANSFORMERS4_PYTHON VLLM_PYTHON [RUN ...]``.
This Python has deepspeed 0.19.8, lightning 2.6.6 and megatron-core 0.16.1 too; TRANSFORMERS4_PYTHON has transformers
4.57, compressed-tensors and pydantic; VLLM_PYTHON has vLLM for the CPU, and for LLaVA torchvision, whose build for CUDA
loads once the operators `nms` and `qnms` are declared (`torch.library`). Answers are kept in `docs/consumers.json`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from docs import trainer_runs
from shardctl.cli.program import run
from shardctl.running.engines.engine_client import EngineError, ask_engine
from shardctl.running.engines.score_check import BOUND, MARGIN, compare_scores
from shardctl.verify.engine_result import EngineQuestion, TokenScores

PAGE = Path(__file__).with_suffix(".md")
KEPT = Path(__file__).with_suffix(".json")
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},  # which no class assumes
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 64,
}
IMAGE = 127
"""The token that stands for an image."""
PROCESSOR: dict[str, Any] = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "patch_size": 14,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
    "image_processor": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
    },
}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "dense (Qwen2)": ("qwen2", SMALL, ()),
    "mixture of experts (Mixtral)": ("mixtral", {**SMALL, "num_local_experts": 4, "sliding_window": None}, ()),
    "vision and language (LLaVA)": (
        "llava",
        {"text_config": {**SMALL, "model_type": "llama"}, "vision_config": VISION, "image_token_index": IMAGE},
        (),
    ),
    "quantized on the way (Llama, int4)": ("llama", SMALL, ("--quantize", "int4")),
}
"""The type of each model, its config, and what is added to the command."""
TRAINERS = {
    "transformers-5.24": "transformers 5.24, `save_pretrained`",
    "transformers-4.57": "transformers 4.57, `save_pretrained`",
    "dcp": "FSDP2, `torch.distributed.checkpoint`",
    "accelerate": "Accelerate, `pytorch_model_fsdp_0/`",
    "fsdp-bin": "Accelerate, `pytorch_model_fsdp.bin`",
    "zero-2": "DeepSpeed ZeRO-2",
    "zero-3": "DeepSpeed ZeRO-3",
    "lightning/last.ckpt": "Lightning, `.ckpt`",
    "composer": "Composer, `ep0-ba10-rank0.pt`",
    "verl": "verl, `model_world_size_2_rank_*.pt`",
    "slime": "slime, `iter_0000010/`",
    "nemo-rl": "NeMo-RL, `step_10/policy/`",
    "megatron": "Megatron-Core, `iter_0000010/` (`torch_dist`)",
    "adapter": "PEFT, a LoRA that is merged",
}
"""The folder of each run, and what the page calls it."""
RUN_BY = ("transformers", "transformers@4.57", "vllm")
FROM_HEADERS = ("sglang", "tgi", "llama.cpp")
PROMPTS = ((3, 14, 15, 92, 65, 35), (27, 18, 28, 18, 28, 45))


def make(kind: str, settings: dict[str, Any], folder: Path) -> None:
    """Save a model whose weights are random, in fp32, as transformers does."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    auto = transformers.AutoModelForImageTextToText if kind == "llava" else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            noise = torch.randn(tensor.shape)
            tensor.copy_(noise * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 1 + noise / 10)
    model.save_pretrained(folder)
    if kind == "llava":  # vLLM wants its processor and a tokenizer
        words = {**{f"w{number}": number for number in range(IMAGE)}, "<image>": IMAGE}
        named = dict.fromkeys(("unk_token", "pad_token"), "w0") | {"bos_token": "w1", "eos_token": "w2"}
        tokenizer = Tokenizer(WordLevel(words, named["unk_token"]))
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))


def shardctl(*words: object) -> tuple[int, str]:
    """Run a command in this process; returns its exit code and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = run([str(word) for word in words])
    return code, said.getvalue()


def name_content(folder: Path) -> str:
    """Name what a consumer reads of a directory: its config and its weights."""
    found = sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".safetensors", ".bin"} or path.name in {"config.json", "model.safetensors.index.json"}:
            found.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


class Consumers:
    """Asks consumers about directories, once for each content."""

    def __init__(self, pythons: dict[str, str]) -> None:
        self._pythons = pythons
        self._answers: dict[tuple[str, str, str], list[TokenScores] | str] = {}
        self.versions: dict[str, dict[str, str]] = {}

    def ask(self, consumer: str, folder: Path, dtype: str = "fp32") -> list[TokenScores] | str:
        """Return the scores of the prompts, or the consumer's own words if it does not load the directory."""
        key = (consumer, dtype, name_content(folder))
        if key not in self._answers:
            engine = consumer.partition("@")[0]
            question = EngineQuestion(engine, str(folder), PROMPTS, tokens=4, dtype=dtype)
            try:
                self._answers[key], self.versions[consumer] = ask_engine(question, Path(self._pythons[consumer]), 600)
            except EngineError as error:
                self._answers[key] = error.message
        return self._answers[key]


def judge(said: list[TokenScores] | str, wanted: list[TokenScores] | str, allowed: float = BOUND) -> dict[str, Any]:
    """Compare what a consumer says with what transformers says of the original."""
    if isinstance(said, str) or isinstance(wanted, str):
        return {"status": "not loaded", "why": str(said if isinstance(said, str) else wanted)[:300]}
    found = compare_scores(wanted, said, allowed)
    same = found.apart <= allowed and not found.other
    return {"status": "same" if same else "differs", "apart": found.apart, "allowed": allowed, "tokens": found.tokens}


def convert(source: Path, target: Path, consumer: str, config: Path, more: tuple[str, ...]) -> tuple[int, str]:
    """Convert a run for a consumer; a LoRA is merged into the original."""
    words = ("reshard", config, target, "--merge", source) if source.name == "adapter" else ("reshard", source, target)
    known = () if source.name == "adapter" else ("--config", config)
    return shardctl(*words, "--for", consumer, *known, "--complete-from", config, *more)


def write_all(kind: str, original: Path, runs: Path, older: str, trainers: tuple[str, ...]) -> tuple[str, ...]:
    """Write what the runs of these trainers leave; returns those that have such a model."""
    runs.mkdir(exist_ok=True)
    if {*trainers} - {"megatron"}:
        trainer_runs.write_runs(original, runs, older)
    if kind == "llava":  # which megatron-core's GPT model is not
        return tuple(trainer for trainer in trainers if trainer != "megatron")
    if "megatron" in trainers:
        trainer_runs.spawn(trainer_runs.write_megatron, original, runs / "megatron")
    return trainers


def ask_all(
    model: str, folder: Path, consumers: Consumers, kept: dict[str, Any], older: str, trainers: tuple[str, ...]
) -> None:
    """Fill the rows of trainers for one model."""
    kind, settings, more = MODELS[model]
    original, runs = folder / "original", folder / "runs"
    make(kind, settings, original)
    trainers = write_all(kind, original, runs, older, trainers)
    (runs / "transformers-5.24").symlink_to(original)
    trainer_runs.write_adapter(original, runs / "adapter").save_pretrained(folder / "merged")
    wanted, allowed, dtype = {}, BOUND, "bf16" if more else "fp32"  # vLLM's kernel for int4 is for bf16 alone
    for name, source in (("", original), ("adapter", folder / "merged")):
        reference = source
        if more:  # what transformers computes of the original's own quantization
            reference = folder / f"reference-{name}"
            shardctl("reshard", source, reference, "--to", "hf", *more)
        wanted[name] = consumers.ask("transformers", reference, dtype)
        if more:
            exact = consumers.ask("transformers", reference)
            allowed = MARGIN * compare_scores(exact, wanted[name], inf).apart
    for trainer in trainers:
        cells = kept.setdefault(model, {}).setdefault(trainer, {})
        for consumer in (*RUN_BY, *FROM_HEADERS):
            target = folder / "out" / f"{trainer.replace('/', '-')}-{consumer}"
            code, said = convert(runs / trainer, target, consumer, original, more)
            last = [line for line in said.strip().splitlines() if line.strip()]
            if code:
                cells[consumer] = {"status": "refused", "code": code, "why": " ".join(last)[:400]}
            elif consumer in FROM_HEADERS:
                cells[consumer] = {"status": "should load"}
            else:
                cells[consumer] = judge(
                    consumers.ask(consumer, target, dtype), wanted.get(trainer, wanted[""]), allowed
                )
            print(model, trainer, consumer, cells[consumer], flush=True)


def describe(cell: dict[str, Any]) -> str:
    """A cell of the table."""
    if cell["status"] == "same":
        return f"same ({cell['apart']:.0e})"
    if cell["status"] == "differs":
        return f"**differs** ({cell['apart']:.0e})"
    return cell["status"]


HEAD = """# Trainers and consumers

Each cell is one run: a small model with random weights was saved as a trainer saves it, converted with
`shardctl reshard RUN OUT --for CONSUMER --config ORIGINAL --complete-from ORIGINAL`, and given to the consumer.

**Same** means that the consumer loaded the directory with its own loader, without a missing or an unexpected name, and
that its log-probabilities and greedy tokens are those of transformers 5.24 on the original model. The number is the
largest difference of two natural log-probabilities in fp32; 1e-3 is allowed. The quantized model computes in bf16, is
compared with transformers on the quantized original, and may be four times as far off as bf16 takes that from fp32.
*Should load* is an answer from headers: the consumer was not run.

`python -m docs.consumers` made this page; its head says what it needs. DeepSpeed 0.19.8, Lightning 2.6.6, PEFT 0.21.2,
megatron-core 0.16.1, transformers and torch 2.13 saved their files themselves. For Composer, verl, slime, NeMo-RL and
Accelerate, torch saved the tensors under the names and in the folders that these trainers use. LLaVA was asked about
texts alone, and is no model of megatron-core.

"""


def build_page(kept: dict[str, Any]) -> str:
    """The page of everything that was run."""
    versions = dict(kept["versions"].items())
    page = HEAD
    for model in MODELS:
        if model not in kept["cells"]:
            continue
        page += f"## {model[0].upper()}{model[1:]}\n\n| trainer | "
        page += " | ".join(
            f"{name.partition('@')[0]} {versions[name].get(name.partition('@')[0], '')}" for name in RUN_BY
        )
        page += " | " + " | ".join(FROM_HEADERS) + " |\n|" + "---|" * (1 + len(RUN_BY) + len(FROM_HEADERS)) + "\n"
        for trainer, title in TRAINERS.items():
            cells = kept["cells"][model].get(trainer)
            if cells is None:
                continue
            page += f"| {title} | " + " | ".join(describe(cells[name]) for name in (*RUN_BY, *FROM_HEADERS)) + " |\n"
        why = {
            f"- {title}, {name}: {cell['why']}\n": None
            for trainer, title in TRAINERS.items()
            for name, cell in kept["cells"][model].get(trainer, {}).items()
            if "why" in cell
        }
        page += "\n" + "".join(why) + ("\n" if why else "")
    return page.rstrip() + "\n"


def main(older: str, vllm: str, *trainers: str) -> None:
    """Run every model with these trainers, or with all, and write the page after each."""
    os.environ.pop("PYTHONPATH", None)  # what this Python needs is not for the others
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.is_file() else {"versions": {}, "cells": {}}
    consumers = Consumers({"transformers": sys.executable, "transformers@4.57": older, "vllm": vllm})
    for model in MODELS:
        with tempfile.TemporaryDirectory(prefix="consumers-") as folder:
            ask_all(model, Path(folder), consumers, kept["cells"], older, trainers or tuple(TRAINERS))
        kept["versions"] |= consumers.versions
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(build_page(kept))


if __name__ == "__main__":
    main(*sys.argv[1:])
