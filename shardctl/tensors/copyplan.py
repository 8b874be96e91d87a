"""Plans a copy between two manifests, and proves that stored bytes fill every box that is wanted.

>>> from shardctl.base.dtype import BY_NAME
>>> from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, Region, Tensor
>>> def store(file: str, offset: int) -> Manifest:  # four numbers, somewhere in a file
...     chunk = Chunk(Box((0,), (4,)), BY_NAME["F32"], Region(file, offset, (4,)))
...     tensors = {"w": Tensor("w", BY_NAME["F32"], (4,), (chunk,))}
...     return Manifest("safetensors", tensors, {file: CheckpointFile(file, offset + 16)})
>>> plan = join_manifests(store("old", 8), store("new", 64))  # raises CoverageError if any wanted box is not covered
>>> [(copy.target.name, copy.read_bytes, copy.write_bytes) for copy in plan.copies]
[('w', 16, 16)]
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shardctl.base.errors import CoverageError, SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.tensors.box import Box, BoxIndex, make_disjoint, subtract_indexed
from shardctl.tensors.manifest import ConstantFill, first_byte, narrow_chunk
from shardctl.tensors.turns import unfold_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardctl.tensors.manifest import Chunk, Manifest, Tensor


@value_class
class TensorCopy:
    """How one global tensor gets from where it is to where it is wanted; made by `join_manifests`."""

    source: Tensor
    target: Tensor
    reads: tuple[Chunk, ...]
    """Parts of source chunks whose boxes are disjoint and together cover every wanted box exactly."""

    @property
    def read_bytes(self) -> int:
        """Bytes read once for all targets."""
        return self.count_read_bytes([chunk.box for chunk in self.reads if not isinstance(chunk.where, ConstantFill)])

    def count_read_bytes(self, boxes: Iterable[Box]) -> int:
        """Count the bytes that are read for `boxes`: of values that are worked out of codes, those of the codes."""
        values = sum(self.source.dtype.nbytes(box.shape) for box in boxes)
        read = self.source.encoded_bytes
        return values if read is None or not self.source.nbytes else values * read // self.source.nbytes

    @property
    def write_bytes(self) -> int:
        """Bytes written, replicas included."""
        return sum(chunk.dtype.nbytes(chunk.box.shape) for chunk in self.target.chunks)


@value_class
class CopyPlan:
    """Everything that must be copied to turn one manifest into another; made by `join_manifests`, which raises.

    >>> from shardctl.base.dtype import BY_NAME
    >>> from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, Region, Tensor
    >>> def store(file: str, start: int, stop: int, offset: int) -> Chunk:
    ...     return Chunk(Box((start,), (stop - start,)), BY_NAME["F32"], Region(file, offset, (4,)))
    >>> def build(format: str, *chunks: Chunk) -> Manifest:
    ...     files = {chunk.where.file: CheckpointFile(chunk.where.file, 24) for chunk in chunks}
    ...     return Manifest(format, {"w": Tensor("w", BY_NAME["F32"], (4,), chunks)}, files)
    >>> whole, halves = build("safetensors", store("a", 0, 4, 8)), [store("r0", 0, 2, 8), store("r1", 2, 4, 8)]
    >>> plan = join_manifests(build("ranks", *halves), whole)
    >>> plan.read_bytes, [(str(chunk.box), chunk.where.file) for chunk in plan.copies[0].reads]
    (16, [('[0:2]', 'r0'), ('[2:4]', 'r1')])
    """

    have: Manifest
    want: Manifest
    copies: tuple[TensorCopy, ...]
    """In the order in which the source stores the tensors, so that reading is sequential."""

    @property
    def read_bytes(self) -> int:
        """Bytes read from the source."""
        encoded = [copy for copy in self.copies if copy.source.encoded_bytes is not None]
        alike = Counter(
            [
                (copy.source.dtype, chunk.box.shape)
                for copy in self.copies
                if copy.source.encoded_bytes is None
                for chunk in copy.reads
                if not isinstance(chunk.where, ConstantFill)
            ]
        )
        plain = sum(count * dtype.nbytes(shape) for (dtype, shape), count in alike.items())
        return plain + sum(copy.read_bytes for copy in encoded)

    @property
    def write_bytes(self) -> int:
        """Bytes of every file of the target."""
        return sum(file.size for file in self.want.files.values())


def join_manifests(have: Manifest, want: Manifest) -> CopyPlan:
    """Match two manifests, tensor by tensor.

    Raises CoverageError, naming tensor, box and the files that hold the rest, if anything wanted is stored nowhere;
    SourceError if the two disagree about a shape; UnsupportedError if a tensor is stored in several types.
    """
    copies = []
    known: dict[object, list[tuple[int, Box]]] = {}
    for name, wanted in want.tensors.items():
        stored = have.tensors.get(name)
        if stored is None:
            raise CoverageError(f"{name} is not in the source, but the result needs it")
        copies.append(_join_tensor(stored, wanted, known))
    copies.sort(key=lambda copy: first_byte(copy.source))
    return CopyPlan(have, want, tuple(copies))


def _join_tensor(stored: Tensor, wanted: Tensor, known: dict[object, list[tuple[int, Box]]]) -> TensorCopy:
    name = stored.name
    if stored.shape != wanted.shape:
        raise SourceError(f"{name} is {list(stored.shape)} in the source, but the result needs {list(wanted.shape)}")
    stored, wanted = unfold_tensors(stored, wanted)
    chunks = stored.chunks
    for chunk in chunks:
        if chunk.dtype is not stored.dtype:
            raise UnsupportedError(f"{name} is stored as {chunk.dtype} at {chunk.box} but as {stored.dtype} elsewhere")
    reads = _match_boxes(stored, wanted, known)
    return TensorCopy(stored, wanted, tuple([narrow_chunk(chunks[i], box) for i, box in reads]))


def _match_boxes(stored: Tensor, wanted: Tensor, known: dict[object, list[tuple[int, Box]]]) -> list[tuple[int, Box]]:
    """Return the boxes to read, each with the position of its chunk.

    Layers are alike, so the answers are kept in `known`.

    Layers mostly share their boxes, and both manifests keep them meanwhile: to look up ids takes a tenth of the time.
    """
    ids: tuple[object, ...]
    if len(stored.chunks) == len(wanted.chunks) == 1:
        ids = wanted.shape, id(stored.chunks[0].box), None, id(wanted.chunks[0].box)
    else:
        ids = (wanted.shape, *[id(c.box) for c in stored.chunks], None, *[id(c.box) for c in wanted.chunks])
    reads = known.get(ids)
    if reads is not None:
        return reads
    boxes = (wanted.shape, *[c.box for c in stored.chunks], None, *[c.box for c in wanted.chunks])
    reads = known.get(boxes)
    if reads is None:
        parts = _list_stored_parts(stored)
        prove_covered(stored, [box for _, box in parts], [chunk.box for chunk in wanted.chunks])
        reads = known[boxes] = _select_needed_parts(wanted, parts)
    known[ids] = reads
    return reads


def cover_tensor(tensor: Tensor) -> tuple[Chunk, ...]:
    """Return parts of a tensor's chunks that hold each of its elements once.

    Raises CoverageError if some are missing, and UnsupportedError if some take turns and it was not unfolded.
    """
    if any(chunk.turns > 1 for chunk in tensor.chunks):
        raise UnsupportedError(
            f"{tensor.name} is stored in parts whose elements take turns, which cannot be read here",
            hint="shardctl reshard SRC OUT --to hf writes it in one",
        )
    whole = Box.whole(tensor.shape)
    if tensor.chunks and tensor.chunks[0].box == whole:
        return tensor.chunks[:1] if whole.size else ()
    parts = _list_stored_parts(tensor)
    prove_covered(tensor, [box for _, box in parts], [whole])
    return tuple(narrow_chunk(tensor.chunks[i], box) for i, box in parts)


def _list_stored_parts(tensor: Tensor) -> list[tuple[int, Box]]:
    """List disjoint boxes that cover all that is stored, each with the position of its chunk; earlier chunks win."""
    if tensor.chunks and tensor.chunks[0].box.shape == tensor.shape:
        return [(0, tensor.chunks[0].box)] if tensor.chunks[0].box.size else []
    return make_disjoint([chunk.box for chunk in tensor.chunks])


def _select_needed_parts(wanted: Tensor, parts: list[tuple[int, Box]]) -> list[tuple[int, Box]]:
    """Select the parts of the source that some wanted box overlaps, narrowed to the union of the wanted boxes."""
    if any(chunk.box.shape == wanted.shape for chunk in wanted.chunks):
        return parts
    union = [box for _, box in make_disjoint([chunk.box for chunk in wanted.chunks])]
    if sum(box.size for box in union) == sum(box.size for _, box in parts):
        return parts
    index = BoxIndex(union)
    return [(i, common) for i, box in parts for _, common in index.find_overlaps(box)]


def prove_covered(tensor: Tensor, parts: list[Box], wanted: list[Box]) -> None:
    """Subtract `parts` from every wanted box; raise CoverageError if anything is left."""
    index = BoxIndex(parts)
    for box in dict.fromkeys(wanted):
        rest = subtract_indexed(box, index)
        if rest:
            raise CoverageError(
                f"{tensor.name} {list(tensor.shape)}: elements {rest[0]} are stored in no file"
                + (f" (and {len(rest) - 1} more holes)" if len(rest) > 1 else ""),
                hint=f"the rest of it is in {_describe_files(tensor)}; is a shard missing?",
            )


def _describe_files(tensor: Tensor) -> str:
    names = sorted(tensor.files)
    if not names:
        return "no file at all"
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} files)"
