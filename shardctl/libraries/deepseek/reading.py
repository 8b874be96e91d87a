"""Reads directories of DeepSeek's inference code: `modelI-mpN.safetensors`, one per rank, without a config."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.libraries.files.choice import describe_missing
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.reader import Format
from shardctl.libraries.safetensors.rank_arrays import has_only_rank_files, match_files, read_rank_arrays
from shardctl.tensors.manifest import Manifest
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.naming_scheme import NamingScheme, format_rank_prefix

if TYPE_CHECKING:
    from shardctl.storage import Source

_FORMAT_TITLE: Final = "DeepSeek's modelI-mpN.safetensors"
_RANK_FILE_PATTERN: Final = re.compile(r"model(0|[1-9][0-9]{0,4})-mp([1-9][0-9]{0,4})\.safetensors")


def detect_deepseek_mp(source: Source) -> bool:
    """Detect whether the directory holds such files and no other safetensors files."""
    return has_only_rank_files(source, _RANK_FILE_PATTERN)


def scan_deepseek_mp(source: Source) -> Manifest:
    """Read the header of every rank's file; arrays are those of the files, ``rankI/`` before each name.

    Which tensors of a model lie in them, only the model's config says; DeepSeek's converter leaves that behind.

    Raises:
        SourceError: a file is missing or malformed, or files for different numbers of ranks are there.
        HostileError: a link leaves the directory.
    """
    from shardctl.libraries.deepseek import arrays as deepseek_mp

    files = _list_rank_files(source)
    arrays, sizes = read_rank_arrays(source, {rank: [path] for rank, path in enumerate(files)})
    side, left = list_side_files(source, set(sizes))
    ranks = len(files)
    return Manifest(
        format=FORMAT.name,
        tensors=arrays,
        files=sizes,
        objects=side,
        warnings=left,
        dialect=NamingScheme(
            deepseek_mp.NAME,
            Mesh.of(tp=ranks, ep=ranks, etp=1),
            {rank: format_rank_prefix(rank) for rank in range(ranks)},
        ),
    )


def _list_rank_files(source: Source) -> list[str]:
    """List the files in the order of ranks; raises SourceError for a gap, and for files of several conversions."""
    found: dict[int, dict[int, str]] = {}
    for match in match_files(source, _RANK_FILE_PATTERN, _FORMAT_TITLE):
        found.setdefault(int(match[2]), {})[int(match[1])] = match[0]
    if len(found) > 1:
        counts = " and ".join(f"mp{count}" for count in sorted(found))
        raise SourceError(f"{source.name} holds files of several conversions: {counts}", hint="leave only one of them")
    ((count, files),) = found.items()
    gaps = [f"model{n}-mp{count}.safetensors" for n in range(count) if n not in files]
    if gaps:
        raise SourceError(
            f"{describe_missing(gaps)}: {len(files)} of {count} files are here",
            hint="every rank's file is needed; fetch the rest",
        )
    odd = next((files[n] for n in files if n >= count), None)
    if odd is not None:
        raise SourceError(f"{odd} is none of {count} files, which are counted from 0", hint="it may have been renamed")
    return [files[n] for n in range(count)]


FORMAT: Final = Format(
    "deepseek", _FORMAT_TITLE, detect_deepseek_mp, scan_deepseek_mp, names_safetensors=True, served=True
)
