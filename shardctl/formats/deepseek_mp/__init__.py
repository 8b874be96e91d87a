"""Directories that DeepSeek's inference code reads: `modelI-mpN.safetensors`, one a rank, without a config."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.dialect import Dialect
from shardctl.errors import SourceError
from shardctl.formats.format import Format, given_file
from shardctl.formats.rank_arrays import rank_arrays, rank_prefix
from shardctl.formats.side_files import side_files
from shardctl.manifest import Manifest
from shardctl.mesh import Mesh
from shardctl.schemas import deepseek_mp

if TYPE_CHECKING:
    from shardctl.storage import Source

_FILE: Final = re.compile(r"model(0|[1-9][0-9]{0,4})-mp([1-9][0-9]{0,4})\.safetensors")


def detect(source: Source) -> bool:
    """Whether the directory holds such files and no other safetensors files; one given alone is one of those."""
    weights = [path for path in source.files() if "/" not in path and path.endswith(".safetensors")]
    return given_file(source) is None and bool(weights) and all(map(_FILE.fullmatch, weights))


def scan(source: Source) -> Manifest:
    """Read the header of every rank's file; arrays are those of the files, ``rankI/`` before each name.

    Which tensors of a model lie in them, only the model's config says; DeepSeek's converter leaves that behind.

    Raises:
        SourceError: a file is missing or malformed, or files for different numbers of ranks are there.
        HostileError: a link leaves the directory.
    """
    files = _files(source)
    arrays, sizes = rank_arrays(source, {rank: [path] for rank, path in enumerate(files)})
    side, left = side_files(source, set(sizes))
    ranks = len(files)
    return Manifest(
        format=FORMAT.name,
        tensors=arrays,
        files=sizes,
        objects=side,
        warnings=left,
        dialect=Dialect(
            deepseek_mp.NAME,
            Mesh.of(tp=ranks, ep=ranks, etp=1),
            {rank: rank_prefix(rank) for rank in range(ranks)},
        ),
    )


def _files(source: Source) -> list[str]:
    """The files in the order of ranks; raises SourceError for a gap, and for files of several conversions."""
    found: dict[int, dict[int, str]] = {}
    for path in source.files():
        match = _FILE.fullmatch(path)
        if match is not None:
            found.setdefault(int(match[2]), {})[int(match[1])] = path
    if len(found) > 1:
        counts = " and ".join(f"mp{count}" for count in sorted(found))
        raise SourceError(f"{source.name} holds files of several conversions: {counts}", hint="leave only one of them")
    ((count, files),) = found.items()
    missing = [n for n in range(count) if n not in files]
    if missing:
        more = f" and {len(missing) - 1} more files are" if len(missing) > 1 else " is"
        raise SourceError(
            f"model{missing[0]}-mp{count}.safetensors{more} missing: {len(files)} of {count} files are here",
            hint="every rank's file is needed; fetch the rest",
        )
    odd = next((files[n] for n in files if n >= count), None)
    if odd is not None:
        raise SourceError(f"{odd} is none of {count} files, which are counted from 0", hint="it may have been renamed")
    return [files[n] for n in range(count)]


FORMAT: Final = Format("deepseek", "DeepSeek's modelI-mpN.safetensors", detect, scan)
