"""Reads TensorRT-LLM's directories: `rankN.safetensors` of every tp and pp rank, and its own `config.json`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.files.choice import describe_missing
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.reader import Format
from shardctl.libraries.safetensors.rank_arrays import has_only_rank_files, match_files, read_rank_arrays
from shardctl.models.tables.config import ModelConfig
from shardctl.storage.bounded_text import CONFIG_TEXT, read_json
from shardctl.tensors.manifest import Manifest
from shardctl.tensors.naming_scheme import NamingScheme

if TYPE_CHECKING:
    from shardctl.libraries.trtllm.config import TrtllmDescription
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Tensor

CONFIG: Final = "config.json"
_FORMAT_TITLE: Final = "TensorRT-LLM's rankN.safetensors"
_RANK_FILE_PATTERN: Final = re.compile(r"rank(0|[1-9][0-9]{0,5})\.safetensors")
_QUANTIZATION_TENSOR_PATTERN: Final = re.compile(
    r".+(_scaling_factors?|\.per_channel_scale|\.scale_to_int|_scale(_[a-z]+)*|\.zero)"
)
"""What quantized layers have besides weights."""
_UNQUANTIZED_DTYPES: Final = frozenset({"F32", "F16", "BF16"})
_MISSING_FILES_HINT: Final = "every rank's file is needed; fetch the rest"


def detect_trtllm(source: Source) -> bool:
    """Detect whether the directory holds such files and no other safetensors files."""
    return has_only_rank_files(source, _RANK_FILE_PATTERN)


def scan_trtllm(source: Source) -> Manifest:
    """Read the config and the header of every rank's file.

    Arrays are those of the files, ``rankN/`` before each name; which tensors of a model lie in them, the model's
    config decides, which is made from TensorRT-LLM's.

    Raises:
        SourceError: a file is missing or malformed, or the config's mapping is not that of the files.
        HostileError: a link leaves the directory.
        UnsupportedError: quantized weights, or a model or mapping whose arrays are not known.
    """
    from shardctl.libraries.trtllm import arrays as trtllm
    from shardctl.libraries.trtllm.config import interpret_config

    files = _list_rank_files(source)
    arrays, sizes = read_rank_arrays(source, {rank: [path] for rank, path in files.items()})
    for tensor in arrays.values():
        _refuse_quantized(tensor)
    found = interpret_config(_read_config(source), {name.partition("/")[2] for name in arrays})
    _check_ranks(found, files)
    side, left = list_side_files(source, set(sizes))
    return Manifest(
        format=FORMAT.name,
        tensors=arrays,
        files=sizes,
        objects=tuple(replace(each, policy="drop") if each.name == CONFIG else each for each in side),
        warnings=left,
        dialect=NamingScheme(trtllm.NAME, found.mesh, found.ranks, found.stages, found.facts),
        own_config=found.config,
    )


def _list_rank_files(source: Source) -> dict[int, str]:
    """List the files by rank; raises SourceError for a gap."""
    found = dict(sorted((int(match[1]), match[0]) for match in match_files(source, _RANK_FILE_PATTERN, _FORMAT_TITLE)))
    gaps = [f"rank{n}.safetensors" for n in range(max(found)) if n not in found]
    if gaps:
        raise SourceError(f"{describe_missing(gaps)}: {found[max(found)]} is there", hint=_MISSING_FILES_HINT)
    return found


def _read_config(source: Source) -> ModelConfig:
    if CONFIG not in source.files():
        raise SourceError(
            f"there is no {CONFIG} beside rank0.safetensors, which says for how many ranks the files are",
            hint="fetch it: TensorRT-LLM writes one into every checkpoint directory",
        )
    parsed = read_json(source, CONFIG, CONFIG_TEXT)
    if not isinstance(parsed, dict) or "architecture" not in parsed:
        raise SourceError(
            f"{CONFIG} names no architecture, so it is not TensorRT-LLM's",
            hint="rankN.safetensors belong to the config.json that was written with them",
        )
    return ModelConfig(parsed)


def _check_ranks(found: TrtllmDescription, files: dict[int, str]) -> None:
    """Raise SourceError if there are more or fewer files than the mapping has ranks."""
    count = len(found.ranks)
    gaps = [f"rank{n}.safetensors" for n in range(count) if n not in files]
    if gaps:
        raise SourceError(
            f"{describe_missing(gaps)}: {CONFIG} says {found.mesh}, which has {count} files", hint=_MISSING_FILES_HINT
        )
    if len(files) > count:
        raise SourceError(
            f"{files[count]} is there, but {CONFIG} says {found.mesh}, which has only {count} files",
            hint="files of two checkpoints may have been mixed",
        )


def _refuse_quantized(array: Tensor) -> None:
    (chunk,) = array.chunks
    plain = array.dtype.name in _UNQUANTIZED_DTYPES
    if not plain or _QUANTIZATION_TENSOR_PATTERN.fullmatch(chunk.name):
        raise UnsupportedError(
            f"{chunk.name} in {array.files[0]} {'scales quantized weights' if plain else f'is {array.dtype}'}: "
            "quantized checkpoints of TensorRT-LLM are not read",
            hint="convert the model that was quantized",
        )


FORMAT: Final = Format("trtllm", _FORMAT_TITLE, detect_trtllm, scan_trtllm, names_safetensors=True, served=True)
