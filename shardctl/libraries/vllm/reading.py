"""Reads vLLM's sharded state: `model-rank-R-part-P.safetensors`, one or more per rank, and the model's config.

With pipeline stages, the names are `model-pp-S-tp-R-part-P.safetensors`. They are those of `ShardedStateLoader`
(`TP_ONLY_PATTERN` and `PP_AND_TP_PATTERN` of vLLM 0.32.0, `model_executor/model_loader/sharded_state_loader.py`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.reader import Format
from shardctl.libraries.safetensors.rank_arrays import has_only_rank_files, match_files, read_rank_arrays
from shardctl.tensors.manifest import Manifest, TrainingState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.storage import Source
    from shardctl.tensors.manifest import Tensor

_FORMAT_TITLE: Final = "vLLM's model-rank-R-part-P.safetensors"
_RANK_NUMBER_PATTERN: Final = "(0|[1-9][0-9]{0,4})"
_RANK_FILE_PATTERN: Final = re.compile(
    rf"model-(?:rank-{_RANK_NUMBER_PATTERN}|pp-{_RANK_NUMBER_PATTERN}-tp-{_RANK_NUMBER_PATTERN})-part-(0|[1-9][0-9]{{0,5}})\.safetensors"
)
_QUANTIZATION_TENSOR_PATTERN: Final = re.compile(
    r".+[._](weight_scale(_inv)?|input_scale|qweight|qzeros|scales|g_idx|weight_packed)"
)
"""What vLLM's quantized layers have besides weights, or in their place."""
_UNQUANTIZED_DTYPES: Final = frozenset({"F32", "F16", "BF16", "I32"})
_OLDEST_PROFILES: Final = ("0.11",)
_SGLANG_PROFILES: Final = ("sglang",)
_SGLANG_COMPATIBILITY_NOTE: Final = ", and of SGLang for some models"
_MHA_KV_PROJECTION: Final = ".self_attn.attn_mha.kv_b_proj."
_MISSING_FILES_HINT: Final = "every rank's files are needed; fetch the rest"


def detect_vllm(source: Source) -> bool:
    """Detect whether the directory holds such files and no other safetensors files."""
    return has_only_rank_files(source, _RANK_FILE_PATTERN)


def scan_vllm(source: Source) -> Manifest:
    """Read the header of every file; arrays are those of the files, ``rankR/`` before each name.

    Which tensors of a model lie in them, the model's config decides.

    Raises:
        SourceError: a file is missing or malformed, or two have an array of the same name for one rank.
        HostileError: a link leaves the directory.
        UnsupportedError: quantized weights, or arrays of a version of vLLM that is not known.
    """
    from shardctl.libraries.vllm.profile import recognise_dialect

    files, stages = _list_rank_files(source)
    arrays, sizes = read_rank_arrays(source, dict(enumerate(files)))
    arrays = {_undo_borrowing(name, arrays): tensor for name, tensor in arrays.items()}
    for tensor in arrays.values():
        _refuse_quantized(tensor)
    side, left = list_side_files(source, set(sizes))
    dialect, profiles = recognise_dialect(arrays, len(files), stages)
    shared = profiles == _OLDEST_PROFILES and stages == dialect.mesh.ep == 1  # SGLang cuts by tp alone
    writer = "SGLang" if profiles == _SGLANG_PROFILES else "vLLM or SGLang" if shared else "vLLM"
    return Manifest(
        format=FORMAT.name,
        tensors=arrays,
        files=sizes,
        objects=side,
        warnings=left,
        training=TrainingState(writer=writer, ranks=len(files), notes=(_describe_arrays(profiles),)),
        dialect=dialect,
    )


def _describe_arrays(profiles: tuple[str, ...]) -> str:
    """Describe whose arrays they are, of which nothing but their names tells."""
    if profiles == _SGLANG_PROFILES:
        return "the arrays are those of SGLang"
    return f"the arrays are those of vLLM {' and '.join(profiles)}" + (
        _SGLANG_COMPATIBILITY_NOTE if profiles == _OLDEST_PROFILES else ""
    )


def _undo_borrowing(name: str, arrays: Mapping[str, Tensor]) -> str:
    """Return the name that an array of SGLang has before the first forward pass.

    From then on another module of latent attention has `kv_b_proj`, too, under a name that sorts first and is saved.
    """
    first = name.replace(_MHA_KV_PROJECTION, ".self_attn.kv_b_proj.")
    return name if first in arrays else first


def _list_rank_files(source: Source) -> tuple[list[list[str]], int]:
    """List for each rank its files, in the order of parts, and the number of stages; raises SourceError for a gap."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    kinds: dict[bool, str] = {}
    for match in match_files(source, _RANK_FILE_PATTERN, _FORMAT_TITLE):
        stage, rank = (0, int(match[1])) if match[1] is not None else (int(match[2]), int(match[3]))
        kinds[match[1] is None] = match[0]
        found.setdefault((stage, rank), {})[int(match[4])] = match[0]
    if len(kinds) > 1:
        raise SourceError(
            f"{kinds[True]} is named for stages, and {kinds[False]} is not", hint="files of two saves are mixed"
        )
    stages, ranks = (1 + max(each) for each in zip(*found, strict=True))
    every = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
    gaps = [place for place in every if place not in found]
    if gaps:
        more = f", nor of {len(gaps) - 1} more ranks" if len(gaps) > 1 else ""
        where = f"rank {gaps[0][1]}" + (f" of stage {gaps[0][0]}" if True in kinds else "")
        raise SourceError(
            f"there is no file of {where}{more}, but {next(iter(found[max(found)].values()))} is there",
            hint=_MISSING_FILES_HINT,
        )
    for parts in found.values():
        gap = next((part for part in range(max(parts)) if part not in parts), None)
        if gap is not None:
            last = parts[max(parts)]
            missing = f"{last.rpartition('-')[0]}-{gap}.safetensors"
            raise SourceError(f"{missing} is missing, but {last} is there", hint=_MISSING_FILES_HINT)
    return [[found[place][part] for part in range(len(found[place]))] for place in every], stages


def _refuse_quantized(array: Tensor) -> None:
    name = array.chunks[0].name
    if array.dtype.name not in _UNQUANTIZED_DTYPES or _QUANTIZATION_TENSOR_PATTERN.fullmatch(name):
        what = f"is {array.dtype}" if array.dtype.name not in _UNQUANTIZED_DTYPES else "belongs to quantized weights"
        raise UnsupportedError(
            f"{name} in {array.files[0]} {what}: quantized models in vLLM's order are not read",
            hint="convert the model that vLLM was given",
        )


FORMAT: Final = Format("vllm", _FORMAT_TITLE, detect_vllm, scan_vllm, names_safetensors=True, served=True)
