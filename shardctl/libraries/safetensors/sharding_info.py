"""Reads and writes `DCP_SHARDING_INFO`, which says what boxes a safetensors file of a distributed save holds.

Written by torch's `HuggingFaceStorageWriter` into `__metadata__` as JSON, ``{name: {"saved_offsets": [...]}}``
(torch/distributed/checkpoint/hf_storage.py and _hf_utils.py). A `global_shape` beside the offsets (proposed upstream
in pytorch #189945, ignored by the readers of torch 2.13) keeps a tensor from shrinking when its last shard is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.files.json_members import (
    MalformedError,
    check_end_of_text,
    parse_flat_object,
    skip_space,
    walk_object,
)

if TYPE_CHECKING:
    from shardctl.libraries.safetensors.header import SafetensorsHeader

KEY: Final = "DCP_SHARDING_INFO"
VERSION_KEY: Final = "DCP_VERSION"
OFFSETS: Final = "saved_offsets"
GLOBAL_SHAPE: Final = "global_shape"
_LONGEST_ENTRY: Final = 10_000


@value_class
class ArrayPlace:
    """Where a stored array lies in its global tensor."""

    origin: tuple[int, ...]
    global_shape: tuple[int, ...] | None
    """None where the writer did not say."""


def read_sharding_info(header: SafetensorsHeader) -> dict[str, ArrayPlace] | None:
    """Read the place of each array of a file, by name; None if the file has no such information, so that all are whole.

    Entries for tensors that the file does not hold are ignored, as torch does.

    Raises:
        SourceError: the JSON is malformed, does not fit the arrays, or misses one of them.
        UnsupportedError: an entry has fields that this version does not know and that could change its meaning.
    """
    text = header.metadata.get(KEY)
    if not text:
        return None
    ndims = {array.name: len(array.shape) for array in header.arrays}
    info: dict[str, ArrayPlace] = {}

    def member(name: str, at: int) -> int:
        if name in info:
            raise MalformedError(f"tensor {name!r} appears twice")
        entry, at = parse_flat_object(text, at, _LONGEST_ENTRY)
        if name in ndims:
            info[name] = _parse_place(name, entry, ndims[name])
        return at

    try:
        check_end_of_text(text, walk_object(text, skip_space(text, 0), member))
    except MalformedError as error:
        raise SourceError(f"{KEY} of {header.path} is malformed: {error}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{KEY} of {header.path}: {error.message}", hint=error.hint) from error
    missing = next((name for name in ndims if name not in info), None)
    if missing is not None:
        raise SourceError(f"{KEY} of {header.path} does not say where in the model tensor {missing!r} lies")
    return info


def _parse_place(name: str, entry: dict[str, Any], ndim: int) -> ArrayPlace:
    unknown = sorted(entry.keys() - {OFFSETS, GLOBAL_SHAPE})
    if unknown:
        raise UnsupportedError(
            f"tensor {name!r} has the unknown field {unknown[0]!r}", hint="a newer torch wrote it; update shardctl"
        )
    if OFFSETS not in entry:
        raise MalformedError(f"tensor {name!r} has no field {OFFSETS!r}")
    origin = _parse_indices(name, OFFSETS, entry[OFFSETS], ndim)
    shape = _parse_indices(name, GLOBAL_SHAPE, entry[GLOBAL_SHAPE], ndim) if GLOBAL_SHAPE in entry else None
    return ArrayPlace(origin, shape)


def _parse_indices(name: str, field: str, values: object, ndim: int) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int for v in values):
        raise MalformedError(f"tensor {name!r} has a {field} that is not a list of sizes")
    if len(values) != ndim:
        raise MalformedError(f"tensor {name!r} has {len(values)} numbers in {field}, but {ndim} dims")
    return tuple(values)
