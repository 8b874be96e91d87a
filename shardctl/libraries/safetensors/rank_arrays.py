"""Reads safetensors files of ranks that hold an engine's own arrays, which a `NamingScheme` describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.errors import SourceError
from shardctl.libraries.files.impostors import refuse_unfinished
from shardctl.libraries.files.links import check_link
from shardctl.libraries.reader import find_given_file
from shardctl.libraries.safetensors.header import estimate_header_size, read_header
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, Region, Tensor, compute_dense_strides
from shardctl.tensors.naming_scheme import format_rank_prefix

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping

    from shardctl.storage import Source


def has_only_rank_files(source: Source, name: re.Pattern[str]) -> bool:
    """Return whether a directory holds files of that name and no other safetensors files.

    One given alone is one of those.
    """
    weights = [path for path in source.files() if "/" not in path and path.endswith(".safetensors")]
    return find_given_file(source) is None and bool(weights) and all(map(name.fullmatch, weights))


def match_files(source: Source, name: re.Pattern[str], title: str) -> list[re.Match[str]]:
    """Return the files of that name, which messages call `title`; raises SourceError if there are none."""
    found = [match for path in source.files() if (match := name.fullmatch(path)) is not None]
    if not found:
        raise SourceError(f"{source.name} holds no {title}")
    return found


def read_rank_arrays(
    source: Source, files: Mapping[int, list[str]]
) -> tuple[dict[str, Tensor], dict[str, CheckpointFile]]:
    """Read every array by its rank's prefix and its name, and the files by path; `files` are those of each rank.

    Raises as `read_header`, SourceError for a download that has not ended and for an array that two files of a rank
    have, HostileError for a link that leaves.
    """
    arrays: dict[str, Tensor] = {}
    sizes: dict[str, CheckpointFile] = {}
    source.expect((path, 0, estimate_header_size(None)) for paths in files.values() for path in paths)
    for rank, path in ((rank, path) for rank, paths in files.items() for path in paths):
        refuse_unfinished(source, path)
        check_link(source, path)
        header = read_header(source, path)
        sizes[path] = CheckpointFile(path, header.size)
        for array in header.arrays:
            name = f"{format_rank_prefix(rank)}{array.name}"
            if name in arrays:
                raise SourceError(
                    f"{array.name} is in {path} and in {arrays[name].files[0]}",
                    hint="files of two saves may have been mixed",
                )
            where = Region(path, array.offset, compute_dense_strides(array.dtype, array.shape))
            chunk = Chunk(Box.whole(array.shape), array.dtype, where, array.name)
            arrays[name] = Tensor(name, array.dtype, array.shape, (chunk,))
    return arrays, sizes
