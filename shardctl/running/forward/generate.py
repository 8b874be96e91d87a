"""Continues a prompt with the weights of the source and of the shards, so that a person sees both speak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardctl.base.errors import UnsupportedError
from shardctl.verify.forward_result import GeneratedTexts, PromptContinuation
from shardctl.verify.transformers_classes import silence_transformers

if TYPE_CHECKING:
    from pathlib import Path

    from shardctl.running.forward.executor import ModelExecutor
    from shardctl.running.forward.weights import ModelWeights

Torch = Any


def continue_prompt(
    executor: ModelExecutor, both: tuple[ModelWeights, ModelWeights], folder: Path | None, prompt: str, tokens: int
) -> GeneratedTexts:
    """Return the next `tokens` tokens of `prompt` by each, always the likeliest; every token reads all weights once.

    Raises UnsupportedError if the model does not speak, or there is no tokenizer in `folder`.
    """
    model = executor.skeleton.model
    if not model.can_generate():
        raise UnsupportedError(f"{type(model).__name__} cannot generate text")
    tokenizer = _load_tokenizer(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(executor.precision.device)
    if not ids.shape[-1]:
        raise UnsupportedError("the tokenizer finds no tokens in the prompt")
    source, shards = (_generate_tokens(executor, weights, tokenizer, ids, tokens) for weights in both)
    return GeneratedTexts(prompt, source, shards)


def _load_tokenizer(folder: Path | None) -> Torch:
    from transformers import AutoTokenizer

    if folder is None:
        raise UnsupportedError("there is no directory with a tokenizer")
    try:
        with silence_transformers():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UnsupportedError(f"the tokenizer of {folder} cannot be loaded: {error}") from error


def _generate_tokens(
    executor: ModelExecutor, weights: ModelWeights, tokenizer: Torch, ids: Torch, tokens: int
) -> PromptContinuation:
    import torch

    config = executor.skeleton.model.config
    answers = bool(getattr(config, "is_encoder_decoder", False))
    start = getattr(config, "decoder_start_token_id", None)
    said = torch.full_like(ids[:, :1], start if start is not None else 0) if answers else ids
    first, ends = said.shape[-1], _list_end_tokens(executor.skeleton.model)
    for _ in range(tokens):
        inputs = {"input_ids": ids, "decoder_input_ids": said} if answers else {"input_ids": said}
        following = executor.run(inputs, weights).logits[:, -1].argmax(-1, keepdim=True)
        said = torch.cat([said, following], -1)
        if int(following) in ends:
            break
    new = said[0, first:].tolist()
    return PromptContinuation(tuple(new), tokenizer.decode(new, skip_special_tokens=True))


def _list_end_tokens(model: Torch) -> set[int]:
    found = getattr(model.generation_config, "eos_token_id", None)
    return set(found if isinstance(found, list) else [found]) - {None}
