"""Writes `.metadata` files that torch would not: with torch's own classes, changed before they are pickled."""

from __future__ import annotations

import pickle
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata


def changed(fixture: Path, place: Path, change: Callable[[Metadata], object], protocol: int = 4) -> Path:
    """A copy of a checkpoint whose metadata `change` has altered, or replaced by what it returns."""
    shutil.copytree(fixture, place)
    metadata = pickle.loads((place / ".metadata").read_bytes())  # noqa: S301 - our own fixture
    metadata = change(metadata) or metadata
    (place / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    return place


class Runs:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function: object, *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args
