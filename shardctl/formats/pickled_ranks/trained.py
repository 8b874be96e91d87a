"""What files of ranks hold beside the weights: optimizer states by parameter, settings, the step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardctl.formats.dcp.items import NUMBERS, float_or_int
from shardctl.formats.dcp.keys import named_states, settings_groups, steps_done
from shardctl.manifest import Region, Training
from shardctl.settings import as_setting
from shardctl.storage import read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.formats.dcp.keys import Sorted
    from shardctl.formats.pickled_ranks.checkpoint import Collector
    from shardctl.formats.rank_files import RankFile
    from shardctl.manifest import Tensor
    from shardctl.settings import Setting


def training(
    collector: Collector,
    found: Sorted,
    weights: Mapping[str, Tensor],
    files: Sequence[RankFile],
    ranks: int,
) -> Training:
    """States and settings among what was collected; `files` are those that may hold states.

    States of parameters that are not among `weights`, by name, are left behind with a warning.
    """
    made, value = partial(collector.tensor, files=files), partial(_value, collector)
    states = named_states(found, weights, collector.held, made, collector.warnings)
    return Training(
        writer="torch.save on each rank",
        ranks=ranks,
        step=steps_done(found, value),
        states=states,
        groups=settings_groups(found, weights, value) if states else (),
        notes=found.notes(),
    )


def _value(collector: Collector, key: str) -> Setting:
    """A number, a text or a list of those; also a number in a tensor. None for anything else."""
    held = collector.held.get(key)
    if held is None:
        found = as_setting(collector.objects.get(key))
        return found[0] if found is not None else None
    where = held.chunks[0].where
    if held.shape or held.dtype.name not in NUMBERS or not isinstance(where, Region):
        return None
    return float_or_int(held.dtype.name, read(collector.source, where.file, where.offset, held.dtype.unit_bytes))
