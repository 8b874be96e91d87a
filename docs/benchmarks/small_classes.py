"""Makes tiny models of transformers' own classes, from their own configs with small sizes, and saves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import transformers

from shardctl.running.small_model import build_small_model, fill_randomly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def list_generative_classes() -> Iterator[str]:
    """List the names of the classes that can generate, bases left out."""
    for name in sorted(dir(transformers)):
        kind = getattr(transformers, name, None) if not name.endswith("PreTrainedModel") else None
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and kind.can_generate():
            yield name


def save_tiny_model(architecture: str, folder: Path) -> None:
    """Save a small model of a class with random weights, norms and biases included; raises what the class raises."""
    model = build_small_model(getattr(transformers, architecture))
    fill_randomly(model)
    model.save_pretrained(folder)
