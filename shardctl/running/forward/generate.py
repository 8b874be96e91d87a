"""Has the source and the shards continue a prompt, decode with a KV cache, and predict the tokens of a text."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import state_class
from shardctl.verify.forward_result import CachedDecoding, GeneratedTexts, PromptContinuation, TextPerplexity
from shardctl.verify.tolerance import measure_distance
from shardctl.verify.transformers_classes import silence_transformers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.running.forward.executor import ModelExecutor
    from shardctl.running.forward.weights import ModelWeights

Torch = Any
_ROWS: Final = 64
"""Positions whose log-probabilities are computed at once."""
_CACHE_NAMES: Final = ("cache", "past_key_values")
"""What classes of transformers call their KV cache: since 5.24, and before."""
_MAX_LOSS: Final = 700.0
"""Nats a token whose exponential is still a number."""


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


def measure_perplexity(
    both: tuple[tuple[ModelExecutor, ModelWeights], ...], folder: Path | None, text: str, window: int
) -> TextPerplexity:
    """Measure the perplexity of a text by each of the two, in windows; each window reads all weights once.

    Raises UnsupportedError if the model predicts no next tokens, there is no tokenizer, the text is too short, or the
    source computes logits for it that are not a number.
    """
    import torch

    model = both[0][0].skeleton.model
    if not model.can_generate() or getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{type(model).__name__} does not predict the next token of a text")
    ids = _load_tokenizer(folder)(text, return_tensors="pt").input_ids
    pieces = [piece for piece in ids.split(window, -1) if piece.shape[-1] > 1]
    if not pieces:
        raise UnsupportedError("the text has fewer than two tokens")
    losses = []
    for executor, weights in both:
        total = torch.zeros((), dtype=torch.float64)
        for piece in pieces:
            given = piece.to(executor.precision.device)
            logits = executor.run({"input_ids": given}, weights).logits
            for rows, following in zip(logits[0, :-1].split(_ROWS), given[0, 1:].split(_ROWS), strict=True):
                scores = rows.double().log_softmax(-1).gather(-1, following.unsqueeze(-1))
                total -= scores.sum().cpu()
        losses.append(float(total))
    if math.isnan(losses[0]):
        raise UnsupportedError("the source computes logits for the text that are not a number")
    count = sum(piece.shape[-1] - 1 for piece in pieces)
    source, shards = (math.inf if math.isnan(loss) else math.exp(min(loss / count, _MAX_LOSS)) for loss in losses)
    return TextPerplexity(count, window, source, shards)


@state_class
class CachedDecoder:
    """A model that takes the end of each sequence token by token, with a KV cache of what came before."""

    model: Torch
    cache_name: str
    """What the model calls its cache, as an argument and in its output."""
    decoded: int
    """Tokens that are taken one by one."""

    def __call__(self, **inputs: Torch) -> dict[str, Torch]:
        """Return the logits of the tokens that were taken one by one."""
        return self.forward(**inputs)

    def forward(self, input_ids: Torch, return_dict: bool = True) -> dict[str, Torch]:  # noqa: FBT001, FBT002 - as models have it
        """Run the beginning of the sequences at once, and then each further token."""
        import torch

        first = input_ids.shape[-1] - self.decoded
        found, cache = [], None
        for start, stop in [(0, first), *((at, at + 1) for at in range(first, input_ids.shape[-1]))]:
            given = {"input_ids": input_ids[:, start:stop], self.cache_name: cache}
            output = self.model(**given, use_cache=True, return_dict=return_dict)
            cache = output[self.cache_name]
            found.append(output.logits[:, -1:])
        return {"logits": torch.cat(found[1:], 1)}


def decode_with_cache(
    both: tuple[tuple[ModelExecutor, ModelWeights], ...], inputs: Mapping[str, Torch], expected: Torch, decoded: int
) -> CachedDecoding:
    """Decode the end of sequences with a KV cache, by the source and by the shards.

    Raises UnsupportedError for a model without such a cache, or sequences that are too short.
    """
    model = both[0][0].skeleton.model
    known = inspect.signature(model.forward).parameters
    name = next((each for each in _CACHE_NAMES if each in known), None)
    if name is None or not model.can_generate() or getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{type(model).__name__} does not decode with a KV cache")
    if set(inputs) != {"input_ids"}:
        raise UnsupportedError(f"{type(model).__name__} takes more than tokens")
    ids = inputs["input_ids"]
    if ids.shape[-1] <= decoded:
        raise UnsupportedError(f"sequences of {ids.shape[-1]} tokens are too short to decode {decoded} of them")
    outputs = [
        executor.run({"input_ids": ids}, weights, model=CachedDecoder(executor.skeleton.model, name, decoded))["logits"]
        for executor, weights in both
    ]
    return CachedDecoding(
        ids.shape[-1] - decoded,
        decoded,
        measure_distance(outputs[0], outputs[1]),
        measure_distance(expected[:, -decoded:], outputs[0]),
    )


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
