"""What files of ranks hold beside the weights: optimizer states by parameter, settings, the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.errors import SourceError
from shardctl.formats.dcp.items import float_or_int
from shardctl.formats.dcp.keys import settings_groups, split_flat
from shardctl.manifest import Region
from shardctl.storage import read
from shardctl.training import Training, as_setting, as_steps, state_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.formats.dcp.keys import Sorted
    from shardctl.formats.pickled_ranks.checkpoint import Collector
    from shardctl.formats.rank_files import RankFile
    from shardctl.manifest import Tensor
    from shardctl.training import Setting

_STEPS: Final = ("step", "global_step", "iteration", "global_steps")
_NUMBERS: Final = frozenset({"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8"})


def training(
    collector: Collector,
    found: Sorted,
    weights: Mapping[str, Tensor],
    files: Sequence[RankFile],
    ranks: int,
    notes: Sequence[str],
) -> Training:
    """States and settings among what was collected; `files` are those that may hold states.

    States of parameters that are not among `weights`, by name, are left behind with a warning.
    """
    states: dict[str, Tensor] = {}
    strange: list[str] = []
    for key, (parameter, state) in found.states.items():
        if key not in collector.held:
            continue
        if not parameter:
            parameter, state = split_flat(state, weights)  # noqa: PLW2901 - told apart at last
        if parameter not in weights:
            strange.append(key)
            continue
        name = state_name(state, parameter)
        if name in states:
            raise SourceError(
                f"{key!r} and {states[name].chunks[0].name!r} are both the state {state} of {parameter}",
                hint="several optimizers of one model cannot be told apart",
            )
        states[name] = collector.tensor(key, name, files)
    if strange:
        why = "their parameters are numbered, not named" if _numbered(found, strange) else "their weights are not here"
        collector.warnings.append(f"{len(strange)} optimizer states such as {strange[0]!r} are left behind: {why}")
    return Training(
        writer="torch.save on each rank",
        ranks=ranks,
        step=_step(collector, found),
        states=states,
        groups=settings_groups(found, weights, lambda key: _value(collector, key)) if states else (),
        notes=tuple(notes),
    )


def _numbered(found: Sorted, keys: Sequence[str]) -> bool:
    return all(found.states[key][0].isdecimal() for key in keys)


def _step(collector: Collector, found: Sorted) -> int | None:
    named = [key for key in found.others if key.rpartition(".")[2] in _STEPS]
    steps = [key for key, (_, state) in found.states.items() if state.rpartition(".")[2] == "step"]
    for key in (*named, *steps[:1]):
        done = as_steps(_value(collector, key))
        if done is not None:
            return done
    return None


def _value(collector: Collector, key: str) -> Setting:
    """A number, a text or a list of those; also a number in a tensor. None for anything else."""
    held = collector.held.get(key)
    if held is None:
        found = as_setting(collector.objects.get(key))
        return found[0] if found is not None else None
    where = held.chunks[0].where
    if held.shape or held.dtype.name not in _NUMBERS or not isinstance(where, Region):
        return None
    return float_or_int(held.dtype.name, read(collector.source, where.file, where.offset, held.dtype.unit_bytes))
