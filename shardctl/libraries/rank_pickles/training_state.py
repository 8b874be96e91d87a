"""Reads what files of ranks hold besides weights: optimizer states by parameter, settings, the step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardctl.base.settings import as_setting
from shardctl.libraries.dcp.items import NUMBERS, decode_number
from shardctl.libraries.dcp.keys import build_named_states, build_parameter_groups, find_steps_done
from shardctl.libraries.dcp.numbered_states import NUMBERED_NOTE, name_parameters
from shardctl.storage import read_bytes
from shardctl.tensors.manifest import Region, TrainingState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.base.settings import Setting
    from shardctl.libraries.dcp.keys import SortedKeys
    from shardctl.libraries.files.rank_files import RankFileName
    from shardctl.libraries.rank_pickles.checkpoint import RankCollector
    from shardctl.tensors.manifest import Tensor


def collect_training(
    collector: RankCollector,
    found: SortedKeys,
    weights: Mapping[str, Tensor],
    files: Sequence[RankFileName],
    ranks: int,
) -> TrainingState:
    """Collect states and settings among what was collected; `files` are those that may hold states.

    States of parameters that are not among `weights`, by name, are left behind with a warning.
    """
    made, value = partial(collector.tensor, files=files), partial(_read_value, collector)
    shapes = {key: held.shape for key, held in collector.held.items()}
    notes = found.notes()
    named = name_parameters(found, weights, shapes, value)
    members: dict[str, Setting] = {}
    if named is not None:
        found, members = named
        notes = (*notes, NUMBERED_NOTE)
    states = build_named_states(found, weights, collector.held, made, collector.warnings)
    groups = build_parameter_groups(found, weights, lambda key: members[key] if key in members else value(key))
    return TrainingState(
        writer="torch.save on each rank",
        ranks=ranks,
        step=find_steps_done(found, value),
        states=states,
        groups=groups if states else (),
        notes=notes,
    )


def _read_value(collector: RankCollector, key: str) -> Setting:
    """Read a number, a text or a list of those; also a number in a tensor. None for anything else."""
    held = collector.held.get(key)
    if held is None:
        found = as_setting(collector.objects.get(key))
        return found[0] if found is not None else None
    where = held.chunks[0].where
    if held.shape or held.dtype.name not in NUMBERS or not isinstance(where, Region):
        return None
    return decode_number(held.dtype.name, read_bytes(collector.source, where.file, where.offset, held.dtype.unit_bytes))
