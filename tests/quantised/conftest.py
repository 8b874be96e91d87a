"""What the tests of quantised checkpoints share: tiny ones, each made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from codes import CODECS, LLAMA, encoded, plain_state, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def quantised(tmp_path_factory) -> Callable[[str], Path]:
    """Gives a Llama in the form of a codec; it is shared, so nobody may change it."""
    made: dict[str, Path] = {}

    def give(name: str) -> Path:
        if name not in made:
            codec = CODECS[name]
            config = {**LLAMA, "quantization_config": codec.settings}
            made[name] = write(tmp_path_factory.mktemp(name) / "source", config, encoded(codec, plain_state(LLAMA)))
        return made[name]

    return give
