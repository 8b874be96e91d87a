"""Builds one manifest from the files in which each rank saved its own part."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import CoverageError, HostileError, SourceError, UnsupportedError, format_first_few
from shardctl.base.settings import is_text
from shardctl.base.value import state_class
from shardctl.libraries.rank_pickles.parts import as_tensor_part
from shardctl.libraries.torch_save.pickle_budget import VisitCounter
from shardctl.libraries.torch_save.pickle_tree import CallNode, as_mapping
from shardctl.libraries.torch_save.reading import check_total_size, open_saved
from shardctl.tensors.box import Box, subtract_all
from shardctl.tensors.manifest import Chunk, ConstantFill, Region, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.base.dtype import DType
    from shardctl.libraries.dcp.keys import Way
    from shardctl.libraries.files.rank_files import RankFileName
    from shardctl.libraries.rank_pickles.parts import LocalPiece, TensorPart
    from shardctl.libraries.torch_save.tensors import SavedFile, StorageView
    from shardctl.storage import Source

_MAX_NESTING_DEPTH: Final = 32
_FLAT_PARAMETER_NAME: Final = "_flat_param"
"""What FSDP1 calls all parameters of a module in one row; plain tensors beside it are this rank's views of it."""


@state_class
class CollectedTensor:
    """A tensor as far as it was met."""

    shape: tuple[int, ...]
    dtype: DType
    file: str
    """Where it was met first."""
    divided: bool
    """Whether a rank says that it has a part."""
    chunks: list[Chunk] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    """Those that the ranks say have it."""


class RankCollector:
    """Reads the files of ranks, one after another."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.held: dict[str, CollectedTensor] = {}
        """By key: the way, joined by dots."""
        self.objects: dict[str, Any] = {}
        """What is no tensor, by key, of the first rank that has it."""
        self.ways: dict[str, Way] = {}
        self.warnings: list[str] = []
        self._uncovered: dict[tuple[tuple[int, ...], tuple[Box, ...]], Box | None] = {}

    def read(self, file: RankFileName, root: Way = ()) -> None:
        """Take in one rank's file; `root` is put before the ways in it.

        Raises as `open_saved` and `as_tensor_part`, and SourceError if it contradicts another rank's.
        """
        path = file.path
        saved = open_saved(self.source, path)
        views: list[StorageView] = []
        leaves = list(_walk_leaves(saved.tree, path))
        flat = any(way[-1].rpartition(".")[2] == _FLAT_PARAMETER_NAME for way, _ in leaves if way)
        for way, node in leaves:
            key = ".".join((*root, *way))
            if self.ways.setdefault(key, (*root, *way)) != (*root, *way):
                raise SourceError(f"{path}: two values would have the key {ascii(key)[:100]}")
            part = as_tensor_part(node, f"{path}: tensor {ascii(key)[:200]}")
            if part is None or (flat and not part.divided):
                self.objects.setdefault(key, node)
                continue
            views += (piece.view for piece in part.pieces)
            self._add(key, part, saved)
        check_total_size(self.source, path, views)

    def _add(self, key: str, part: TensorPart, saved: SavedFile) -> None:
        known = self.held.setdefault(key, CollectedTensor(part.shape, part.dtype, saved.path, part.divided))
        if (known.shape, known.dtype) != (part.shape, part.dtype):
            raise SourceError(
                f"{key!r} is {known.dtype} {list(known.shape)} in {known.file}, but {part.dtype} {list(part.shape)} in "
                f"{saved.path}",
                hint="plain tensors do not say whose part they are; or a file is left over from another save",
            )
        known.divided |= part.divided
        known.ranks |= part.ranks
        known.chunks += (_build_chunk(key, piece, saved) for piece in part.pieces if piece.box.size)

    def tensor(self, key: str, name: str, files: Sequence[RankFileName]) -> Tensor:
        """Return the tensor of a key, called `name`; `files` are those of all ranks that could have it.

        Raises CoverageError, naming box and file, if no rank has some of it.
        """
        held = self.held[key]
        if 0 in held.shape:
            nothing = Chunk(Box.whole(held.shape), held.dtype, ConstantFill(bytes(held.dtype.unit_bytes)), key)
            return Tensor(name, held.dtype, held.shape, (nothing,))
        found = tuple(dict.fromkeys(chunk.box for chunk in held.chunks))
        pattern = (held.shape, found)
        if pattern not in self._uncovered:
            self._uncovered[pattern] = next(iter(subtract_all(Box.whole(held.shape), found)), None)
        lacking = self._uncovered[pattern]
        if lacking is not None:
            missing = _list_missing_files(files, held.ranks)
            where = f"{format_first_few(missing)} {'is' if len(missing) == 1 else 'are'} missing" if missing else ""
            raise CoverageError(
                f"{where or 'no file has a part'}: {key!r} {list(held.shape)} lacks {lacking}",
                hint="every rank's file is needed" if missing else "a file is of another rank or another save",
            )
        return Tensor(name, held.dtype, held.shape, tuple(held.chunks))

    def heed_missing(self, files: Sequence[RankFileName]) -> None:
        """Warn of files that are not there although ranks speak of them, if all they had is in others."""
        missing = _list_missing_files(files, {rank for held in self.held.values() for rank in held.ranks})
        if missing:
            self.warnings.append(
                f"{format_first_few(missing)}: not here; other ranks have copies of all that was in it"
            )


def _list_missing_files(files: Sequence[RankFileName], ranks: set[int]) -> list[str]:
    """List names of files that are not there: of ranks that are spoken of, or of a gap in the numbers."""
    there = {file.rank for file in files}
    expected = ranks | set(range(max(there, default=0)))
    return [files[0].of(rank) for rank in sorted(expected - there)] if files else []


def _build_chunk(key: str, piece: LocalPiece, saved: SavedFile) -> Chunk:
    """Build where the elements of a box are."""
    view = piece.view
    if view.dtype.unit_elements > 1 and piece.box.shape != view.shape:
        raise UnsupportedError(f"{saved.path}: {key!r} is {view.dtype}, of which several elements share a byte")
    region = saved.region(view, key)
    shift = sum(at * stride for at, stride in zip(piece.at, region.strides, strict=True))
    return Chunk(piece.box, view.dtype, Region(region.file, region.offset + shift, region.strides), key)


def _walk_leaves(tree: object, path: str) -> Iterator[tuple[Way, Any]]:
    """Yield every value in nested dicts, and in lists of dicts or of tensors, with the keys that lead to it."""
    todo: list[tuple[Way, Any]] = [((), tree)]
    if as_mapping(tree) is None:
        raise UnsupportedError(
            f"{path} holds something other than a dict of tensors", hint="torch.save(model.state_dict(), ...) makes one"
        )
    visits = VisitCounter(path)
    while todo:
        way, node = todo.pop()
        visits.charge_nodes(len(node) if isinstance(node, list | dict) else 1)
        inside = as_mapping(node)
        if inside is None and isinstance(node, list) and any(isinstance(each, CallNode | dict) for each in node):
            inside = dict(enumerate(node))
        if inside is None:
            yield way, node
            continue
        if len(way) >= _MAX_NESTING_DEPTH:
            raise HostileError(f"{path} has dicts inside of each other, more than {_MAX_NESTING_DEPTH} deep")
        for key, value in reversed(inside.items()):
            if not isinstance(key, str | int):
                raise SourceError(
                    f"{path} has a value under the {type(key).__name__} {ascii(key)[:100]}, not under a name"
                )
            if isinstance(key, str) and not is_text(key):
                raise SourceError(f"{path} has a value whose name {ascii(key)[:100]} is not Unicode text")
            todo.append(((*way, str(key)), value))
