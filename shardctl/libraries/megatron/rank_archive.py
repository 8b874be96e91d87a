"""Lays out a file of torch.save whose storages hold parts of arrays: the weights of a rank, and its optimizer's."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING

from shardctl.base.value import state_class, value_class
from shardctl.libraries.torch_save.item_writer import build_archive
from shardctl.tensors.manifest import CheckpointFile, Chunk, Region
from shardctl.tensors.training import format_state_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.libraries.arrays.composing import ComposedArray
    from shardctl.libraries.torch_save.pickle_writer import Value


@value_class
class StoragePart:
    """An array in a storage."""

    array: ComposedArray
    start: int = 0
    """In bytes from the storage's first."""
    state: str = ""
    """The state of which it is; empty for the weights."""
    aside: bool = False
    """Whether it is a copy beside the tensors proper."""
    name: str = ""
    """What chunks of it are called; empty for the array's own name."""

    def list_chunks(self, path: str, start: int) -> Iterator[tuple[str, Chunk]]:
        """Yield what each tensor has in it, in the file at `path` where its storage begins at `start`."""
        for tensor, chunk in self.array.chunks(Region(path, start + self.start, ())):
            name = format_state_name(self.state, tensor) if self.state else tensor
            affine = "" if self.state else chunk.affine
            yield name, replace(chunk, name=self.name or self.array.name, affine=affine, aside=self.aside)


@state_class
class RankArchive:
    """A file that is being planned."""

    path: str
    sizes: list[int] = field(default_factory=list)
    """Bytes of each storage."""
    parts: list[tuple[StoragePart, ...]] = field(default_factory=list)
    literals: list[bytes] = field(default_factory=list)

    def add(self, nbytes: int, parts: Sequence[StoragePart] = (), literal: bytes = b"") -> int:
        """Add a storage of `parts`, in the order of their places, or of `literal`; returns its number."""
        self.sizes.append(nbytes)
        self.parts.append(tuple(parts))
        self.literals.append(literal)
        return len(self.sizes) - 1

    def finish(self, value: Value, stored: list[tuple[str, Chunk]]) -> CheckpointFile:
        """Return the file of `value`, which refers to the storages; what tensors have in it is added to `stored`."""
        item = build_archive(value, self.sizes)
        literals, blanks = list(item.literals), []
        for start, nbytes, parts, literal in zip(item.starts, self.sizes, self.parts, self.literals, strict=True):
            if literal:
                literals.append((start, literal))
                continue
            at = 0
            for part in parts:
                if part.start > at:
                    blanks.append((start + at, part.start - at))
                at = part.start + part.array.nbytes
                if part.array.constant is not None:
                    literals.append((start + part.start, part.array.constant))
                    continue
                if part.array.padding:
                    blanks.append((start + at - part.array.padding, part.array.padding))
                stored += part.list_chunks(self.path, start)
            if nbytes > at:
                blanks.append((start + at, nbytes - at))
        return CheckpointFile(self.path, item.size, tuple(literals), tuple(blanks))
