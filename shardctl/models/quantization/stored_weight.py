"""Describes a quantized weight by the names under which its arrays are stored, without a table of the model."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardctl.models.quantization.storage import Form, WeightDecoder


@value_class
class PackedArray:
    """One array of such a weight."""

    name: str
    """The stored name."""
    form: Form
    """How its dims follow those of the weight, which is a matrix `[out, in]`."""
    shape: tuple[int, ...] | None = None
    """The shape in which its bytes are read, row by row, where that is not the stored one."""
    dtype: str = ""
    """The type that its bytes have, where the file gives another one of a container."""


@value_class
class PackedWeight:
    """How one weight is stored."""

    shape: tuple[int, ...]
    """Of the weight; of each matrix, if `stack` names some."""
    decoder: WeightDecoder
    arrays: Mapping[str, PackedArray]
    """By the names that the decoder has for them."""
    stack: tuple[str, ...] = ()
    """The names of the matrices in order, if each array has one of each along its first dim."""


@value_class
class WeightListing:
    """What the weights of a format are listed with: what neither names nor types tell."""

    read: Callable[[str], bytes]
    """Reads a small array, by its stored name."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the model's tensors without quantization, by name; empty if no table has the model."""


@value_class
class StoredQuantization:
    """Quantized weights that were found by what is stored."""

    title: str
    """The format, such as `MLX 4-bit (group 32)`."""
    list_weights: Callable[[WeightListing], Mapping[str, PackedWeight]] | None
    """Lists the weights by the names that they have without quantization; None where nobody here decodes them.

    It raises SourceError for arrays that do not fit each other, UnsupportedError for what is not decoded.
    """
    arrays: frozenset[str] = frozenset()
    """The stored names of all arrays that belong to the format."""
    markers: frozenset[str] = frozenset()
    """Those of them that hold no values and only name the format."""
    config_keys: tuple[str, ...] = ()
    """Further keys of config.json that speak of it, beside `quantization_config`."""
    metadata_keys: tuple[str, ...] = ()
    """Keys of the files' metadata that speak of it."""
    list_stacked_names: Callable[[str, tuple[int, ...]], tuple[str, ...]] | None = None
    """Lists the names of the matrices of a stack that is not quantized, by its name and shape; empty for no stack."""
    renamed: bool = False
    """Whether the library has arrays of its own for some models, so that only a table can tell what the weights are."""


def flatten_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape as a matrix whose rows are those along the last dim.

    >>> flatten_shape((8, 3, 4))
    (24, 4)
    """
    return prod(shape[:-1]), shape[-1]
