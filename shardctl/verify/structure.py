"""Checks that need headers only: files, coverage, overlaps, names, shapes, the record, modes."""

from __future__ import annotations

import re
import stat
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import format_first_few
from shardctl.libraries.catalogue import is_served_layout
from shardctl.libraries.files.file_names import LOADED_SUFFIXES
from shardctl.models.names.binding import UNGATHERED_HINT, list_ungathered_weights
from shardctl.tensors.box import Box, BoxIndex, make_disjoint, subtract_indexed
from shardctl.tensors.manifest import ConstantFill
from shardctl.tensors.record import ATTESTATION, RECORD, hash_source_spans
from shardctl.tensors.training import STEP, split_state_name
from shardctl.tensors.turns import fold_box, fold_shape, unfold_tensors
from shardctl.verify.auxiliary_files import describe_loading, is_code
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from shardctl.storage import FileStat, Source
    from shardctl.tensors.manifest import Manifest, Tensor
    from shardctl.tensors.placement import PartitionSpec
    from shardctl.tensors.record import CheckpointRecord

    SpecFinder = Callable[[str], PartitionSpec | None]

_MAX_MISMATCHES_SHOWN: Final = 3
INDEX: Final = "index"
"""The check of indexes."""
_NUMBERED_SHARD_PATTERN: Final = re.compile(
    r"(?P<folder>(.*/)?)(?P<stem>model|pytorch_model|diffusion_pytorch_model)(\.[A-Za-z0-9_]+)?-[0-9]{5}-of-[0-9]{5}"
    r"\.(?P<suffix>safetensors|bin)"
)
"""Names that transformers and diffusers look up in an index; a variant such as `fp16` stands before the numbers."""
OPTIMIZER: Final = "optimizer"
"""The check of optimizer states."""
_ADAM_MOMENT_NAMES: Final = frozenset({"exp_avg", "exp_avg_sq"})


def check_files(record: CheckpointRecord, files: Mapping[str, FileStat]) -> Iterator[CheckFinding]:
    """Check that files named by `shardctl.json` are there in their sizes, and yield files that it does not name."""
    for path, size in record.files.items():
        if path not in files:
            yield CheckFinding("error", "files", f"{path} is missing; {RECORD} lists it with {size:,} bytes", file=path)
        elif files[path].size != size:
            found = files[path].size
            yield CheckFinding("error", "files", f"{path} has {found:,} bytes; {RECORD} says {size:,}", file=path)
    for path in files:
        if path not in record.files and path not in {RECORD, *ATTESTATION}:
            weights, read = path.endswith(LOADED_SUFFIXES), is_code(path) or is_served_layout(record.layout)
            why = ": a loader would take it for one" if weights else describe_loading(path) if read else ""
            message = f"{path} is not part of this checkpoint{why}"
            yield CheckFinding("error" if why else "warning", "files", message, file=path)


def check_hashes(record: CheckpointRecord, source: Source) -> Iterator[CheckFinding]:
    """Yield headers, indexes and side files whose bytes are not those that were written."""
    for path, hashed in record.hashes.items():
        if hash_source_spans(source, path, hashed.spans) != hashed:
            part = "" if hashed.spans == ((0, record.files[path]),) else "the header of "
            message = f"{part}{path} has changed: its SHA-256 is not the one in {RECORD}"
            yield CheckFinding("error", "hash", message, file=path)


def check_modes(root: Path, files: Mapping[str, FileStat]) -> Iterator[CheckFinding]:
    """Yield files that only their owner can read, next to others that everyone can."""
    modes = {path: (root / path).stat().st_mode for path in files if (root / path).is_file()}  # Orbax's arrays are none
    if not any(mode & stat.S_IROTH for mode in modes.values()):
        return
    for path, mode in modes.items():
        if not mode & stat.S_IROTH:
            yield CheckFinding(
                "warning", "modes", f"{path} has mode {stat.S_IMODE(mode):04o}; others cannot read it", file=path
            )


def check_gathered(manifest: Manifest) -> Iterator[CheckFinding]:
    """Yield weights of shape [0], whose elements are in no file."""
    empty = list_ungathered_weights(manifest.tensors)
    if empty:
        count = f"{len(empty):,} of {len(manifest.tensors):,} tensors"
        message = f"{count} have no elements ({format_first_few(empty)}); {UNGATHERED_HINT}"
        yield CheckFinding("error", "empty", message, tensor=empty[0])


def check_index(files: Collection[str], used: Collection[str]) -> Iterator[CheckFinding]:
    """Yield numbered files of transformers and diffusers beside a config that no index names: loaders refuse them.

    `used` are the files that hold the checkpoint's tensors.
    """
    for path in sorted(used):
        found = _NUMBERED_SHARD_PATTERN.fullmatch(path)
        if found is None or f"{found['folder']}config.json" not in files:
            continue
        head = f"{found['folder']}{found['stem']}"
        if f"{head}.{found['suffix']}" in files or any(
            name.startswith(f"{head}.") and name.endswith(".json") and ".index." in name for name in files
        ):
            continue
        message = (
            f"there is no {head}.{found['suffix']}.index.json beside {path}: from_pretrained refuses such a directory"
        )
        yield CheckFinding("error", INDEX, message, file=path)
        return


def check_coverage(manifest: Manifest, find_spec: SpecFinder | None = None) -> Iterator[CheckFinding]:
    """Yield elements stored nowhere, and chunks that overlap others in part; `find_spec` as in `find_overlaps`."""
    for tensor in manifest.tensors.values():
        if len(tensor.chunks) == 1 and tensor.chunks[0].box.shape == tensor.shape:
            continue
        (unfolded,) = unfold_tensors(tensor)
        yield from _find_holes(unfolded)
        yield from find_overlaps(unfolded, find_spec)


def _find_holes(tensor: Tensor) -> Iterator[CheckFinding]:
    index = BoxIndex([chunk.box for chunk in tensor.chunks])
    shape, files = list(fold_shape(tensor)), sorted(tensor.files)
    for left in subtract_indexed(Box.whole(tensor.shape), index)[:_MAX_MISMATCHES_SHOWN]:
        hole = fold_box(left, tensor.turns)
        yield CheckFinding(
            "error",
            "coverage",
            f"{tensor.name} {shape}: elements {hole} are stored in no file; the rest is in {format_first_few(files)}",
            tensor=tensor.name,
            box=str(hole),
        )


def find_overlaps(tensor: Tensor, find_spec: SpecFinder | None = None) -> Iterator[CheckFinding]:
    """Find the first place where two chunks overlap without being copies of each other, if there is one.

    `find_spec` says how a tensor is cut, by its name: a chunk that spans several sections is one of each. The last rank
    of a fused q|k|v whose only key/value head all ranks hold has its queries and that head in one chunk.

    Only chunks of one array in several files may not: an embedding that is whole in one array, and cut in that of a
    head that is tied to it, is stored twice on purpose, and so is a row that pads its own array.
    """
    if len(tensor.chunks) == 1:
        return
    arrays: dict[str, dict[Box, set[str]]] = {}
    for chunk in tensor.chunks:
        file = chunk.where.file if not isinstance(chunk.where, ConstantFill) else ""
        arrays.setdefault(chunk.name, {}).setdefault(chunk.box, set()).add(file)
    for places in arrays.values():
        boxes = list(places)
        if _are_copies_or_apart(boxes):
            continue
        spec = find_spec(tensor.name) if find_spec is not None else None
        if spec is not None and _are_copies_or_apart(_split_sections(boxes, spec)):
            continue
        index = BoxIndex(boxes)
        for position, box in enumerate(boxes):
            for other, common in index.find_overlaps(box):
                files = sorted(places[box] | places[boxes[other]])
                if other > position and len(files) > 1:
                    message = f"chunks {box} and {boxes[other]} overlap in {common} ({format_first_few(files)})"
                    yield CheckFinding(
                        "error",
                        "overlap",
                        f"{tensor.name} {list(tensor.shape)}: {message}",
                        tensor=tensor.name,
                        file=files[0],
                        box=str(common),
                    )
                    return  # one place a tensor is enough to look at


def _are_copies_or_apart(boxes: list[Box]) -> bool:
    return sum(box.size for box in boxes) == sum(part.size for _, part in make_disjoint(boxes))


def _split_sections(boxes: list[Box], spec: PartitionSpec) -> list[Box]:
    """Split boxes where a dim's sections end, which are cut each by itself; equal boxes are one."""
    for dim, cuts in enumerate(spec.cuts):
        for end in {end for cut in cuts for end in accumulate(section.size for section in cut.sections)}:
            boxes = [part for box in boxes for part in _split_box(box, dim, end)]
    return list(dict.fromkeys(boxes))


def _split_box(box: Box, dim: int, at: int) -> Iterator[Box]:
    if dim >= len(box.shape) or not box.origin[dim] < at < box.stop[dim]:
        yield box
        return
    extent = at - box.origin[dim]
    yield Box(box.origin, (*box.shape[:dim], extent, *box.shape[dim + 1 :]))
    behind = (*box.origin[:dim], at, *box.origin[dim + 1 :])
    yield Box(behind, (*box.shape[:dim], box.shape[dim] - extent, *box.shape[dim + 1 :]))


def check_record(record: CheckpointRecord, manifest: Manifest) -> Iterator[CheckFinding]:
    """Yield tensors, types, shapes and places as `shardctl.json` has them, against the headers."""
    for name, expected in record.tensors.items():
        tensor = manifest.tensors.get(name)
        if tensor is None:
            yield CheckFinding("error", "record", f"{name} is in {RECORD} but in no file", tensor=name)
            continue
        if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
            yield CheckFinding(
                "error",
                "record",
                f"{name} is {tensor.dtype} {list(tensor.shape)}; {RECORD} says {expected.dtype} {list(expected.shape)}",
                tensor=name,
            )
            continue
        found = {(c.where.file, c.name, c.box) for c in tensor.chunks if not isinstance(c.where, ConstantFill)}
        wanted = {(s.file, s.name, s.box) for s in expected.stored}
        for file, stored, box in sorted(wanted - found, key=str)[:_MAX_MISMATCHES_SHOWN]:
            message = f"{name} {box} should be in {file} as {stored}, and is not"
            yield CheckFinding("error", "record", message, tensor=name, file=file, box=str(box))
        for file, stored, box in sorted(found - wanted, key=str)[:_MAX_MISMATCHES_SHOWN]:
            message = f"{name} {box} is in {file} as {stored}, where {RECORD} has none"
            yield CheckFinding("error", "record", message, tensor=name, file=file, box=str(box))
    for name, tensor in manifest.tensors.items():
        if name not in record.tensors and not _is_shared_state(name, tensor, record):
            yield CheckFinding("error", "record", f"{name} is stored but not in {RECORD}", tensor=name)


def check_states(states: Iterable[str]) -> Iterator[CheckFinding]:
    """Yield parameters that lack a moment of Adam's which others have beside the same states.

    Other states are no reason: quantizing optimizers leave small parameters in fp32, and Adafactor has two forms.
    """
    kinds: dict[str, set[str]] = {}
    for name in states:
        state, parameter = split_state_name(name) or ("", name)
        kinds.setdefault(parameter, set()).add(state)
    every = {frozenset(each) for each in kinds.values()}
    for parameter, held in kinds.items():
        lacking = next((each - held - {STEP} for each in every if each > held and each - held - {STEP}), frozenset())
        if lacking and lacking <= _ADAM_MOMENT_NAMES:
            message = (
                f"{parameter} has no {' and '.join(sorted(lacking))}; other parameters have it beside the same states"
            )
            yield CheckFinding("error", OPTIMIZER, message, parameter)


def _is_shared_state(name: str, tensor: Tensor, record: CheckpointRecord) -> bool:
    """Return whether it is a state, such as a step, that an array of several parameters has once for all of them."""
    if split_state_name(name) is None:
        return False
    known = {(stored.file, stored.name) for each in record.tensors.values() for stored in each.stored}
    return all(not isinstance(c.where, ConstantFill) and (c.where.file, c.name) in known for c in tensor.chunks)
