"""Describes what a checkpoint contains and where each byte of it is, on disk or yet to be written.

>>> from shardctl.tensors.box import Box
>>> from shardctl.base.dtype import BY_NAME
>>> strides = compute_dense_strides(BY_NAME["F32"], (2, 4))
>>> chunk = Chunk(Box((0, 0), (2, 4)), BY_NAME["F32"], Region("model.safetensors", 64, strides))
>>> narrow_chunk(chunk, Box((1, 0), (1, 4))).where
Region(file='model.safetensors', offset=80, strides=(16, 4))
"""

from __future__ import annotations

import re
from dataclasses import field, replace
from functools import lru_cache
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any, Final, Literal

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import value_class
from shardctl.tensors.box import list_flat_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.base.settings import Setting
    from shardctl.tensors.box import Box
    from shardctl.tensors.naming_scheme import NamingScheme


GAMMA_LESS_ONE: Final = "gamma-1"
"""The name of a change: stored is the weight of a norm less one (`shardctl/tensors/bands.py`)."""


@value_class
class Region:
    """Where the elements of a box lie in a file.

    Strides alone express permuted storage, steps, stacked and interleaved arrays, so boxes stay unit boxes. Nothing is
    checked here: readers raise SourceError for regions that leave their file.

    >>> Region("model.safetensors", 128, (2, 6))  # a transposed bf16 matrix of 3 columns: neighbours of dim 0 touch
    Region(file='model.safetensors', offset=128, strides=(2, 6))
    """

    file: str
    """Path of the file (or key of the object), relative to the checkpoint's root, with forward slashes."""
    offset: int
    """Byte offset in the file of the box's first element."""
    strides: tuple[int, ...]
    """Bytes from one unit to the next along each dim (`DType.unit_shape`); may be in any order."""


@value_class
class ConstantFill:
    """Elements that no file holds: every unit has the same bits."""

    unit: bytes
    """The bits of one unit, little-endian."""


@value_class
class Chunk:
    """A stored box of a global tensor, or a box that is to be stored.

    >>> from shardctl.base.dtype import BY_NAME
    >>> from shardctl.tensors.box import Box
    >>> chunk = Chunk(Box((4, 0), (4, 8)), BY_NAME["BF16"], Region("rank-1.safetensors", 64, (16, 2)), "w")
    >>> print(chunk.box, "at byte", chunk.where.offset)  # rows 4 to 7 of w, dense
    [4:8, 0:8] at byte 64
    """

    box: Box
    """Which elements, in the global tensor's index space."""
    dtype: DType
    """The stored type of the elements."""
    where: Region | ConstantFill
    """Where they are, or what they all are."""
    name: str = ""
    """The stored array's name in its file, for messages and for writing."""
    affine: str = ""
    """A *named* element-wise change between storage and meaning, such as `GAMMA_LESS_ONE`; empty for none."""
    aside: bool = False
    """Whether it is one more copy, yet to be written, that whoever reads the result does not take for the tensor.

    It may have another type than the tensor, to which the source's elements are cast.
    """
    turns: int = 1
    """How many parts take turns along the tensor's last dim, which a further dim of `box` counts; see `turns.py`."""


@value_class
class Tensor:
    """A global tensor, and everywhere it is stored; a replica is one more chunk over the same box.

    That chunks cover the tensor is checked where a plan is made (`join_manifests`).

    >>> from shardctl.base.dtype import BY_NAME
    >>> from shardctl.tensors.box import Box
    >>> bf16 = BY_NAME["BF16"]
    >>> halves = [Chunk(Box((4 * n, 0), (4, 8)), bf16, Region(f"rank-{n}", 64, (16, 2))) for n in range(2)]
    >>> tensor = Tensor("w", bf16, (8, 8), tuple(halves))
    >>> tensor.size, tensor.nbytes, tensor.files
    (64, 128, ('rank-0', 'rank-1'))
    """

    name: str
    """The canonical name: the family's Hub schema, the first name of a tie; else the stored name."""
    dtype: DType
    shape: tuple[int, ...]
    """The global shape in elements, without any padding."""
    chunks: tuple[Chunk, ...]
    ties: tuple[str, ...] = ()
    """The other names of a tied weight."""
    spelling: tuple[str, ...] = ()
    """The names the *original* checkpoint used, in order, where they or the array's dims differ from the canonical."""
    encoded_bytes: int | None = None
    """Bytes that are read to work its values out; None if they are stored as they are."""
    turns: int = 1
    """How many neighbours along the tensor's own last dim the last dim of `shape` counts, if it is unfolded."""

    @property
    def size(self) -> int:
        """Elements of the global tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one dense copy."""
        return self.dtype.nbytes(self.shape)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that hold some of it, each once, in the order of the chunks."""
        return tuple(dict.fromkeys([c.where.file for c in self.chunks if isinstance(c.where, Region)]))


def first_byte(tensor: Tensor) -> tuple[str, int]:
    """Return where the first stored chunk begins: file and offset.

    Sorted by it, tensors are read in the order of files.
    """
    for chunk in tensor.chunks:
        if not isinstance(chunk.where, ConstantFill):
            return chunk.where.file, chunk.where.offset
    return "", 0


@value_class
class CheckpointFile:
    """A file of a checkpoint: of a source, or yet to be written.

    >>> CheckpointFile("a.safetensors", 32, literals=((0, b"header"),), blanks=((6, 10),)).size  # 16 bytes of tensors
    32
    """

    path: str
    size: int
    """Bytes."""
    literals: tuple[tuple[int, bytes], ...] = ()
    """`(offset, bytes)` that the layout itself determines, such as a header; only for files yet to be written."""
    blanks: tuple[tuple[int, int], ...] = ()
    """`(offset, size)` of padding, whose bytes stay zero; only for files yet to be written."""
    archives: tuple[tuple[int, int], ...] = ()
    """`(offset, size)` of the zip archives in a stored file, in order, whose directories state CRC-32s of its bytes."""


Policy = Literal["carry", "drop", "synthesise"]


@value_class
class OpaqueObject:
    """Something in a checkpoint that is not a tensor: a tokenizer, arguments, an extra state."""

    name: str
    """The file path, or the key within a container."""
    policy: Policy
    """`carry` travels along unchanged, `drop` is left behind (and said so), `synthesise` is made new from `content`."""
    file: str = ""
    offset: int = 0
    size: int = 0
    """Where the bytes are, if they are stored."""
    content: bytes | None = None
    """The bytes themselves, if they are made new."""

    @property
    def nbytes(self) -> int:
        """How many bytes it has, stored or made new."""
        return len(self.content) if self.content is not None else self.size


@value_class
class OwnConfig:
    """A `config.json` of transformers, made from what another library keeps (Meta's `params.json`)."""

    values: Mapping[str, object]
    """Its content; a `vocab_size` of None says that the files only tell to how many rows it was padded."""
    warnings: tuple[str, ...] = ()
    """What had to be guessed."""
    assumed: frozenset[str] = frozenset()
    """The settings, by path, whose values are guesses, because the files do not say them: not to be compared."""
    replaces: bool = False
    """Whether what the container calls `config.json` is that description, and none of transformers."""


@value_class
class LibrarySettings:
    """What another library keeps of the model beside its weights, by names of its own."""

    title: str
    """What messages call it, such as `args`."""
    values: Mapping[str, object]
    expect: Callable[[Mapping[str, object], Any], Mapping[str, object]]
    """Returns what they are for a config of transformers and its `Model`; raises UnsupportedError if there is none."""
    partial: bool = False
    """Whether only those that `expect` returns say what the model is, and others are of the run."""


@value_class
class ParameterGroup:
    """Parameters that an optimizer treats alike."""

    parameters: tuple[str, ...]
    """Their names: stored ones in a stored manifest, canonical ones in a bound one."""
    settings: Mapping[str, Setting]
    """Hyper-parameters, such as `lr` and `betas`."""


@value_class
class TrainingState:
    """The part of a checkpoint that only a trainer needs: optimizer states, the step, and parameter groups.

    >>> TrainingState(writer="torch 2.13", ranks=8, step=1000).unreadable
    ''
    """

    writer: str = ""
    """The library that wrote it, with its version where the files tell."""
    ranks: int | None = None
    """How many processes wrote it."""
    step: int | None = None
    """Optimizer steps done."""
    states: Mapping[str, Tensor] = field(default_factory=dict)
    """Optimizer states by canonical name (`training.format_state_name`), which is that of the tensor too."""
    groups: tuple[ParameterGroup, ...] = ()
    progress: Mapping[str, Setting] = field(default_factory=dict)
    """What only the writer's own training loop goes on from, such as samples seen, by the writer's names."""
    clipping: float | None = None
    """The norm to which the writer clipped gradients, 0 if it did not; None if the files do not tell."""
    notes: tuple[str, ...] = ()
    """What `inspect` tells of how the files were understood."""
    unreadable: str = ""
    """Why optimizer states that are there are not among `states`."""


@value_class
class Manifest:
    """All tensors, files and opaque objects of a checkpoint; a source and a target are the same type.

    >>> from shardctl.base.dtype import BY_NAME
    >>> from shardctl.tensors.box import Box
    >>> chunk = Chunk(Box((0,), (4,)), BY_NAME["F32"], Region("a", 8, (4,)))
    >>> manifest = Manifest(
    ...     "safetensors",
    ...     {"w": Tensor("w", BY_NAME["F32"], (4,), (chunk,))},
    ...     {"a": CheckpointFile("a", 24)},
    ... )
    >>> manifest.nbytes
    16
    """

    format: str
    """The container (source) or layout (target), such as `safetensors` or `ranks`."""
    tensors: Mapping[str, Tensor]
    """By name, in the order the checkpoint lists them."""
    files: Mapping[str, CheckpointFile]
    """The files that hold tensors, by path."""
    objects: tuple[OpaqueObject, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Free-form strings of the container, such as safetensors' `__metadata__`."""
    warnings: tuple[str, ...] = ()
    """What is odd but not wrong; `--strict` makes each an error."""
    training: TrainingState | None = None
    """What there is beside the weights, if a trainer wrote it; `tensors` are weights alone."""
    dialect: NamingScheme | None = None
    """Set if `tensors` are arrays of another library's making; once they are bound to a model, they are the model's."""
    settings: LibrarySettings | None = None
    """What the container keeps of the model in another library's words, also where there is a `config.json`."""
    own_config: OwnConfig | None = None
    """What follows from a description that the container has of its own, where there is no `config.json`."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """By stored name, the tensors that the model's class does not have, such as a value head (`extra_tensors.py`)."""

    @property
    def nbytes(self) -> int:
        """Bytes of one dense copy of every tensor, ties counted once."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def dropped(self) -> tuple[str, ...]:
        """The names of files and objects that a conversion leaves behind."""
        return tuple(dict.fromkeys(one.name for one in self.objects if one.policy == "drop"))

    def arrays(self) -> Iterator[tuple[Tensor, Chunk]]:
        """Yield every chunk with its tensor."""
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                yield tensor, chunk


def compute_dense_strides(dtype: DType, shape: Sequence[int]) -> tuple[int, ...]:
    """Compute byte strides of a row-major array of `shape` elements.

    >>> from shardctl.base.dtype import BY_NAME
    >>> from shardctl.tensors.box import Box
    >>> compute_dense_strides(BY_NAME["F32"], (2, 3))
    (12, 4)
    """
    return _compute_dense_strides(dtype, tuple(shape))


@lru_cache(maxsize=4096)  # a model has few kinds of arrays
def _compute_dense_strides(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = dtype.unit_bytes
    for extent in reversed(dtype.unit_shape(shape)):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=1 << 14)  # layers are alike, and so are their runs
def locate_dense_run(
    dtype: DType, shape: tuple[int, ...], start: int, stop: int
) -> tuple[tuple[int, ...], tuple[tuple[Box, int], ...]]:
    """Locate byte strides of a row-major array, and the boxes of its elements from `start` to `stop`.

    Each box comes with the bytes from the first of these elements to its own.
    """
    strides = compute_dense_strides(dtype, shape)
    return strides, tuple(
        (box, sum(map(mul, box.origin, strides)) - start * dtype.unit_bytes)
        for box in list_flat_boxes(shape, start, stop)
    )


def narrow_chunk(chunk: Chunk, box: Box) -> Chunk:
    """Return the part of a chunk that holds `box`, which must lie inside it.

    Raises UnsupportedError if an edge falls inside a unit of a type narrower than a byte.
    """
    if box is chunk.box or box == chunk.box:
        return chunk
    if isinstance(chunk.where, ConstantFill):
        return replace(chunk, box=box)
    if len(chunk.where.strides) != len(box.origin):  # rows of a narrow type that do not end on a byte
        raise UnsupportedError(
            f"{chunk.name} is {chunk.dtype} with rows that do not fill whole bytes; it cannot be cut"
        )
    offset = chunk.where.offset
    per_unit = chunk.dtype.unit_elements
    last = len(box.origin) - 1
    for dim, (start, base, stride) in enumerate(zip(box.origin, chunk.box.origin, chunk.where.strides, strict=True)):
        steps = start - base
        if dim == last and per_unit > 1:
            if steps % per_unit or box.shape[dim] % per_unit:
                raise UnsupportedError(
                    f"{chunk.name} is {chunk.dtype} and cannot be cut at {box}: bytes hold {per_unit} elements",
                    hint=f"cut its last dim at multiples of {per_unit}",
                )
            steps //= per_unit
        offset += steps * stride
    return replace(chunk, box=box, where=replace(chunk.where, offset=offset))


def name_block(tensor: str) -> str:
    """Name the block of a tensor: its path up to the first number, or its module.

    >>> name_block("model.layers.3.mlp.up_proj.weight"), name_block("model.norm.weight"), name_block("wte")
    ('model.layers.3', 'model.norm', 'wte')
    """
    words = tensor.split(".")
    number = next((at for at, word in enumerate(words) if at and word.isdecimal()), None)
    return ".".join(words[: number + 1]) if number is not None else ".".join(words[:-1]) or tensor


def sort_naturally(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts names as people do: layer 2 before layer 10."""
    return [(1, int(each), "") if each.isdecimal() else (0, 0, each) for each in re.split(r"(\d+)", name)]
