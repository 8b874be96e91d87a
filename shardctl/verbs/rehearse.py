"""What `reshard` would do: its plan, and every check that needs no writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardctl.errors import AccessError
from shardctl.execute.staging import Staging
from shardctl.options import ReshardOptions
from shardctl.storage.cloud import is_bucket
from shardctl.storage.room import existing
from shardctl.verbs.drafting import understood
from shardctl.verbs.plan import describe
from shardctl.verbs.preparing import worked_out

if TYPE_CHECKING:
    from shardctl.options import SourceOptions
    from shardctl.verbs.plan import Planned
    from shardctl.verbs.plan_file import PlanFile


def rehearse(
    path: str | Path,
    destination: str | Path,
    wish: ReshardOptions | None = None,
    *,
    reading: SourceOptions | None = None,
    overwrite: bool = False,
    plan: PlanFile | None = None,
) -> Planned:
    """Work a conversion out, and raise what `reshard` would raise before its first byte; `plan` as it has it."""
    wanted = wish or (plan.wish if plan else ReshardOptions())
    reading = understood(reading or (plan.reading if plan else None), wanted)
    with worked_out(path, destination, wish, reading, plan) as work:
        if is_bucket(destination):
            from shardctl.verbs.into_bucket import check_bucket

            return describe(str(path), work, check_bucket(work, destination, overwrite=overwrite))
        staging = Staging(Path(destination), overwrite=overwrite)
        planned = describe(str(path), work, Path(destination))
        place = existing(staging.root.parent)
        if not staging.root.exists() and not os.access(place, os.W_OK | os.X_OK):
            raise AccessError(f"{place} cannot be written", hint="choose another destination")
        staging.require_space(work.write_bytes)
        return planned
