"""Builds the manifest of a checkpoint of `torch.distributed.checkpoint`: weights, optimizer, and the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, format_first_few
from shardctl.libraries.dcp.items import ItemReader
from shardctl.libraries.dcp.keys import (
    SortedKeys,
    build_named_states,
    build_parameter_groups,
    find_steps_done,
    sort_keys,
)
from shardctl.libraries.dcp.numbered_states import NUMBERED_NOTE, name_parameters
from shardctl.libraries.dcp.save import DcpSave, count_writers
from shardctl.libraries.files.side_files import list_side_files
from shardctl.models.names.automodel_names import GROUPED_NOTE, build_grouped_arrays, names_groups
from shardctl.models.names.torchtitan_names import list_joined_names
from shardctl.models.names.trainer_arrays import bind_states
from shardctl.storage import read_bytes
from shardctl.tensors.manifest import Manifest, OpaqueObject, Region, TrainingState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardctl.base.settings import Setting
    from shardctl.libraries.dcp.metadata import DcpMetadata
    from shardctl.storage import Source
    from shardctl.tensors.manifest import CheckpointFile, Chunk, Tensor

_FLAT_PARAMETER_SUFFIX: Final = "_flat_param"
"""All parameters of a module of FSDP1 in one row; tensors beside them are ranks' views of them, saved as if whole."""
_TIE_COMPARISON_BYTES: Final = 4 << 10
"""Bytes of each box by which a tied weight, saved once for each name, is recognised: random weights differ in few."""


class DcpCollector:
    """Puts together what the metadata of one save, or of the two of a model and its optimizer, describe."""

    def __init__(self, source: Source, *, later: bool = False) -> None:
        """With `later`, items are compared with each other at the end, which is quicker, and tells less of a fault."""
        self.source = source
        self.items = ItemReader(source, later=later)
        self.files: dict[str, CheckpointFile] = {}
        self.warnings: list[str] = []
        self.objects: list[OpaqueObject] = []

    def manifest(self, name: str, model: Sequence[DcpMetadata], optimizer: Sequence[DcpMetadata]) -> Manifest:
        """Return the manifest of a source whose `model` may hold an optimizer, too.

        Several metadata are those of the ranks of one save.
        """
        saved = _SortedSave(self, model)
        flat = {key: name for key, name in saved.sorted.weights.items() if name.endswith(_FLAT_PARAMETER_SUFFIX)}
        self.objects += [OpaqueObject(key, "drop") for key in saved.sorted.weights if flat and key not in flat]
        weights = {name: saved.tensor(key, name) for key, name in (flat or saved.sorted.weights).items()}
        if not weights:
            what = "states of an optimizer, and no weights" if saved.sorted.states else "no tensors"
            raise SourceError(
                f"{self.source.name} holds {what}",
                hint="give the directory above, if the model was saved beside it" if saved.sorted.states else None,
            )
        trained = saved if not optimizer else _SortedSave(self, optimizer)
        training = trained.training(weights, saved)
        saves = (saved,) if trained is saved else (saved, trained)
        self.objects += [OpaqueObject(key, "drop") for save in saves for key in save.sorted.others]
        strange = [key for save in saves for key in save.sorted.strange]
        if strange:
            said = format_first_few(map(repr, strange))
            self.warnings.append(f"tensors that are neither weights nor an optimizer's are left behind: {said}")
        self.items.check_heads()
        read = {*self.files, *(m.path for m in (*model, *optimizer))}
        side, left = list_side_files(self.source, read)
        return Manifest(
            format=name,
            tensors=weights,
            files=dict(sorted(self.files.items())),
            objects=(*side, *self.objects),
            warnings=(*self.warnings, *left),
            training=training,
        )

    def add_optimizer(self, weights: Manifest, folder: str, metadata: Sequence[DcpMetadata]) -> Manifest:
        """Return `weights` with what a save of their optimizer in a `folder` holds; the folder is no side file then."""
        trained = _SortedSave(self, metadata)
        found = trained.training(weights.tensors, trained)
        own = {*self.files, *(each.path for each in metadata)}
        objects = [each for each in weights.objects if each.file not in own]
        objects += [OpaqueObject(key, "drop") for key in trained.sorted.others]
        left = f"{folder}/ is left behind"
        return replace(
            weights,
            files={**weights.files, **self.files},
            objects=tuple(objects),
            warnings=(*(each for each in weights.warnings if not each.startswith(left)), *self.warnings),
            training=replace(found, notes=(*found.notes, f"the optimizer is that of {folder}/")),
        )


class _SortedSave(DcpSave):
    """A save whose keys are sorted by what they are."""

    def __init__(self, collector: DcpCollector, metadata: Sequence[DcpMetadata]) -> None:
        super().__init__(collector.source, metadata, collector.items)
        self.collector = collector
        self.alone = len(metadata) == 1
        collector.files |= self.files
        objects = dict.fromkeys(key for each in metadata for key in each.objects)
        places = {key: way for each in metadata for key, way in each.places.items()}
        self.sorted: SortedKeys = sort_keys(self.tensors, objects, places)

    # What only a trainer needs

    def training(self, weights: Mapping[str, Tensor], model: _SortedSave) -> TrainingState:
        """Return optimizer states and settings; `weights` are those of the same training, by name, saved in `model`."""
        version = self.metadata[0].version
        arrays = {}
        if names_groups(self.sorted.states):
            arrays = build_grouped_arrays({name: tensor.shape for name, tensor in weights.items()})
        named = dict.fromkeys((*weights, *arrays, *list_joined_names(weights)))
        sorted_keys, notes = self.sorted, tuple(model.notes())
        members: dict[str, Setting] = {}
        numbered = self._name_numbered(weights, model)
        if numbered is not None:
            (sorted_keys, members), notes = numbered, (*notes, NUMBERED_NOTE)
        found = TrainingState(
            writer="torch.distributed.checkpoint" + (f" (format {version})" if version else ""),
            ranks=count_writers(model.collector.files),
            step=find_steps_done(sorted_keys, self.value),
            states=build_named_states(sorted_keys, named, self.tensors, self.tensor, self.collector.warnings),
            groups=build_parameter_groups(
                sorted_keys, named, lambda key: members[key] if key in members else self.value(key)
            ),
            notes=notes,
        )
        return bind_states(arrays, found, GROUPED_NOTE) if arrays else found

    def _name_numbered(
        self, weights: Mapping[str, Tensor], model: _SortedSave
    ) -> tuple[SortedKeys, dict[str, Setting]] | None:
        """Name parameters that are numbered, as accelerate 1.12 saves those of FSDP2; None if they are not.

        The planner notes the keys of the state dict in their order; the table of tensors has them as ranks wrote them.
        """
        if not any(parameter.isdecimal() for parameter, _ in self.sorted.states.values()):
            return None
        names = [model.sorted.weights.get(key, "") for each in model.metadata for key in each.places]
        ordered = {name: weights[name] for name in names if name in weights}
        if len(ordered) < len(weights):
            return None
        shapes = {key: declared.shape for key, declared in self.tensors.items()}
        given = name_parameters(self.sorted, ordered, shapes, self.value)
        return given or name_parameters(self.sorted, self._drop_copies(ordered), shapes, self.value)

    def _drop_copies(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Drop weights that hold what an earlier one of the same shape holds: tied ones, saved under each name."""
        kept: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            alike = (t for t in kept.values() if t.shape == tensor.shape and t.dtype == tensor.dtype)
            if len(tensor.shape) < len(("rows", "columns")) or not any(self._begin_alike(tensor, t) for t in alike):
                kept[name] = tensor
        return kept

    def _begin_alike(self, tensor: Tensor, other: Tensor) -> bool:
        """Return whether two tensors are cut alike and each box begins with the same bytes in both."""
        pairs = zip(tensor.chunks, other.chunks, strict=False)
        return len(tensor.chunks) == len(other.chunks) and all(
            a.box == b.box and self._read_head(a) == self._read_head(b) for a, b in pairs
        )

    def _read_head(self, chunk: Chunk) -> bytes:
        if not isinstance(chunk.where, Region):
            return b""
        size = min(chunk.dtype.nbytes(chunk.box.shape), _TIE_COMPARISON_BYTES)
        return read_bytes(self.collector.source, chunk.where.file, chunk.where.offset, size)

    def notes(self) -> Iterable[str]:
        """Return how the keys were understood."""
        yield from self.sorted.notes()
        if not self.alone:
            yield f"{len(self.metadata)} ranks saved without communicating; copies of a box must be equal"
