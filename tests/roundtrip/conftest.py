"""What the round trips share: tiny saved models, each made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tiny_models import Tiny, config_of, save

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[..., Tiny]:
    """Gives a fixture's model, saved by transformers; it is shared, so nobody may change it."""
    made: dict[tuple[str, bool], Tiny] = {}

    def give(name: str, *, divisible: bool = True) -> Tiny:
        key = (name, divisible)
        if key not in made:
            made[key] = save(tmp_path_factory.mktemp(name) / "source", config_of(name, divisible=divisible))
        return made[key]

    return give
