"""Reads Grok-2 as it is published: `*-TP-common.safetensors`, and `*-TP-NNN.safetensors` with a part for each rank.

Which files there are is what SGLang's loader looks for, and how parts join follows from its layers (SGLang 0.5.23,
`models/grok.py`, `layers/linear.py`, `layers/vocab_parallel_embedding.py` and `layers/moe/fused_moe_triton/layer.py`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.libraries.files.choice import describe_missing
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.reader import Format
from shardctl.libraries.safetensors.rank_arrays import has_only_rank_files, match_files, read_rank_arrays
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_text
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Manifest, Tensor, TrainingState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.storage import Source

_FORMAT_TITLE: Final = "Grok-2's *-TP-common.safetensors and *-TP-NNN.safetensors"
_RANK_FILE_PATTERN: Final = re.compile(r"(.+-)TP-(common|[0-9]{3})\.safetensors")
_FILE_NUMBER_PATTERN: Final = re.compile(r".*?-([0-9]{5})-")
_COMMON_FILE_LABEL: Final = "common"
_CONFIG_FILE: Final = "config.json"
_EXPERT_WIDTH_KEYS: Final = ("moe_intermediate_size", "intermediate_size")
_PARTITIONS_BY_MODULE: Final[Mapping[str, tuple[int, tuple[str, ...]]]] = {
    **dict.fromkeys(("w1", "w3"), (0, _EXPERT_WIDTH_KEYS)),
    "w2": (1, _EXPERT_WIDTH_KEYS),
    **dict.fromkeys(("gate_proj", "up_proj"), (0, ("intermediate_size",))),
    "down_proj": (1, ("intermediate_size",)),
    **dict.fromkeys(("embed_tokens", "lm_head"), (0, ("vocab_size",))),
}
"""By the name of a module, the dim along which its parts follow each other, and the keys of its extent in the config.

Parts of attention are not among them: if there are more ranks than key/value heads, some of them repeat others.
"""
_UNSHARDED_EXPERTS_WARNING: Final = (
    "SGLang takes experts for parts of one rank, where tp is above 1, unless config.json says "
)
_MAX_LISTED_EXPERTS: Final = 1 << 20
"""Experts of all layers of which the names are still listed."""
_FETCH_FILES_HINT: Final = "every file is needed; fetch the rest"


def detect_grok(source: Source) -> bool:
    """Detect whether the directory holds such files and no other safetensors files."""
    return has_only_rank_files(source, _RANK_FILE_PATTERN)


def scan_grok(source: Source) -> Manifest:
    """Read the header of every file; tensors are whole, and have the names that the files give them.

    Raises:
        SourceError: a file is missing or malformed, or parts do not fit each other or the config.
        HostileError: a link leaves the directory.
        UnsupportedError: a tensor is cut of which it is not known how.
    """
    common, ranks = _list_files(source)
    whole, sizes = read_rank_arrays(source, {0: common})
    parts, more = read_rank_arrays(source, dict(enumerate(ranks)))
    config = _read_config(source)
    tensors = {tensor.chunks[0].name: tensor for tensor in whole.values()}
    tensors = {name: Tensor(name, tensor.dtype, tensor.shape, tensor.chunks) for name, tensor in tensors.items()}
    for name, found in _group_parts(parts, ranks).items():
        if name in tensors:
            raise SourceError(f"{name} is in {tensors[name].files[0]} and in {found[0].files[0]}")
        tensors[name] = _join_parts(name, found, config)
    missing = [name for name in _list_expected(config) if name not in tensors]
    if missing:
        raise SourceError(f"the files lack {format_first_few(missing)}", hint=_FETCH_FILES_HINT)
    side, left = list_side_files(source, {*sizes, *more})
    warning = (
        (f'{_UNSHARDED_EXPERTS_WARNING}"load_presharded_moe": false',)
        if parts and config.get("load_presharded_moe", True)
        else ()
    )
    return Manifest(
        format=FORMAT.name,
        tensors=tensors,
        files={**sizes, **more},
        objects=side,
        warnings=(*left, *warning),
        training=TrainingState(ranks=len(ranks) or None),
    )


def _list_files(source: Source) -> tuple[list[str], list[list[str]]]:
    """List the files that all ranks share, and those of each rank; raises SourceError for a gap."""
    common: list[str] = []
    found: dict[str, dict[int, str]] = {}
    numbers: dict[int, str] = {}
    for match in match_files(source, _RANK_FILE_PATTERN, _FORMAT_TITLE):
        if match[2] == _COMMON_FILE_LABEL:
            common.append(match[0])
        else:
            found.setdefault(match[1], {})[int(match[2])] = match[0]
        if (number := _FILE_NUMBER_PATTERN.fullmatch(match[1])) is not None:
            numbers[int(number[1])] = match[0]
    count = 1 + max((rank for files in found.values() for rank in files), default=-1)
    gaps = [
        f"{prefix}TP-{n:03d}.safetensors" for prefix, files in found.items() for n in range(count) if n not in files
    ]
    gaps += [f"a file numbered {n:05d}" for n in range(max(numbers, default=0)) if n not in numbers]
    if gaps:
        raise SourceError(describe_missing(gaps), hint=_FETCH_FILES_HINT)
    return sorted(common), [[files[rank] for _, files in sorted(found.items())] for rank in range(count)]


def _read_config(source: Source) -> Mapping[str, Any]:
    """Return what the config says that lies there; one that cannot be read is for whoever needs it to refuse."""
    if _CONFIG_FILE not in source.files():
        return {}
    try:
        found = parse_json(read_text(source, _CONFIG_FILE, CONFIG_TEXT), _CONFIG_FILE, CONFIG_TEXT)
    except SourceError:
        return {}
    return found if isinstance(found, dict) else {}


def _group_parts(arrays: Mapping[str, Tensor], ranks: Sequence[Sequence[str]]) -> dict[str, list[Tensor]]:
    """Return the parts of each tensor in the order of ranks; raises SourceError if a rank has none."""
    found: dict[str, list[Tensor]] = {}
    for array in arrays.values():  # in the order of ranks
        found.setdefault(array.chunks[0].name, []).append(array)
    for name, parts in found.items():
        if len(parts) != len(ranks):
            raise SourceError(
                f"{len(parts)} of {len(ranks)} ranks have {name}, which is in {parts[0].files[0]}",
                hint=_FETCH_FILES_HINT,
            )
    return found


def _join_parts(name: str, parts: Sequence[Tensor], config: Mapping[str, Any]) -> Tensor:
    """Return the tensor whose equal parts these are; raises SourceError if they are not, or not all of them."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    first = parts[0]
    if module not in _PARTITIONS_BY_MODULE or not name.endswith(".weight") or len(first.shape) != 2:  # noqa: PLR2004
        raise UnsupportedError(
            f"{name} is divided over {len(parts)} files, and how is not known here",
            hint=f"known are parts of {', '.join(_PARTITIONS_BY_MODULE)}",
        )
    unlike = next((part for part in parts if (part.dtype, part.shape) != (first.dtype, first.shape)), None)
    if unlike is not None:
        raise SourceError(
            f"{name} is {unlike.dtype} {list(unlike.shape)} in {unlike.files[0]}, "
            f"but {first.dtype} {list(first.shape)} in {first.files[0]}"
        )
    dim, keys = _PARTITIONS_BY_MODULE[module]
    shape = tuple(extent * (len(parts) if at == dim else 1) for at, extent in enumerate(first.shape))
    said = next((config[key] for key in keys if type(config.get(key)) is int), shape[dim])
    if said != shape[dim]:
        raise SourceError(
            f"the {len(parts)} parts of {name} make {shape[dim]:,} of {said:,}, which {_CONFIG_FILE} says",
            hint="files of the last ranks may be missing",
        )
    chunks = []
    for number, part in enumerate(parts):
        origin = tuple(number * extent if at == dim else 0 for at, extent in enumerate(first.shape))
        (chunk,) = part.chunks
        chunks.append(replace(chunk, box=Box(origin, first.shape)))
    return Tensor(name, first.dtype, shape, tuple(chunks))


def _list_expected(config: Mapping[str, Any]) -> Iterator[str]:
    """List the tensors that SGLang's class of Grok demands; of another class, nothing is known."""
    layers, experts = config.get("num_hidden_layers"), config.get("num_local_experts")
    classes = config.get("architectures")
    named = isinstance(classes, list) and any(str(name).startswith("Grok1") for name in classes)
    if not named or type(layers) is not int or type(experts) is not int or layers * experts > _MAX_LISTED_EXPERTS:
        return
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    modules = [f"self_attn.{name}_proj" for name in "qkvo"]
    modules += [f"{when}_{what}_norm" for what in ("attn", "moe") for when in ("pre", "post")]
    modules += ["block_sparse_moe.gate"]
    modules += [f"block_sparse_moe.experts.{n}.w{matrix}" for n in range(experts) for matrix in (1, 2, 3)]
    modules += [f"mlp.{name}_proj" for name in ("gate", "up", "down") if config.get("residual_moe")]
    for layer in range(layers):
        yield from (f"model.layers.{layer}.{module}.weight" for module in modules)


FORMAT: Final = Format("grok", _FORMAT_TITLE, detect_grok, scan_grok, names_safetensors=True, served=True)
