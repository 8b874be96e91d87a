"""Finds master weights and optimizer states in the flat partitions of all data-parallel ranks."""

from __future__ import annotations

import re
import struct
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.deepspeed.geometry import list_joined_runs, list_scattered_runs
from shardctl.libraries.deepspeed.optimizer_states import WEIGHTS, read_optimizer_state
from shardctl.libraries.deepspeed.values import FileArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.libraries.deepspeed.automatic_experts import AutomaticExperts
    from shardctl.libraries.deepspeed.checkpoint_pieces import CheckpointPieces
    from shardctl.libraries.deepspeed.files import DeepSpeedFiles
    from shardctl.libraries.deepspeed.geometry import ElementRun, FlatPartition
    from shardctl.libraries.deepspeed.model_states import ModelState
    from shardctl.libraries.deepspeed.optimizer_states import FlatGroup, OptimizerState
    from shardctl.libraries.deepspeed.pieces import TensorPieces
    from shardctl.storage import Source

_F32_DTYPE: Final = BY_NAME["F32"]

_EXPERT_NAME_PATTERN: Final = re.compile(r"(.*\.deepspeed_experts\.)([0-9]{1,9})(\..*)")


class _ExpertNames:
    """The experts that each rank of one model has, told from the names of parameters."""

    def __init__(self, state: ModelState, automatic: AutomaticExperts) -> None:
        self._path = state.path
        self._automatic = automatic
        self._turned = bool(state.config.get("use_data_before_expert_parallelism"))
        found: dict[str, set[str]] = {}
        for group in state.groups or ():
            for name in group:
                m = _EXPERT_NAME_PATTERN.fullmatch(name)
                if m is not None:
                    found.setdefault(m[1], set()).add(m[2])
        self._count = {prefix: len(numbers) for prefix, numbers in found.items()}
        """Experts of each layer on one rank."""

    def place(self, name: str, part: FlatPartition, held: OptimizerState, rank: int) -> tuple[str, int]:
        """Return what the whole model calls a parameter, and which rank of those that have parts of it has this one.

        That is the model-parallel `rank`, or the expert-parallel one for an array of experts.
        Raises UnsupportedError for parameters that are divided among ranks in a way that the names do not tell.
        """
        if part.divided == 1:
            return name, rank
        m = _EXPERT_NAME_PATTERN.fullmatch(name)
        automatic = self._automatic.holds(name)
        if m is None and not automatic:
            raise UnsupportedError(
                f"{held.path}: {name!r} is divided among {part.divided} kinds of ranks, and its name does not say how",
                hint="DeepSpeed's ds_to_universal.py makes a Universal Checkpoint of it, which shardctl reads",
            )
        if self._turned:
            raise UnsupportedError(
                f"{self._path} was saved with use_data_before_expert_parallelism, whose order of ranks is not known",
                hint="--weights module reads the experts' own files",
            )
        if m is None or automatic:
            return name, part.kind
        return f"{m[1]}{part.kind * self._count[m[1]] + int(m[2])}{m[3]}", rank


def read_partitions(
    source: Source,
    files: DeepSpeedFiles,
    models: Mapping[int, ModelState],
    found: CheckpointPieces,
    automatic: AutomaticExperts,
) -> None:
    """Read every `*_optim_states.pt`, and note where the parts of each parameter are.

    Raises:
        SourceError: a rank's file is missing, or files are of different saves.
    """
    for rank, state in models.items():
        own = {data: path for (model, data), path in files.optimizer.items() if model == rank}
        if not own:
            raise _build_missing_error(files, rank, 0)
        _RankPartitions(source, files, found, rank, state, automatic).read(own)


def add_number(pieces: TensorPieces, name: str, rank: int, number: FileArray | float) -> None:
    """Note a state that is one number; every data-parallel rank has the same, so one of them is enough."""
    if rank in pieces.held.get(name, {}):
        return
    if isinstance(number, FileArray):
        pieces.add_array(name, rank, number)
    else:
        pieces.add_fill(name, rank, _F32_DTYPE, struct.pack("<f", number))


class _RankPartitions:
    """One model-parallel rank: the files of all its data-parallel ranks."""

    def __init__(
        self,
        source: Source,
        files: DeepSpeedFiles,
        found: CheckpointPieces,
        rank: int,
        state: ModelState,
        automatic: AutomaticExperts,
    ) -> None:
        self.source = source
        self.files = files
        self.found = found
        self.rank = rank
        self.state = state
        if state.groups is None:
            raise SourceError(f"{state.path} does not say what is in the flat partitions (param_shapes)")
        self.groups = state.groups
        self.experts = _ExpertNames(state, automatic)
        self.members: list[dict[str, None]] = [{} for _ in self.groups]
        """The parameters of each flat group."""

    def read(self, paths: dict[int, str]) -> None:
        """Read the files of all data-parallel ranks."""
        least = min(paths)
        first = read_optimizer_state(self.source, paths[least], least, self.state.data_parallel or max(paths) + 1)
        for data in range(first.world):
            if data not in paths:
                raise _build_missing_error(self.files, self.rank, data)
        if max(paths) >= first.world:
            raise SourceError(
                f"{paths[max(paths)]} is there, but the checkpoint is of {first.world} data-parallel ranks",
                hint="a file of an earlier save was left in the folder; move it away",
            )
        self.found.kind = f"ZeRO stage {first.stage}" if first.stage is not None else "BF16_Optimizer"
        self.found.world, self.found.clipping = first.world, first.clipping
        lengths = [flats.length for flats in first.groups]
        for data, path in sorted(paths.items()):
            held = first if data == least else read_optimizer_state(self.source, path, data, first.world)
            self._check_alike(first, held, lengths)
            for number, flats in enumerate(held.groups):
                self._add(number, flats, held)
        for number, (groups, values) in enumerate(first.settings):
            names, _ = self.found.groups.setdefault(number, ({}, values))
            for group in groups:
                names |= self.members[group]

    def _check_alike(self, first: OptimizerState, held: OptimizerState, lengths: list[int]) -> None:
        if (held.stage, held.world) != (first.stage, first.world):
            raise SourceError(f"{first.path} and {held.path} are of different saves")
        if len(held.groups) != len(self.groups):
            raise SourceError(
                f"{held.path} has {len(held.groups)} flat partitions, but {self.state.path} describes "
                f"{len(self.groups)}",
                hint="the model's and the optimizer's files are of different saves",
            )
        for number, flats in enumerate(held.groups):
            if held.stage != WEIGHTS and flats.length != lengths[number]:
                raise SourceError(
                    f"{held.path}: group {number} is in parts of {flats.length:,} elements, but of "
                    f"{lengths[number]:,} in {first.path}",
                    hint="the files are of different saves",
                )

    def _add(self, number: int, flats: FlatGroup, held: OptimizerState) -> None:
        """Note where the parameters of one group are in the parts of one data-parallel rank."""
        shapes = self.groups[number]
        if held.stage == WEIGHTS:
            runs = dict(list_scattered_runs(shapes, flats.part))
        else:
            runs = dict(list_joined_runs(shapes, flats.part, flats.length, flats.paddings))
            _check_mapped(held.path, runs, flats)
        places = {name: self.experts.place(name, flats.part, held, self.rank) for name in shapes}
        called = dict.fromkeys(name for name, _ in places.values())
        self.found.parameters |= called
        self.members[number] |= called
        for name, shape in shapes.items():
            if not prod(shape):
                self.found.master.empty(*places[name], shape, flats.master.dtype)
        arrays = [(self.found.master, flats.master)]
        arrays += [(self.found.state(state), array) for state, array in flats.states.items()]
        numbers = [(self.found.state(state), value) for state, value in flats.numbers.items()]
        for name, run in runs.items():
            for pieces, array in arrays:
                pieces.add_run(*places[name], shapes[name], array, run)
            for pieces, value in numbers:
                add_number(pieces, *places[name], value)
        self.found.others += [(f"{state} of group {number}", held.path) for state in flats.strange]


def _check_mapped(path: str, runs: dict[str, ElementRun], flats: FlatGroup) -> None:
    """Hold what the shapes say against what the file itself says of its parameters."""
    if not flats.mapped:
        return
    own = {name: (run.stop - run.start, run.at) for name, run in runs.items()}
    if own != flats.mapped:
        name = next(n for n in {**own, **flats.mapped} if own.get(n) != flats.mapped.get(n))
        raise SourceError(
            f"{path} has {name!r} at (length, start) {flats.mapped.get(name)}, where the shapes of the parameters say "
            f"{own.get(name)}",
            hint="the model's and the optimizer's files are of different saves",
        )


class MissingRankError(SourceError):
    """A rank's file is not there."""


def _build_missing_error(files: DeepSpeedFiles, rank: int, data: int) -> MissingRankError:
    known = next(iter(files.optimizer.values()))
    prefix = known[: known.index("zero_pp_rank_")]
    return MissingRankError(
        f"{prefix}zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt is missing, with a part of the parameters' "
        "master weights",
        hint="a rank's file was not copied, or its save did not finish; --weights module needs none, up to stage 2",
    )
