"""Plans what `reshard` would do, and makes every check that needs no writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardctl.base.errors import AccessError
from shardctl.base.result_view import ResultView
from shardctl.base.value import value_class
from shardctl.conversion.conversion_plan import prepare_source_options
from shardctl.conversion.engine.staging import StagingArea
from shardctl.conversion.measured_conversion import measure_planned
from shardctl.conversion.preparing import open_conversion
from shardctl.options import DestinationOptions, ReshardOptions
from shardctl.planning.plan_result import describe_conversion
from shardctl.storage.cloud import is_bucket
from shardctl.storage.free_space import find_existing_parent
from shardctl.storage.hub import is_hub_address

if TYPE_CHECKING:
    from shardctl.conversion.plan_file import PlanFile
    from shardctl.options import SourceOptions
    from shardctl.planning.plan_result import PlanResult


@value_class
class RehearsalResult(ResultView):
    """What `reshard` would write."""

    plan: PlanResult
    """The conversion, and what each rank would hold."""
    destination: str

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        return self.plan.describe_writing(self.destination)


def rehearse_reshard(
    path: str | Path,
    destination: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    source_options: SourceOptions | None = None,
    destination_options: DestinationOptions | None = None,
    plan: PlanFile | None = None,
) -> PlanResult:
    """Work a conversion out, and raise what `reshard` would raise before its first byte; `plan` as it has it."""
    wanted = reshard_options or (plan.reshard_options if plan else ReshardOptions())
    source_options = prepare_source_options(source_options or (plan.source_options if plan else None), wanted)
    overwrite = (destination_options or DestinationOptions()).overwrite
    with open_conversion(path, destination, reshard_options, source_options, plan) as work:
        if is_bucket(destination):
            from shardctl.conversion.bucket_output import check_bucket

            return describe_conversion(
                str(path), measure_planned(work), check_bucket(work, destination, overwrite=overwrite)
            )
        if is_hub_address(destination):
            from shardctl.conversion.hub_output import check_branch

            options = destination_options or DestinationOptions()
            return describe_conversion(str(path), measure_planned(work), check_branch(work, destination, options))
        staging = StagingArea(Path(destination), overwrite=overwrite)
        planned = describe_conversion(str(path), measure_planned(work), Path(destination))
        place = find_existing_parent(staging.root.parent)
        if not staging.root.exists() and not os.access(place, os.W_OK | os.X_OK):
            raise AccessError(f"{place} cannot be written", hint="choose another destination")
        staging.require_space(work.required_space)
        return planned
