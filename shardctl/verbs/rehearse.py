"""What `reshard` would do: its plan, and every check that needs no writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardctl.errors import AccessError, DestinationError
from shardctl.execute.staging import Staging
from shardctl.storage.cloud import is_bucket
from shardctl.storage.room import existing, free_space
from shardctl.verbs.drafting import Wish, draft, understood
from shardctl.verbs.opening import Reading, opened
from shardctl.verbs.plan import describe
from shardctl.verbs.reshard import check_apart

if TYPE_CHECKING:
    from shardctl.verbs.drafting import Draft
    from shardctl.verbs.plan import Planned
    from shardctl.verbs.plan_file import PlanFile


def rehearse(
    path: str | Path,
    destination: str | Path,
    wish: Wish | None = None,
    *,
    reading: Reading | None = None,
    overwrite: bool = False,
    plan: PlanFile | None = None,
) -> Planned:
    """Work a conversion out, and raise what `reshard` would raise before its first byte; `plan` as it has it."""
    wanted = wish or (plan.wish if plan else Wish())
    with opened(path, understood(reading or (plan.reading if plan else None), wanted)) as checkpoint:
        check_apart(checkpoint, destination)
        work = plan.drafted(checkpoint, wish or plan.wish) if plan else draft(checkpoint, wish or Wish())
        if isinstance(destination, str) and is_bucket(destination):
            from shardctl.verbs.into_bucket import check_bucket, with_sending

            work = with_sending(work)
            scratch = check_bucket(work, destination, overwrite=overwrite)
            return describe(str(path), work, scratch)
        destination = Path(destination)
        staging = Staging(destination, overwrite=overwrite)
        planned = describe(str(path), work, destination)
        _check_room(staging, work)
        return planned


def _check_room(staging: Staging, work: Draft) -> None:
    if staging.root.exists():
        staging.require_space(work.write_bytes)
        return
    place = existing(staging.root.parent)
    if not os.access(place, os.W_OK | os.X_OK):
        raise AccessError(f"{place} cannot be written", hint="choose another destination")
    free = free_space(place)
    if free is not None and free < work.write_bytes:
        raise DestinationError(
            f"{staging.destination} needs {work.write_bytes:,} bytes, but its file system has {free:,} free",
            hint="free some space or choose another destination",
        )
