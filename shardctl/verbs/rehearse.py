"""What `reshard` would do: its plan, and every check that needs no writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardctl.errors import AccessError, DestinationError
from shardctl.execute.staging import Staging
from shardctl.verbs.drafting import Wish, draft
from shardctl.verbs.opening import Reading, opened
from shardctl.verbs.plan import Planned, describe
from shardctl.verbs.reshard import check_apart

if TYPE_CHECKING:
    from shardctl.verbs.drafting import Draft


def rehearse(
    path: str | Path,
    destination: str | Path,
    wish: Wish | None = None,
    *,
    reading: Reading | None = None,
    overwrite: bool = False,
) -> Planned:
    """Work a conversion out, and raise what `reshard` would raise before its first byte."""
    with opened(path, reading) as checkpoint:
        destination = Path(destination)
        check_apart(checkpoint, destination)
        work = draft(checkpoint, wish or Wish())
        staging = Staging(destination, overwrite=overwrite)
        planned = describe(str(path), work, destination)
        _check_room(staging, work, planned)
        return planned


def _check_room(staging: Staging, work: Draft, planned: Planned) -> None:
    if staging.root.exists():
        staging.require_space(work.write_bytes)
        return
    place = staging.root.parent
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise AccessError(f"{place} cannot be written", hint="choose another destination")
    if planned.conversion.free_bytes < work.write_bytes:
        raise DestinationError(
            f"{staging.destination} needs {work.write_bytes:,} bytes, "
            f"but its file system has {planned.conversion.free_bytes:,} free",
            hint="free some space or choose another destination",
        )
