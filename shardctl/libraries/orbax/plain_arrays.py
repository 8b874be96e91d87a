"""Describes Orbax checkpoints whose arrays are plain: in zarr chunks that are not compressed, each a file of its own.

Such a chunk is its elements, row-major, so that it can be written and read without tensorstore (zarr's specification,
version 2). Orbax writes and restores them with `use_ocdbt=False` (google/orbax, `PyTreeCheckpointHandler`).
"""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_text
from shardctl.storage.orbax import METADATA
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, ConstantFill, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.dtype import DType
    from shardctl.storage import Source

ARRAY: Final = ".zarray"
"""Says of an array, in its folder, what its chunks are."""
COMMITTED: Final = "_CHECKPOINT_METADATA"
LARGEST: Final = 64 << 20
"""Bytes of one chunk, beyond which an array has several: whoever reads a part reads whole chunks."""
_ARRAY_KIND: Final = "np.ndarray"
"""Orbax gives arrays of this kind to whoever names no sharding, and cuts them for whoever does."""
_DICT_KEY: Final = 2
"""Says that a key of the tree is one of a dict."""
_PYTREE_HANDLER_CLASS: Final = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_ZARR_DTYPES: Final = {
    **{name: f"<{name[0].lower()}{int(name[1:]) // 8}" for name in ("F16", "F32", "F64", "I16", "I32", "I64")},
    **{name: f"<u{int(name[1:]) // 8}" for name in ("U16", "U32", "U64")},
    "U8": "|u1",
    "I8": "|i1",
    "BOOL": "|b1",
    "C64": "<c8",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""What tensorstore calls the types in a `.zarray`."""
_DTYPES_BY_ZARR_NAME: Final = {text: name for name, text in _ZARR_DTYPES.items()}


def choose_chunk_shape(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Choose the shape of an array's chunks: all of it, or so many of its rows that the last chunk is full, too.

    >>> choose_chunk_shape(BY_NAME["F32"], (4096, 1 << 14))
    (1024, 16384)
    """
    if not shape or not prod(shape) or dtype.nbytes(shape) <= LARGEST:
        return tuple(max(extent, 1) for extent in shape)
    rows = max(LARGEST // dtype.nbytes((1, *shape[1:])), 1)
    return next(count for count in range(min(rows, shape[0]), 0, -1) if shape[0] % count == 0), *shape[1:]


def list_chunks(name: str, shape: tuple[int, ...], part: tuple[int, ...]) -> Iterator[tuple[str, Box]]:
    """List the files of an array that is cut along its first dim alone, each with its box; none without elements."""
    if not shape:
        yield f"{name}/0", Box((), ())
        return
    for number in range(shape[0] // part[0]) if prod(shape) else ():
        place = ".".join(map(str, (number, *(0,) * (len(shape) - 1))))
        yield f"{name}/{place}", Box((number * part[0], *(0,) * (len(shape) - 1)), (part[0], *shape[1:]))


def encode_array(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Encode the `.zarray` of an array; raises UnsupportedError for a type that tensorstore does not have."""
    if dtype.name not in _ZARR_DTYPES:
        raise UnsupportedError(f"Orbax has no arrays of the type {dtype}", hint="write another layout")
    said: dict[str, object] = {
        "chunks": choose_chunk_shape(dtype, shape),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": _ZARR_DTYPES[dtype.name],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": shape,
        "zarr_format": 2,
    }
    return json.dumps(said, separators=(",", ":")).encode()


def encode_tree(shapes: Mapping[str, tuple[DType, tuple[int, ...]]]) -> bytes:
    """Encode Orbax's list of the arrays of a tree; the parts of a name between dots are the keys that lead to it."""
    tree = {}
    for name, (dtype, shape) in shapes.items():
        keys = tuple(name.split("."))
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            "value_metadata": {
                "value_type": _ARRAY_KIND,
                "skip_deserialize": False,
                "write_shape": list(choose_chunk_shape(dtype, shape)) if prod(shape) else list(shape),
            },
        }
    said = {"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    return json.dumps({**said, "custom_metadata": None}).encode()


def encode_commit() -> bytes:
    """Encode what says that a checkpoint is whole; it names no time, so that equal results have equal files."""
    times = dict.fromkeys(("init_timestamp_nsecs", "commit_timestamp_nsecs"))
    said: dict[str, object] = {"item_handlers": _PYTREE_HANDLER_CLASS, **times}
    said |= {name: {} for name in ("metrics", "performance_metrics", "custom_metadata")}
    return json.dumps(said).encode()


def read_plain_array(source: Source, name: str) -> Tensor:
    """Read what the `.zarray` of an array says; raises SourceError for what is malformed, and for missing chunks."""
    path = f"{name}/{ARRAY}"
    if path not in source.files():
        raise SourceError(f"{path} is missing: {METADATA} lists {name}", hint="the copy may be incomplete")
    said = parse_json(read_text(source, path, CONFIG_TEXT), path, CONFIG_TEXT)
    try:
        dtype = BY_NAME[_DTYPES_BY_ZARR_NAME[said["dtype"]]]
        shape, part = (tuple(map(int, said[key])) for key in ("shape", "chunks"))
        plain = said["compressor"] is None and said["order"] == "C" and not said.get("filters")
        plain = plain and said.get("dimension_separator", ".") == "." and min((*shape, *part, 1)) >= 0
        rows = tuple(max(extent, 1) for extent in shape[1:])
        whole = (
            len(shape) == len(part) and part[1:] == rows and (not shape or (part[0] > 0 and shape[0] % part[0] == 0))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{path} is not understood: {error!r}") from error
    if not plain or not whole:
        raise UnsupportedError(f"{path} describes chunks that are no plain rows")
    chunks: list[Chunk] = []
    for file, box in list_chunks(name, shape, part):
        stat = source.files().get(file)
        if stat is None or stat.size != dtype.nbytes(box.shape):
            found = "is missing" if stat is None else f"has {stat.size:,} bytes"
            raise SourceError(f"{file} {found}: {path} gives it {dtype.nbytes(box.shape):,}")
        chunks.append(Chunk(box, dtype, Region(file, 0, compute_dense_strides(dtype, box.shape)), name))
    if not prod(shape):
        chunks = [Chunk(Box.whole(shape), dtype, ConstantFill(bytes(dtype.unit_bytes)), name)]
    return Tensor(name, dtype, shape, tuple(chunks))
