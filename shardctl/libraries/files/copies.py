"""Decides what it means that two files hold one tensor: an index says which counts, or their bytes must be equal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.base.errors import SourceError, format_first_few
from shardctl.storage import read_bytes
from shardctl.tensors.manifest import Region, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardctl.libraries.files.index import WeightIndex
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Chunk, Tensor

_MAX_SAMPLED_TENSORS: Final = 16
"""Tensors, the largest first, of which the first bytes are compared before anything is planned: parts of ranks, which
have the names of the whole, differ there."""
_SAMPLE_BYTES: Final = 4096
"""Bytes of each."""
_ALTERNATIVE_FILES_HINT: Final = (
    "if the files are alternatives, give one of them; if they are parts of ranks, they lack what says which part each "
    "holds (DCP_SHARDING_INFO in safetensors), or need the format that wrote them"
)


def place_tensors(held: Mapping[str, Iterable[str]], index: WeightIndex | None) -> dict[str, str]:
    """Choose the file of each tensor, given the names that each file holds: the one in the index, else the first."""
    placed: dict[str, str] = {}
    for path in reversed(tuple(held) if len(held) > 1 else ()):
        placed.update(dict.fromkeys(held[path], path))  # the first file counts
    return placed | index.weight_map if index is not None else placed


class _StoredTwice(NamedTuple):
    """A tensor that two files hold, and no index chooses between them."""

    name: str
    tensor: Tensor
    one: Region
    other: Region

    @property
    def sample(self) -> int:
        """How many bytes at the beginning are the same elements: of what does not lie in a row, the first element."""
        dtype, shape, strides = self.tensor.dtype, self.tensor.shape, self.one.strides
        in_a_row = strides == self.other.strides and (not strides or strides == compute_dense_strides(dtype, shape))
        return min(self.tensor.nbytes, _SAMPLE_BYTES if in_a_row else dtype.unit_bytes)


class CopyCollector:
    """Adds to tensors what other files hold of them, so that `require_agreement` compares the values."""

    def __init__(self, index: WeightIndex | None, *, prefer_index: bool) -> None:
        self._decided: Mapping[str, str] = index.weight_map if index is not None else {}
        self._prefer_index = prefer_index
        self._undecided: list[_StoredTwice] = []

    def add(self, tensor: Tensor, copy: Chunk) -> Tensor:
        """Return the tensor with a copy in another file, unless an index chooses between them and is preferred.

        Raises SourceError if they cannot be equal.
        """
        decided = copy.name in self._decided
        if decided and self._prefer_index:
            return tensor
        one, other = tensor.chunks[0].where, copy.where
        if not isinstance(one, Region) or not isinstance(other, Region):
            raise TypeError(f"{copy.name} is in no file")
        if (copy.dtype, copy.box.shape) != (tensor.dtype, tensor.shape):
            where = f"{one.file}, which the index names," if decided else f"{one.file},"
            raise SourceError(
                f"tensor {copy.name!r} is {tensor.dtype} {list(tensor.shape)} in {where} "
                f"but {copy.dtype} {list(copy.box.shape)} in {other.file}",
                hint="--prefer-index takes the one that the index names" if decided else _ALTERNATIVE_FILES_HINT,
            )
        if not decided:
            self._undecided.append(_StoredTwice(copy.name, tensor, one, other))
        return replace(tensor, chunks=(*tensor.chunks, copy))

    def check_undecided(self, source: Source) -> tuple[str, ...]:
        """Compare the beginnings of copies between which no index chooses; returns a warning if there are some.

        Raises SourceError for two that differ there.
        """
        if not self._undecided:
            return ()
        largest = sorted(self._undecided, key=lambda each: -each.tensor.nbytes)[:_MAX_SAMPLED_TENSORS]
        source.expect((where.file, where.offset, each.sample) for each in largest for where in (each.one, each.other))
        for each in largest:
            one, other = each.one, each.other
            if read_bytes(source, one.file, one.offset, each.sample) != read_bytes(
                source, other.file, other.offset, each.sample
            ):
                raise SourceError(
                    f"tensor {each.name!r} is in both {one.file} and {other.file}, with different values",
                    hint=_ALTERNATIVE_FILES_HINT,
                )
        names = format_first_few((repr(each.name) for each in self._undecided), 1)
        one, other = self._undecided[0].one, self._undecided[0].other
        warning = (
            f"{names}: each is in two files, such as {one.file} and {other.file}, and no index says which to use; "
            "reshard, digest, diff and verify --level full compare all their values"
        )
        return (warning,)
