"""Runs a checkpoint of any layout under transformers, whole and in this process, and scores the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardctl.base.errors import UnsupportedError
from shardctl.running.forward.lazy_state_dict import build_lazy_state_dict
from shardctl.running.forward.stacks import count_idle_experts, record_chosen_experts
from shardctl.verify.engine_result import TokenScores
from shardctl.verify.transformers_classes import build_config, get_model_class, silence_transformers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.models import Model
    from shardctl.tensors.bands import ByteReader
    from shardctl.tensors.manifest import Manifest

Torch = Any


class SourceReference:
    """The source's model, ready to score tokens."""

    def __init__(
        self, manifest: Manifest, reader: ByteReader, model: Model | None, config: Mapping[str, Any], architecture: str
    ) -> None:
        import torch

        kind = get_model_class(architecture)
        self.idle = (0, 0)
        """Experts that no token was sent to, and all."""
        with silence_transformers():
            try:
                self.model: Torch = kind.from_pretrained(
                    None,
                    config=build_config(kind, config, torch.float32),
                    state_dict=build_lazy_state_dict(manifest, reader, model),
                    dtype=torch.float32,
                    attn_implementation="eager",
                ).eval()
            except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
                raise UnsupportedError(
                    f"transformers cannot run the source: {' '.join(str(error).split())[:300]}"
                ) from error

    def list_special_tokens(self) -> tuple[int, list[int]]:
        """Return the size of the vocabulary and the tokens with a meaning of their own."""
        config = self.model.config.get_text_config()
        named = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
        flat = [token for each in named for token in (each if isinstance(each, list) else [each])]
        return int(config.vocab_size), [token for token in flat if isinstance(token, int)]

    def score_prompts(self, prompts: Sequence[Sequence[int]], tokens: int, dtype: str) -> list[TokenScores]:
        """Score every token of the vocabulary at each place of the prompts and of what the model continues with.

        Raises UnsupportedError for a model that computes NaN: no engine can be judged by that.
        """
        import torch

        self.model = self.model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        ids = torch.tensor(prompts)
        with torch.no_grad(), record_chosen_experts(self.model) as seen:
            for _ in range(tokens):
                logits = self.model(input_ids=ids, use_cache=False).logits
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            logits = self.model(input_ids=ids, use_cache=False).logits
        self.idle = count_idle_experts(self.model, seen)
        if bool(logits.isnan().any()):
            raise UnsupportedError(
                f"in {dtype}, the source itself computes logits that are not a number, so nothing can be compared with "
                "them"
            )
        scores, start = logits.float().log_softmax(-1).numpy(), len(prompts[0])
        return [
            TokenScores(tuple(every[: start - 1]), tuple(row[start:]), tuple(every[start - 1 : start - 1 + tokens]))
            for row, every in zip(ids.tolist(), scores, strict=True)
        ]
