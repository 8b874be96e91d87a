"""The manifest of a checkpoint of `torch.distributed.checkpoint`: weights, optimizer, and what else was saved."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.box import Box
from shardctl.dtype import BY_TORCH
from shardctl.errors import HostileError, SourceError, UnsupportedError
from shardctl.formats.dcp.items import Items
from shardctl.formats.dcp.keys import Sorted, settings_groups, sort_keys, split_flat
from shardctl.formats.impostors import refuse_unfinished
from shardctl.formats.links import check_link
from shardctl.formats.side_files import side_files
from shardctl.manifest import Chunk, File, Fill, Manifest, Opaque, Tensor
from shardctl.training import Training, state_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardctl.dtype import DType
    from shardctl.formats.dcp.metadata import Declared, Item, Metadata
    from shardctl.storage import Source
    from shardctl.training import Setting

METADATA: Final = ".metadata"
SUFFIX: Final = ".distcp"
_FLAT: Final = "_flat_param"
"""All parameters of a module of FSDP1 in one row; tensors beside them are ranks' views of them, saved as if whole."""
_RANK: Final = re.compile(r"__([0-9]{1,9})_[0-9]{1,9}\.distcp")
_STEPS: Final = ("train_state.step", "step", "global_step", "iteration", "trainer_state.global_step")
"""Keys under which trainers keep the number of steps."""
_SHOWN: Final = 3
_COMPARED: Final = 1_000_000
"""Comparisons of boxes in one checkpoint; tensors that are cut alike are looked at once, and take one for each box."""


class Collector:
    """Puts together what the metadata of one save, or of the two of a model and its optimizer, describe."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.items = Items(source)
        self.files: dict[str, File] = {}
        self.warnings: list[str] = []
        self.objects: list[Opaque] = []

    def manifest(self, name: str, model: Sequence[Metadata], optimizer: Sequence[Metadata]) -> Manifest:
        """The manifest of a source whose `model` may hold an optimizer, too.

        Several metadata are those of the ranks of one save.
        """
        saved = _Save(self, model)
        flat = {key: name for key, name in saved.sorted.weights.items() if name.endswith(_FLAT)}
        self.objects += [Opaque(key, "drop") for key in saved.sorted.weights if flat and key not in flat]
        weights = {name: saved.tensor(key, name) for key, name in (flat or saved.sorted.weights).items()}
        if not weights:
            what = "states of an optimizer, and no weights" if saved.sorted.states else "no tensors"
            raise SourceError(
                f"{self.source.name} holds {what}",
                hint="give the directory above, if the model was saved beside it" if saved.sorted.states else None,
            )
        trained = saved if not optimizer else _Save(self, optimizer)
        training = trained.training(weights, saved)
        saves = (saved,) if trained is saved else (saved, trained)
        self.objects += [Opaque(key, "drop") for save in saves for key in save.sorted.others]
        strange = [key for save in saves for key in save.sorted.strange]
        if strange:
            shown = ", ".join(map(repr, strange[:_SHOWN]))
            more = f" and {len(strange) - _SHOWN} more" if len(strange) > _SHOWN else ""
            self.warnings.append(f"tensors that are neither weights nor an optimizer's are left behind: {shown}{more}")
        read = {*self.files, *(m.path for m in (*model, *optimizer))}
        side, left = side_files(self.source, read)
        return Manifest(
            format=name,
            tensors=weights,
            files=dict(sorted(self.files.items())),
            objects=(*side, *self.objects),
            warnings=(*self.warnings, *left),
            training=training,
        )


class _Save:
    """What one call of `torch.distributed.checkpoint.save` wrote."""

    def __init__(self, collector: Collector, metadata: Sequence[Metadata]) -> None:
        self.collector = collector
        self.metadata = metadata
        self.alone = len(metadata) == 1
        self.tensors = _united(metadata)
        objects = dict.fromkeys(key for each in metadata for key in each.objects)
        places = {key: way for each in metadata for key, way in each.places.items()}
        self.sorted: Sorted = sort_keys(self.tensors, objects, places)
        self._check_items()

    def _check_items(self) -> None:
        """Every file is there, every item inside it, and no two share a byte."""
        by_file: dict[str, list[tuple[int, int, str]]] = {}
        for each in self.metadata:
            for (key, _), item in each.items.items():
                by_file.setdefault(item.file, []).append((item.offset, item.end, key))
        files = self.collector.source.files()
        missing = sorted(path for path in by_file if path not in files)
        if missing:
            more = f" and {len(missing) - 1} more files are" if len(missing) > 1 else " is"
            keys = sorted({key for _, _, key in by_file[missing[0]]})
            raise SourceError(
                f"{missing[0]}{more} missing, with parts of {len(keys)} entries such as {keys[0]!r}",
                hint="a rank's file was not copied, or its save did not finish",
            )
        for path, spans in by_file.items():
            self._check_file(path, sorted(spans))

    def _check_file(self, path: str, spans: list[tuple[int, int, str]]) -> None:
        source = self.collector.source
        refuse_unfinished(source, path)
        check_link(source, path)
        size, free = source.files()[path].size, 0
        for offset, end, key in spans:
            if end > size:
                raise SourceError(
                    f"{path} has {size:,} bytes, but {key!r} should reach byte {end:,}",
                    hint="the file was truncated or its copy is incomplete; fetch it again",
                )
            if offset < free:
                raise HostileError(f"{path}: {key!r} at byte {offset:,} lies inside another entry")
            free = end
        self.collector.files[path] = File(path, size)

    def tensor(self, key: str, name: str) -> Tensor:
        """The tensor of a key, called `name`."""
        declared = self.tensors[key]
        dtype = BY_TORCH.get(declared.dtype)
        if dtype is None:
            raise UnsupportedError(f"{key!r} has the type torch.{declared.dtype}, which safetensors cannot hold")
        chunks = tuple(self._chunks(key, declared, dtype))
        if not chunks and 0 in declared.shape:
            chunks = (Chunk(Box.whole(declared.shape), dtype, Fill(bytes(dtype.unit_bytes)), key),)
        return Tensor(name, dtype, declared.shape, chunks)

    def _chunks(self, key: str, declared: Declared, dtype: DType) -> Iterable[Chunk]:
        if dtype.unit_elements > 1:
            raise UnsupportedError(f"{key!r} is {dtype}, of which several elements share a byte")
        for each in self.metadata:
            for box in each.tensors[key].boxes if key in each.tensors else ():
                if box.size or (box.shape == declared.shape and (key, box.origin) in each.items):
                    item = self._item(each, key, box.origin)
                    yield Chunk(box, dtype, self.collector.items.region(item, key, dtype, box.shape), key)
        if not declared.boxes and 0 not in declared.shape:
            raise SourceError(f"{key!r} {list(declared.shape)} is described without a box that holds any of it")

    def _item(self, metadata: Metadata, key: str, origin: tuple[int, ...] | None) -> Item:
        item = metadata.items.get((key, origin))
        if item is None:
            raise SourceError(f"{metadata.path} does not say where {key!r} at {list(origin or ())} is")
        return item

    # What only a trainer needs

    def training(self, weights: Mapping[str, Tensor], model: _Save) -> Training:
        """Optimizer states and settings; `weights` are those of the same training, by name, saved in `model`."""
        states: dict[str, Tensor] = {}
        strange: list[str] = []
        for key, (parameter, state) in self.sorted.states.items():
            if not parameter:
                parameter, state = split_flat(state, weights)  # noqa: PLW2901 - told apart at last
            if parameter not in weights or key not in self.tensors:
                strange.append(key)
                continue
            name = state_name(state, parameter)
            if name in states:
                raise SourceError(
                    f"{key!r} and {states[name].chunks[0].name!r} are both the state {state} of {parameter}",
                    hint="several optimizers of one model cannot be told apart",
                )
            states[name] = self.tensor(key, name)
        if strange:
            self.collector.warnings.append(
                f"{len(strange)} optimizer states such as {strange[0]!r} are left behind: their weights are not here"
            )
        ranks = {m[1] for path in model.collector.files if (m := _RANK.fullmatch(path.rpartition("/")[2]))}
        version = self.metadata[0].version
        return Training(
            writer="torch.distributed.checkpoint" + (f" (format {version})" if version else ""),
            ranks=len(ranks) or None,
            step=self._step(),
            states=states,
            groups=settings_groups(self.sorted, weights, self._value),
            notes=tuple(model.notes()),
        )

    def notes(self) -> Iterable[str]:
        """How the keys were understood."""
        if self.sorted.model:
            yield f"weights are named by what follows {'.'.join(self.sorted.model)!r} in the keys"
        if not self.alone:
            yield f"{len(self.metadata)} ranks saved without talking to each other; copies of a box must be equal"

    def _step(self) -> int | None:
        named = [key for key in self.sorted.others if key.endswith(_STEPS)]
        steps = [key for key, (_, state) in self.sorted.states.items() if state.rpartition(".")[2] == "step"]
        for key in (*named, *steps[:1]):
            value = self._value(key)
            if isinstance(value, int | float) and value == int(value):
                return int(value)
        return None

    def _value(self, key: str) -> Setting:
        """A number or text that was saved under a key, as an object or as a tensor of one element."""
        for each in self.metadata:
            if key in each.tensors and each.tensors[key].shape == ():
                return self.collector.items.number(self._item(each, key, ()), key, each.tensors[key].dtype)
            if (key, None) in each.items:
                found = self.collector.items.value(each.items[key, None])
                return found[0] if found is not None else None
        return None


def _united(metadata: Sequence[Metadata]) -> dict[str, Declared]:
    """Every tensor, its boxes disjoint but for copies of one that several ranks saved each by itself."""
    found: dict[str, Declared] = {}
    for each in metadata:
        for key, declared in each.tensors.items():
            other = found.setdefault(key, declared)
            if (other.dtype, other.shape) != (declared.dtype, declared.shape):
                raise SourceError(
                    f"{key!r} is {other.dtype} {list(other.shape)} for one rank and {declared.dtype} "
                    f"{list(declared.shape)} in {each.path}"
                )
    layouts: dict[tuple[Box, ...], str] = {}
    for key, declared in found.items():
        boxes = declared.boxes
        if len(metadata) > 1:
            boxes = tuple(dict.fromkeys(b for each in metadata if key in each.tensors for b in each.tensors[key].boxes))
        layouts.setdefault(boxes, key)
    compared = 0
    for boxes, key in layouts.items():
        compared += _check_disjoint(key, boxes, _COMPARED - compared)
    return found


def _check_disjoint(key: str, boxes: tuple[Box, ...], most: int) -> int:
    """Compare boxes that begin before another ends, along the dim that tells most apart; returns how often.

    Raises HostileError for two that overlap, or if it would take more than `most` comparisons.
    """
    filled = [box for box in boxes if box.size]
    dims = range(len(filled[0].origin)) if filled else range(0)
    dim = max(dims, key=lambda d: len({box.origin[d] for box in filled}), default=None)
    if dim is not None:
        filled.sort(key=lambda box: box.origin[dim])
    compared = 0
    open_boxes: list[Box] = []
    for box in filled:
        if dim is not None:
            open_boxes = [other for other in open_boxes if other.stop[dim] > box.origin[dim]]
        compared += len(open_boxes) + 1
        if compared > most:
            raise HostileError(f"{key!r} has {len(boxes):,} boxes in an order that nobody saves and that takes long")
        for other in open_boxes:
            common = box.intersect(other)
            if common is not None:
                raise HostileError(
                    f"{key!r}: the boxes {other} and {box} overlap in {common}",
                    hint="torch refuses to save such a checkpoint; which of the two is right nobody can say",
                )
        open_boxes.append(box)
    return compared
