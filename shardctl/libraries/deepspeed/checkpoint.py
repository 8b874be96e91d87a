"""Builds the manifest of a DeepSpeed checkpoint: weights, optimizer states, and what is left out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.deepspeed.automatic_experts import AutomaticExperts
from shardctl.libraries.deepspeed.checkpoint_pieces import CheckpointPieces
from shardctl.libraries.deepspeed.gpt_neox_ranks import (
    build_dialect,
    collect_rank_tensors,
    is_buffer,
    is_gpt_neox,
    rename_layer,
)
from shardctl.libraries.deepspeed.model_states import collect_tensors
from shardctl.libraries.deepspeed.modules import read_models, read_modules
from shardctl.libraries.deepspeed.partitions import MissingRankError, read_partitions
from shardctl.libraries.deepspeed.tensor_parallel import ParallelPartitions
from shardctl.libraries.deepspeed.universal import read_universal
from shardctl.libraries.deepspeed.without_zero import read_optimizer
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.torch_save.reading import open_saved
from shardctl.tensors.manifest import CheckpointFile, Manifest, OpaqueObject, ParameterGroup, TrainingState
from shardctl.tensors.training import format_state_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.libraries.deepspeed.files import DeepSpeedFiles
    from shardctl.libraries.deepspeed.model_states import ModelState
    from shardctl.libraries.deepspeed.pieces import TensorPieces
    from shardctl.libraries.reader import Weights
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Tensor

_LATEST_TAG_FILES = frozenset({"latest", "latest_universal"})

_TIED_MODULE_PATTERN: Final = re.compile(r"tied_modules\.[^.]+\.(.+)")


class DeepSpeedReader:
    """Reads the files of one checkpoint."""

    def __init__(self, source: Source, files: DeepSpeedFiles, weights: Weights) -> None:
        self.source = source
        self.files = files
        self.weights = weights
        self.models = read_models(source, files)
        self.found = CheckpointPieces()
        self.cuts = ParallelPartitions(self.models, files)
        self.experts = AutomaticExperts(self.models)

    def manifest(self, name: str) -> Manifest:
        """Read everything but tensor data."""
        found, files = self.found, self.files
        if files.universal:
            read_universal(self.source, files, self.models, found)
        elif files.optimizer:
            self._read_partitions()
        elif any(state.groups is not None for state in self.models.values()):
            self._skip_optimizer("the optimizer's files are not here")
        else:
            found.world = max((state.data_parallel or 1 for state in self.models.values()), default=1)
            for rank, state in self.models.items():
                read_optimizer(rank, state, found)
        read_modules(self.source, files, self.models, found, self.experts)
        _read_layers(self.source, files, self.models, found)
        master = self._uses_master()
        weights = (
            self._collect_gpt_neox(use_master=master) if self.is_gpt_neox else self._build_weights(use_master=master)
        )
        training = self._build_training_state(use_master=master)
        used = {file for t in (*weights.values(), *training.states.values()) for file in t.files}
        own = {*files.list_paths(), *(path for path in self.source.files() if path in _LATEST_TAG_FILES)}
        side, left = list_side_files(self.source, own)
        return Manifest(
            format=name,
            tensors=weights,
            files={path: CheckpointFile(path, self.source.files()[path].size) for path in sorted(used)},
            objects=(*side, *(OpaqueObject(key, "drop", file=path) for key, path in dict.fromkeys(found.others))),
            warnings=(*found.warnings, *left),
            training=training,
            dialect=build_dialect(weights, self.cuts.ranks) if self.is_gpt_neox else None,
        )

    def _collect_gpt_neox(self, *, use_master: bool) -> dict[str, Tensor]:
        """Collect what each tensor-parallel rank has of a model of GPT-NeoX."""
        found, ranks = self.found, self.cuts.ranks
        names = dict.fromkeys((*found.module.held, *found.parameters))
        if any(map(is_buffer, names)):
            found.others.append(("rotary_emb.inv_freq", self.files.folder.rstrip("/")))

        def choose_pieces(name: str) -> TensorPieces:
            return found.master if use_master and name in found.master.held else found.module

        kept = [name for name in names if name not in found.ties and not is_buffer(name)]
        weights = collect_rank_tensors(kept, choose_pieces, ranks)
        if ranks > 1 and found.states:
            found.warnings.append(
                f"the optimizer's states of {ranks} tensor-parallel ranks are left behind: each rank has norms and "
                "biases of its own, which become one tensor, but their states do not"
            )
            found.states = {}
        return weights

    def _read_partitions(self) -> None:
        try:
            read_partitions(self.source, self.files, self.models, self.found, self.experts)
        except MissingRankError as error:
            if self.weights != "module":
                raise
            self._skip_optimizer(error.message)

    def _skip_optimizer(self, why: str) -> None:
        """Go on without the optimizer, whose files are not complete."""
        self.found.forget_optimizer()
        self.found.kind = "without the optimizer"
        self.found.world = max((state.data_parallel or 1 for state in self.models.values()), default=1)
        self.found.warnings.append(f"the optimizer is left behind: {why}")
        for state in self.models.values():
            for group in state.groups or ():
                self.found.parameters |= dict.fromkeys(group)

    @property
    def is_gpt_neox(self) -> bool:
        """Whether GPT-NeoX trained it, whose ranks' parts its schema puts together."""
        return is_gpt_neox((*self.found.module.held, *self.found.parameters))

    # Which copy

    def _uses_master(self) -> bool:
        """Return whether the optimizer's copy is read.

        Raises UnsupportedError if the one that was asked for is not there.
        """
        found = self.found
        absent = [name for name in found.parameters if name not in found.module.held]
        if self.weights == "module" and absent:
            raise UnsupportedError(
                f"--weights module was given, but the module's own copy of {len(absent)} parameters "
                f"such as {absent[0]!r} is not "
                f"in the checkpoint ({found.kind}); at stage 3 ranks save only their parts of the fp32 master",
                hint="leave --weights out, and add --dtype bf16 if you want 16-bit weights",
            )
        if self.weights == "master" and not found.master.held:
            raise UnsupportedError(
                "--weights master was given, but the checkpoint has no master weights of its own",
                hint="leave --weights out: without ZeRO an engine that trains in fp32 has one copy only",
            )
        return bool(found.master.held) and self.weights != "module"

    def _build_notes(self, *, use_master: bool) -> tuple[str, ...]:
        found = self.found
        ways = f"{found.world} data-parallel"
        if len(self.models) > 1:
            ways += f" x {len(self.models)} model-parallel"
        notes = [f"{found.kind}, {ways} rank{'s' if found.world * len(self.models) > 1 else ''}"]
        kinds = {
            str(local.dtype)
            for name in found.parameters
            for local in found.module.held.get(name, {}).values()
            if name in found.module.held
        }
        own = f"the module's own copy ({', '.join(sorted(kinds))})"
        if use_master:
            whole = all(name in found.module.held for name in found.parameters)
            other = f"; --weights module reads {own}" if whole else ""
            notes.append(f"weights are the optimizer's fp32 master{other}")
        elif found.master.held:
            notes.append(f"weights are {own}, not the optimizer's fp32 master")
        return tuple(notes)

    # What it all is

    def _build_weights(self, *, use_master: bool) -> dict[str, Tensor]:
        found = self.found
        order = dict.fromkeys(name for state in self.models.values() for name in (*state.module, *state.frozen_shapes))
        order |= dict.fromkeys((*found.module.held, *found.parameters))
        ties: dict[str, list[str]] = {}
        for alias, name in found.ties.items():
            ties.setdefault(name, []).append(alias)
        weights = {}
        for name in order:
            if name in found.ties:
                continue
            pieces = found.master if use_master and name in found.master.held else found.module
            if name not in pieces.held:
                raise SourceError(
                    f"{name!r} is in no file of the checkpoint",
                    hint="at stage 3 the *_optim_states.pt of all ranks are needed; else a file was not copied",
                )
            weights[name] = self._tensor(pieces, name, name, tuple(ties.get(name, ())))
        for alias, name in found.ties.items():
            if name not in weights:
                raise SourceError(f"{alias!r} shares its elements with {name!r}, which is in no file of the checkpoint")
        if not weights:
            raise SourceError(f"{self.source.name} holds no weights")
        return weights

    def _tensor(self, pieces: TensorPieces, name: str, called: str, ties: tuple[str, ...] = ()) -> Tensor:
        cut = None
        if self.experts.holds(name) and not self.files.universal:
            cut = self.experts.cut(name, pieces.shapes(name), by_expert=pieces is self.found.module)
        elif pieces is self.found.module or not self.files.universal:  # the converter put the others together
            cut = self.cuts.cut(name, pieces.shapes(name), trained=name in self.found.parameters)
        return pieces.tensor(name, called, cut, ties)

    def _build_training_state(self, *, use_master: bool) -> TrainingState:
        found = self.found
        rename = rename_layer if self.is_gpt_neox else str
        states = {}
        for name in found.parameters:
            for state, pieces in found.states.items():
                if name in pieces.held:
                    called = format_state_name(state, rename(name))
                    states[called] = self._tensor(pieces, name, called)
        versions = [state.version for state in self.models.values() if state.version]
        return TrainingState(
            writer=f"DeepSpeed {versions[0]}" if versions else "DeepSpeed",
            ranks=found.world * len(self.models),
            step=next((s.steps for s in self.models.values() if s.steps is not None), None),
            states=states,
            groups=tuple(ParameterGroup(tuple(map(rename, names)), values) for names, values in found.groups.values()),
            clipping=found.clipping,
            notes=self._build_notes(use_master=use_master),
        )


def _read_layers(
    source: Source, files: DeepSpeedFiles, models: Mapping[int, ModelState], found: CheckpointPieces
) -> None:
    """Note what each layer's file has, under the names that the whole pipeline has for it.

    Layers that are tied have a name in common; each of their files has a copy.
    """
    shapes = {name: shape for state in models.values() for group in state.groups or () for name, shape in group.items()}
    tied: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in shapes.items():
        m = _TIED_MODULE_PATTERN.fullmatch(name)
        if m is not None:
            tied.setdefault((m[1], shape), []).append(name)
    for (layer, rank), path in sorted(files.layers.items()):
        saved = open_saved(source, path)
        held, others = collect_tensors(saved, saved.tree)
        for local, array in held.items():
            name = f"{layer}.{local}"
            known = tied.get((local, array.shape), [])
            if name not in shapes and len(known) == 1:
                name = known[0]
            found.module.add_array(name, rank, array)
        found.others += [(key, path) for key in others]
