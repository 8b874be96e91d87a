"""Reads vLLM's sharded state: `model-rank-R-part-P.safetensors`, one or more per rank, and the model's config.

The names are those of `ShardedStateLoader.DEFAULT_PATTERN` (vLLM 0.25.1, `model_executor/model_loader/
sharded_state_loader.py`). R counts tensor-parallel ranks only, so that a directory holds one pipeline stage.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.errors import SourceError, UnsupportedError
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.reader import Format
from shardctl.libraries.safetensors.rank_arrays import has_only_rank_files, match_files, read_rank_arrays
from shardctl.libraries.vllm.arrays import PROFILE
from shardctl.libraries.vllm.profile import recognise_dialect
from shardctl.manifest import Manifest, TrainingState

if TYPE_CHECKING:
    from shardctl.manifest import Tensor
    from shardctl.storage import Source

_TITLE: Final = "vLLM's model-rank-R-part-P.safetensors"
_FILE: Final = re.compile(r"model-rank-(0|[1-9][0-9]{0,4})-part-(0|[1-9][0-9]{0,5})\.safetensors")
_QUANTISED: Final = re.compile(r".+[._](weight_scale(_inv)?|input_scale|qweight|qzeros|scales|g_idx|weight_packed)")
"""What vLLM's quantised layers have besides weights, or in their place."""
_PLAIN: Final = frozenset({"F32", "F16", "BF16", "I32"})
_FETCH: Final = "every rank's files are needed; fetch the rest"


def detect_vllm(source: Source) -> bool:
    """Detect whether the directory holds such files and no other safetensors files."""
    return has_only_rank_files(source, _FILE)


def scan_vllm(source: Source) -> Manifest:
    """Read the header of every file; arrays are those of the files, ``rankR/`` before each name.

    Which tensors of a model lie in them, the model's config decides.

    Raises:
        SourceError: a file is missing or malformed, or two have an array of the same name for one rank.
        HostileError: a link leaves the directory.
        UnsupportedError: quantised weights, or arrays of a version of vLLM that is not known.
    """
    files = _list_rank_files(source)
    arrays, sizes = read_rank_arrays(source, dict(enumerate(files)))
    for tensor in arrays.values():
        _refuse_quantised(tensor)
    side, left = list_side_files(source, set(sizes))
    dialect = recognise_dialect(arrays, len(files))
    return Manifest(
        format=FORMAT.name,
        tensors=arrays,
        files=sizes,
        objects=side,
        warnings=left,
        training=TrainingState(
            writer="vLLM", ranks=len(files), notes=(f"the arrays are those of vLLM {dialect.text(PROFILE)}",)
        ),
        dialect=dialect,
    )


def _list_rank_files(source: Source) -> list[list[str]]:
    """List for each rank its files, in the order of parts; raises SourceError for a gap."""
    found: dict[int, dict[int, str]] = {}
    for match in match_files(source, _FILE, _TITLE):
        found.setdefault(int(match[1]), {})[int(match[2])] = match[0]
    gaps = [rank for rank in range(max(found)) if rank not in found]
    if gaps:
        more = f", nor of {len(gaps) - 1} more ranks" if len(gaps) > 1 else ""
        raise SourceError(
            f"there is no file of rank {gaps[0]}{more}, but {next(iter(found[max(found)].values()))} is there",
            hint=_FETCH,
        )
    for rank, parts in found.items():
        gap = next((part for part in range(max(parts)) if part not in parts), None)
        if gap is not None:
            raise SourceError(
                f"model-rank-{rank}-part-{gap}.safetensors is missing, but {parts[max(parts)]} is there", hint=_FETCH
            )
    return [[found[rank][part] for part in range(len(found[rank]))] for rank in range(len(found))]


def _refuse_quantised(array: Tensor) -> None:
    name = array.chunks[0].name
    if array.dtype.name not in _PLAIN or _QUANTISED.fullmatch(name):
        what = f"is {array.dtype}" if array.dtype.name not in _PLAIN else "belongs to quantised weights"
        raise UnsupportedError(
            f"{name} in {array.files[0]} {what}: quantised models in vLLM's order are not read",
            hint="convert the model that vLLM was given",
        )


FORMAT: Final = Format("vllm", _TITLE, detect_vllm, scan_vllm, names_safetensors=True)
