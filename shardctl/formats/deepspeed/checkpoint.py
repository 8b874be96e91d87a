"""The manifest of a checkpoint that a DeepSpeed engine saved: weights, optimizer states, and what is left behind."""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.dtype import BY_NAME
from shardctl.errors import SourceError, UnsupportedError
from shardctl.formats.deepspeed.geometry import Run, joined, scattered
from shardctl.formats.deepspeed.model_states import read_model_state
from shardctl.formats.deepspeed.optimizer_states import WEIGHTS, read_optimizer_state
from shardctl.formats.deepspeed.pieces import Pieces
from shardctl.formats.deepspeed.values import Array
from shardctl.formats.side_files import side_files
from shardctl.manifest import File, Manifest, Opaque
from shardctl.training import Group, Training, state_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.formats.deepspeed.files import Files
    from shardctl.formats.deepspeed.model_states import ModelState
    from shardctl.formats.deepspeed.optimizer_states import Flats, OptimizerState
    from shardctl.formats.format import Weights
    from shardctl.manifest import Tensor
    from shardctl.storage import Source
    from shardctl.training import Setting

_FLOAT: Final = BY_NAME["F32"]
_SHOWN: Final = 3


class Reader:
    """Reads the files of one checkpoint."""

    def __init__(self, source: Source, files: Files, weights: Weights) -> None:
        self.source = source
        self.files = files
        self.weights = weights
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.stage: int | None = None
        self.world = 1
        """Data-parallel ranks."""
        self.version = ""
        self.models = self._models()
        self.module = Pieces()
        """The module's own copy of weights, and what has no other."""
        self.master = Pieces()
        """The optimizer's."""
        self.states: dict[str, Pieces] = {}
        """By state, under the names of parameters."""
        self.groups: dict[int, tuple[dict[str, None], dict[str, Setting]]] = {}
        """The parameters of each group, in order, and its settings."""
        self.ties: dict[str, str] = {}
        """Other names of tied weights, and the one under which each is held."""
        self.parameters: dict[str, None] = {}
        """Those that the optimizer has."""

    def _models(self) -> dict[int, ModelState]:
        """The module's state of each model-parallel rank; at stage 3 that of its first data-parallel one."""
        chosen: dict[int, str] = {}
        for (rank, data), path in sorted(self.files.model.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
            plain = self.files.model.get((rank, None))
            if data is not None and plain is not None:
                raise SourceError(f"{plain} and {path} are of different saves", hint="move one of them away")
            chosen.setdefault(rank, path)
        known = {rank for rank, _ in self.files.optimizer} | set(chosen)
        for rank in range(max(known, default=0) + 1):
            if rank not in chosen:
                raise SourceError(
                    f"{self.files.folder}mp_rank_{rank:02d}_model_states.pt is missing, which names the parameters",
                    hint="a rank's file was not copied, or its save did not finish",
                )
        return {rank: read_model_state(self.source, path) for rank, path in chosen.items()}

    def manifest(self, name: str) -> Manifest:
        """Read everything but tensor data."""
        self._read_optimizer()
        self._read_modules()
        weights = self._weights()
        training = self._training()
        used = {file for t in (*weights.values(), *training.states.values()) for file in t.files}
        own = {*self.files.model.values(), *self.files.optimizer.values(), *self.files.experts.values()}
        own |= {*self.files.layers.values(), *self.files.others}
        own |= {path for path in self.source.files() if path in {"latest", "latest_universal"}}
        side, left = side_files(self.source, own)
        return Manifest(
            format=name,
            tensors=weights,
            files={path: File(path, self.source.files()[path].size) for path in sorted(used)},
            objects=(*side, *self._left_behind()),
            warnings=(*self.warnings, *left),
            training=training,
        )

    def _left_behind(self) -> Iterator[Opaque]:
        seen = set()
        for state in self.models.values():
            for key in state.others:
                if key not in seen:
                    seen.add(key)
                    yield Opaque(key, "drop", file=state.path)

    # What the optimizer has

    def _read_optimizer(self) -> None:
        for rank, state in self.models.items():
            self.version = self.version or state.version
            own = {data: path for (model, data), path in self.files.optimizer.items() if model == rank}
            if own:
                self._read_partitions(rank, state, own)
            elif self.files.optimizer:
                raise self._missing(rank, 0)

    def _read_partitions(self, rank: int, state: ModelState, paths: dict[int, str]) -> None:
        """The files of all data-parallel ranks of one model-parallel rank."""
        if state.groups is None:
            raise SourceError(f"{state.path} does not say what is in the flat partitions (param_shapes)")
        least = min(paths)
        first = read_optimizer_state(self.source, paths[least], least, state.data_parallel or max(paths) + 1)
        for data in range(first.world):
            if data not in paths:
                raise self._missing(rank, data)
        if max(paths) >= first.world:
            raise SourceError(
                f"{paths[max(paths)]} is there, but the checkpoint is of {first.world} data-parallel ranks",
                hint="a file of an earlier save was left in the folder; move it away",
            )
        self.stage, self.world = first.stage, first.world
        lengths: dict[int, int] = {}
        for data, path in sorted(paths.items()):
            found = first if data == least else read_optimizer_state(self.source, path, data, first.world)
            if (found.stage, found.world) != (first.stage, first.world):
                raise SourceError(f"{first.path} and {found.path} are of different saves")
            if len(found.groups) != len(state.groups):
                raise SourceError(
                    f"{found.path} has {len(found.groups)} flat partitions, but {state.path} describes "
                    f"{len(state.groups)}"
                )
            for number, (shapes, flats) in enumerate(zip(state.groups, found.groups, strict=True)):
                if self.stage != WEIGHTS and lengths.setdefault(number, flats.length) != flats.length:
                    raise SourceError(
                        f"{found.path}: group {number} is in parts of {flats.length:,} elements, but of "
                        f"{lengths[number]:,} in {first.path}"
                    )
                self._add_flats(rank, shapes, flats, found.path)
            self._add_settings(state, found)

    def _missing(self, rank: int, data: int) -> SourceError:
        known = next(iter(self.files.optimizer.values()))
        prefix = known[: known.index("zero_pp_rank_")]
        return SourceError(
            f"{prefix}zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt is missing, with a part of every "
            "parameter's master weights",
            hint="a rank's file was not copied, or its save did not finish",
        )

    def _add_flats(self, rank: int, shapes: dict[str, tuple[int, ...]], flats: Flats, path: str) -> None:
        """Note where the parameters of one group are in the parts of one data-parallel rank."""
        self.parameters |= dict.fromkeys(shapes)
        if self.stage == WEIGHTS:
            runs = dict(scattered(shapes, flats.part))
        else:
            runs = dict(joined(shapes, flats.part, flats.length, flats.paddings))
            _check_mapped(path, runs, flats)
        for name, shape in shapes.items():
            if not prod(shape):
                self.master.empty(name, rank, shape, flats.master.dtype)
        for name, run in runs.items():
            self.master.add_run(name, rank, shapes[name], flats.master, run)
            for state, array in flats.states.items():
                self.states.setdefault(state, Pieces()).add_run(name, rank, shapes[name], array, run)
            for state, number in flats.numbers.items():
                self._add_number(state, name, rank, number)
        if flats.strange:
            self.warnings.append(
                f"{path}: states that are no tensors of parameters are left behind: {flats.strange[0]!r}"
            )

    def _add_number(self, state: str, name: str, rank: int, number: Array | float) -> None:
        """Note a state that is one number for all of a group; every rank has the same."""
        pieces = self.states.setdefault(state, Pieces())
        if rank in pieces.held.get(name, {}):
            return
        if isinstance(number, Array):
            pieces.add_array(name, rank, number)
        else:
            pieces.add_fill(name, rank, _FLOAT, struct.pack("<f", number))

    def _add_settings(self, state: ModelState, found: OptimizerState) -> None:
        for number, (members, values) in enumerate(found.settings):
            names, _ = self.groups.setdefault(number, ({}, values))
            for member in members:
                names |= dict.fromkeys((state.groups or [])[member])

    # What the module has

    def _read_modules(self) -> None:
        for rank, state in self.models.items():
            for name, array in state.module.items():
                if self._is_real(name, array, state):
                    self.module.add_array(name, rank, array)
            self._read_frozen(rank, state)
            self._find_ties(state)

    def _is_real(self, name: str, array: Array, state: ModelState) -> bool:
        """Whether the module holds it itself: stage 3 leaves empty tensors in place of parameters."""
        shape = next((group[name] for group in state.groups or () if name in group), None)
        shape = state.frozen_shapes.get(name) if shape is None else shape
        return shape is None or array.shape == shape

    def _read_frozen(self, rank: int, state: ModelState) -> None:
        """Parameters that are not trained: whole at stage 2; at stage 3 each rank's file has a part."""
        for name, array in state.frozen.items():
            if state.frozen_shapes.get(name) == array.shape and name not in self.module.held:
                self.module.add_array(name, rank, array)
        parted = [n for n in state.frozen_shapes if n not in self.module.held]
        if not parted:
            return
        for data in range(self.world):
            path = self.files.model.get((rank, data))
            if path is None:
                raise SourceError(
                    f"{self.files.folder}zero_pp_rank_{data}_mp_rank_{rank:02d}_model_states.pt is missing, "
                    f"with a part of {len(parted)} frozen parameters such as {parted[0]!r}",
                    hint="a rank's file was not copied, or its save did not finish",
                )
            held = state if path == state.path else read_model_state(self.source, path)
            for name in parted:
                self._add_frozen(name, rank, data, held)

    def _add_frozen(self, name: str, rank: int, data: int, state: ModelState) -> None:
        array, shape = state.frozen.get(name), state.frozen_shapes.get(name)
        if array is None or shape is None:
            raise SourceError(f"{state.path} lacks its part of the frozen parameter {name!r}")
        size = prod(shape)
        share = -(-size // self.world)
        start, stop = min(data * share, size), min((data + 1) * share, size)
        if not size:
            self.module.empty(name, rank, shape, array.dtype)
        elif start < stop:
            self.module.add_run(name, rank, shape, array, Run(start, stop, 0))

    def _find_ties(self, state: ModelState) -> None:
        """Names that share one storage, and those that the file says are shared."""
        places: dict[object, str] = {}
        for name in self.parameters:
            if name in state.module and state.module[name].size:
                places[state.module[name]] = name
        for name, array in state.module.items():
            if array.size and name in self.module.held:
                holder = places.setdefault(array, name)
                if holder != name:
                    self.ties[name] = holder
        for alias, name in state.shared.items():
            if alias not in self.parameters and alias not in self.ties and alias != name:
                self.ties[alias] = name

    # What it all is

    def _weights(self) -> dict[str, Tensor]:
        order = dict.fromkeys(name for state in self.models.values() for name in (*state.module, *state.frozen_shapes))
        order |= self.parameters
        ties: dict[str, list[str]] = {}
        for alias, name in self.ties.items():
            ties.setdefault(name, []).append(alias)
        use_master = self._uses_master()
        found = {}
        for name in order:
            if name in self.ties:
                continue
            pieces = self.master if use_master and name in self.master.held else self.module
            if name not in pieces.held:
                raise SourceError(f"{name!r} is in no file of the checkpoint")
            found[name] = pieces.tensor(name, name, ties=tuple(ties.get(name, ())))
        if not found:
            raise SourceError(f"{self.source.name} holds no weights")
        return found

    def _uses_master(self) -> bool:
        """Which copy of the weights is read; raises UnsupportedError if the one that was asked for is not there."""
        absent = [name for name in self.parameters if name not in self.module.held]
        if self.weights == "module" and absent:
            raise UnsupportedError(
                f"--weights module, but the module's own copy of {len(absent)} parameters such as {absent[0]!r} is not "
                f"in the checkpoint: at stage {self.stage} ranks save only their parts of the fp32 master",
                hint="leave --weights out, and add --dtype bf16 if that is what is wanted",
            )
        if self.weights == "master" and not self.master.held:
            raise UnsupportedError(
                "--weights master, but the checkpoint has no master weights", hint="leave --weights out"
            )
        if not self.master.held:
            return False
        kinds = {str(p.dtype) for n, by in self.module.held.items() if n in self.parameters for p in by.values()}
        own = f"the module's own copy ({', '.join(sorted(kinds))})"
        if self.weights == "module":
            self.notes.append(f"weights are {own}, not the optimizer's fp32 master")
            return False
        other = f"; --weights module reads {own}" if kinds and not absent else ""
        self.notes.append(f"weights are the optimizer's fp32 master{other}")
        return True

    def _training(self) -> Training:
        states: dict[str, Tensor] = {}
        for name in self.parameters:
            for state, pieces in self.states.items():
                if name in pieces.held:
                    called = state_name(state, name)
                    states[called] = pieces.tensor(name, called)
        stage = f"ZeRO stage {self.stage}" if self.stage is not None else "BF16_Optimizer, without ZeRO"
        ways = f"{self.world} data-parallel" + (f" x {len(self.models)} model-parallel" if len(self.models) > 1 else "")
        self.notes.insert(0, f"{stage}, {ways} ranks")
        return Training(
            writer=f"DeepSpeed {self.version}".rstrip(),
            ranks=self.world * len(self.models),
            step=next((s.steps for s in self.models.values() if s.steps is not None), None),
            states=states,
            groups=tuple(Group(tuple(names), values) for names, values in self.groups.values()),
            notes=tuple(self.notes),
        )


def _check_mapped(path: str, runs: dict[str, Run], flats: Flats) -> None:
    """Hold what the geometry says against what the file itself says of its parameters."""
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
