"""Pairs two checkpoints, the reference and the one to check, and fills the places of a model from each."""

from __future__ import annotations

import threading
from dataclasses import field
from typing import TYPE_CHECKING, Any

from shardctl.base.errors import format_first_few
from shardctl.base.value import state_class, value_class
from shardctl.running.device import is_cuda_device
from shardctl.running.forward.adapter import set_start_values
from shardctl.running.forward.lazy_state_dict import StoredTensor, build_entries, build_lazy_state_dict
from shardctl.running.forward.places import list_places
from shardctl.running.forward.rank_runner import RankRunner
from shardctl.running.forward.rank_views import build_rank_views
from shardctl.running.forward.shards import CheckpointShards
from shardctl.running.forward.team import RankTeam
from shardctl.running.forward.weights import ModelWeights, list_unfilled_slots, place_weights
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.models import Model
    from shardctl.running.dispatch import CheckpointDispatch
    from shardctl.running.forward.executor import ModelExecutor
    from shardctl.running.forward.lazy_state_dict import LazyTensor
    from shardctl.tensors.bands import ByteReader
    from shardctl.tensors.manifest import Manifest
    from shardctl.tensors.mesh import Mesh


@value_class
class OriginalCheckpoint:
    """The checkpoint that is right."""

    stored: Manifest
    """Under the names of its files, if transformers is to understand them by itself; else under canonical names."""
    manifest: Manifest
    """Under canonical names, where the model is known."""
    reader: ByteReader
    config: Mapping[str, Any] | None
    model: Model | None = None
    folder: Path | None = None
    """Where its tokenizer is."""
    before: OriginalCheckpoint | None = None
    """The checkpoint as it was before it was quantized, if it was."""


@value_class
class CandidateCheckpoint:
    """The checkpoint that is to be proved."""

    manifest: Manifest
    reader: ByteReader
    model: Model | None = None
    mesh: Mesh | None = None
    """None, or one device, if its files belong to no ranks."""
    stages: tuple[int, ...] = ()
    """Layers per pipeline stage, as the record has them."""
    config: Mapping[str, Any] | None = None
    """Its own config, if that is not the original's: it is then run with that as well."""
    config_changes: tuple[str, ...] = ()
    """The settings in which its own config is not the original's."""
    overflow_allowed: bool = False
    """Whether its record says that weights became infinite with permission."""
    dispatch: CheckpointDispatch | None = None
    """Where its blocks were placed, if they were: each is run there."""


@state_class
class _CountingReader:
    """A reader that counts."""

    reader: ByteReader
    nbytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        self.reader.read_at(path, offset, into)
        with self.lock:
            self.nbytes += len(into)


@state_class
class ComparedSides:
    """Both, and what is odd about them."""

    original: OriginalCheckpoint
    candidate: CandidateCheckpoint
    team: RankTeam = field(default_factory=RankTeam)
    notes: list[str] = field(default_factory=list)
    findings: list[CheckFinding] = field(default_factory=list)
    _readers: tuple[_CountingReader, _CountingReader] = field(init=False)

    def __post_init__(self) -> None:
        self._readers = _CountingReader(self.original.reader), _CountingReader(self.candidate.reader)

    @property
    def read_bytes(self) -> int:
        """Bytes read from both so far."""
        return sum(reader.nbytes for reader in self._readers)

    def fill(self, executor: ModelExecutor) -> tuple[ModelWeights, ModelWeights]:
        """Return the weights of the source and of the shards, with what neither has in place for good."""
        source = self._open_source(executor)
        shards = self._open_shards(executor)
        self._round_source(source, shards)
        if source.unused:
            told = "1 tensor is" if len(source.unused) == 1 else f"{len(source.unused)} tensors are"
            self.notes.append(f"{told} not part of the class and not used: {format_first_few(source.unused)}")
        for have, lack in ((source, shards), (shards, source)):
            for slot in have.direct | have.converted:
                if not lack.has_weights_for(slot):
                    name = slot.names[0]
                    message = f"nothing in the {lack.title} fills {name}, but the {have.title} fills it"
                    self.findings.append(CheckFinding("error", "forward", message, name))
        self._spread(executor, shards)
        self._start(executor, source)
        return source, shards

    def _spread(self, executor: ModelExecutor, shards: ModelWeights) -> None:
        """Have each part of the model run where its weights were placed; those on no device run on the main one."""
        dispatch = self.candidate.dispatch
        if dispatch is None:
            return
        tensors = self.candidate.manifest.tensors
        names = {called: name for name, tensor in tensors.items() for called in (name, *tensor.ties)}
        for unit in executor.skeleton.units:
            stored = [
                names.get(lazy.name)
                for slot in unit.slots
                for lazy in (
                    [shards.direct[slot]]
                    if slot in shards.direct
                    else shards.groups.get(shards.converted.get(slot, ""), {}).values()
                )
            ]
            places = [dispatch.find_place(tensors[name]) for name in stored if name is not None]
            device = next((place for place in places if place is not None and is_cuda_device(place)), None)
            if device is not None and device != executor.precision.device:
                executor.skeleton.move_unit(unit, device)

    def _open_source(self, executor: ModelExecutor) -> ModelWeights:
        """Return the right checkpoint, as transformers itself reads its names.

        Else as shardctl does, and that is noted.
        """
        skeleton, conversion = executor.skeleton, executor.conversion
        found = place_weights(
            "source", skeleton, build_lazy_state_dict(self.original.stored, self._readers[0]), conversion
        )
        model = self.original.model
        if conversion.problem:
            self.notes.append(conversion.problem)
        if model is None or not model.family or not (found.groups or conversion.problem):
            return found
        bound = build_lazy_state_dict(self.original.manifest, self._readers[0], model)
        if conversion.problem:
            self.notes.append("the names of the source are read by shardctl, not by transformers")
            return place_weights("source", skeleton, bound, conversion)
        self._join(found, bound, executor)
        return found

    def _join(self, source: ModelWeights, bound: Mapping[str, LazyTensor], executor: ModelExecutor) -> None:
        """Take arrays that are too large to be made at once as shardctl joins them."""
        taken = set()
        for slot, group in list(source.converted.items()):
            size = slot.empty.numel() * executor.precision.dtype.itemsize
            if size > executor.precision.limit and group in bound and bound[group].shape == slot.shape:
                del source.converted[slot]
                source.direct[slot] = bound[group]
                taken.add(group)
        if taken:
            self.notes.append(f"{len(taken)} arrays of experts of the source were joined by shardctl, not transformers")

    def _open_shards(self, executor: ModelExecutor) -> ModelWeights:
        """Return the checkpoint to be proved, each rank's part from its own files where there are ranks."""
        reader, model, mesh = self._readers[1], self.candidate.model, self.candidate.mesh
        shards: CheckpointShards | None = None
        if mesh is not None and mesh.world > 1:
            if model is not None:
                manifest, stages = self.candidate.manifest, self.candidate.stages
                shards = CheckpointShards.of(manifest, reader, model, mesh, stages, self.team)
            else:
                self.notes.append("the model is not known, so shards were joined as their headers say")
        named = model if model is not None and model.family else None
        if shards is not None:
            entries: Mapping[str, LazyTensor] = shards.entries()
        elif self.candidate.dispatch is not None:
            entries = build_entries(self.candidate.manifest, named, self.candidate.dispatch.build_tensor)
        else:
            entries = build_lazy_state_dict(self.candidate.manifest, reader, named)
        return place_weights("shards", executor.skeleton, entries, executor.conversion, shards=shards)

    def gather_ranks(self, executor: ModelExecutor, shards: ModelWeights) -> RankRunner | None:
        """Return the ranks, each with its own weights; None if none computes with a part."""
        if shards.shards is None:
            return None
        meeting = self.team.open_meeting(len(list_places(shards.shards.placed.mesh)))
        views = build_rank_views(shards.shards, executor.skeleton, executor.conversion, meeting.here)
        return RankRunner(views, meeting, executor.precision, executor.values) if views is not None else None

    def cut_source(self, executor: ModelExecutor, source: ModelWeights, shards: ModelWeights) -> RankRunner | None:
        """Return ranks that have the source's weights where the mesh puts them; None if its names are not known."""
        manifest, held, like = self.original.manifest, shards.shards, executor.ranks
        if held is None or like is None or not held.manifest.tensors.keys() <= manifest.tensors.keys():
            return None

        def give(name: str, called: str) -> LazyTensor:
            return StoredTensor(manifest.tensors[name], self._readers[0], called)

        views = build_rank_views(held, executor.skeleton, executor.conversion, like.meeting.here, give)
        if views is None:
            return None
        for view in views.views:
            view.weights.rounded = source.rounded
        return RankRunner(views, like.meeting, executor.precision, executor.values, like.joined)

    def _round_source(self, source: ModelWeights, shards: ModelWeights) -> None:
        """Round the source as the shards were, so that a cast that was asked for is no error."""
        kinds = {slot: lazy for slot, lazy in shards.direct.items() if lazy.is_floating_point()}
        narrower = {
            kinds[slot].get_dtype()
            for slot, lazy in source.direct.items()
            if slot in kinds and kinds[slot].get_dtype() != lazy.get_dtype()
        }
        if narrower:
            source.rounded = lambda slot: kinds[slot].dtype if slot in kinds else None
            self.notes.append(f"the source is rounded to {', '.join(sorted(narrower))}, as the shards are")

    def _start(self, executor: ModelExecutor, source: ModelWeights) -> None:
        """Give what the source does not have the values that the class starts with."""
        new = [slot for slot in list_unfilled_slots(executor.skeleton, source) if not slot.is_buffer]
        if new:
            set_start_values(executor.skeleton.model, new)
            names = [slot.names[0] for slot in new]
            self.notes.append(
                f"{len(new)} parameters are in no file and have the values of a new model: {format_first_few(names)}"
            )
