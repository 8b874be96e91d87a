"""Provides a state dict that reads a checkpoint only when asked, for `from_pretrained`, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import CoverageError, UnsupportedError
from shardctl.base.extras import format_install_command
from shardctl.tensors.bands import BandBuffer, ChunkIndex
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import cover_tensor
from shardctl.tensors.turns import unfold_box, unfold_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardctl.base.dtype import DType
    from shardctl.models import Model
    from shardctl.models.tables.fusion import TensorFusion
    from shardctl.tensors.bands import ByteReader
    from shardctl.tensors.manifest import Manifest, Tensor

Array = Any
"""A `torch.Tensor`: torch is imported only when something is read, so its types cannot be named here."""
_READ_BUFFER_BYTES: Final = 1 << 20
"""Bytes in which pieces with gaps are gathered; each read has its own, so threads can read one tensor."""


def get_torch_type(dtype: DType) -> Any:  # noqa: ANN401 - a torch.dtype
    """Return the torch type of an element type; raises UnsupportedError if this torch has none."""
    import torch

    found = getattr(torch, dtype.torch, None) if dtype.torch else None
    if found is None:
        raise UnsupportedError(f"torch {torch.__version__} has no type for {dtype} elements")
    return found


def read_box(reader: ByteReader, index: ChunkIndex, box: Box) -> Array:
    """Read the elements of `box` as a dense CPU tensor; two 4-bit elements are one of torch's.

    Raises CoverageError if some of them are stored nowhere in `index`.
    """
    import torch

    dtype = index.chunks[0].dtype
    kind = get_torch_type(dtype)
    buffer = torch.empty(dtype.nbytes(box.shape), dtype=torch.uint8)  # torch aligns what NumPy may not
    if box.size and BandBuffer(_READ_BUFFER_BYTES).read(reader, index, box, buffer.numpy()) != box.size:
        raise CoverageError(f"{index.chunks[0].name}: not every element of {box} is stored")
    return buffer.view(kind).reshape(dtype.unit_shape(box.shape))


class LazyTensor:
    """One tensor, not read yet: it can be asked and indexed like the slices of the safetensors library.

    Every index reads the bytes of the smallest box that holds it, and gives a new dense tensor on the CPU.
    """

    __slots__ = ("_shape", "elements", "name")

    def __init__(self, name: str, elements: DType, shape: Sequence[int]) -> None:
        self.name = name
        self.elements = elements
        """Their type, as it is stored."""
        self._shape = tuple(shape)

    def get_shape(self) -> list[int]:
        """Return the whole tensor's shape, in elements."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the safetensors name of the element type, such as ``BF16``."""
        return self.elements.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape, in elements."""
        return self._shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._shape)

    @property
    def dtype(self) -> Any:  # noqa: ANN401 - a torch.dtype
        """The torch type of the elements."""
        return get_torch_type(self.elements)

    def is_floating_point(self) -> bool:
        """Return whether the elements are floats."""
        return bool(self.dtype.is_floating_point)

    def __getitem__(self, index: object) -> Array:
        """Return the elements that `index` selects: integers, slices and an Ellipsis, or a tuple of them.

        Raises UnsupportedError without torch.
        """
        try:
            import torch  # noqa: F401 - what `read` needs
        except ImportError as error:
            raise UnsupportedError(f"reading needs torch: {error}", hint=format_install_command("verify")) from error
        box, picks = _resolve_index(index, self._shape)
        return self.read(box)[picks]

    def read(self, box: Box) -> Array:
        """Return the elements of `box`, dense on the CPU."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{self.name}: {self.elements} {list(self._shape)}, not read yet>"


class StoredTensor(LazyTensor):
    """A tensor of a manifest."""

    __slots__ = ("_index", "_reader", "_tensor")

    def __init__(self, tensor: Tensor, reader: ByteReader, name: str = "") -> None:
        super().__init__(name or tensor.name, tensor.dtype, tensor.shape)
        self._tensor, self._reader = tensor, reader
        self._index: ChunkIndex | None = None

    def read(self, box: Box) -> Array:
        """Return the elements of `box`, each from its first copy; raises CoverageError if the tensor has holes."""
        if not box.size:
            import torch

            return torch.empty(box.shape, dtype=self.dtype)
        if self._index is None:
            (self._tensor,) = unfold_tensors(self._tensor)
            self._index = ChunkIndex(cover_tensor(self._tensor))
        turns = self._tensor.turns
        if turns == 1:
            return read_box(self._reader, self._index, box)
        *_, first = box.origin
        start, stop = first // turns * turns, -(-(first + box.shape[-1]) // turns) * turns
        whole = Box((*box.origin[:-1], start), (*box.shape[:-1], stop - start))
        found = read_box(self._reader, self._index, unfold_box(whole, turns)).reshape(whole.shape)
        return found[..., first - start : first - start + box.shape[-1]]


class FusedTensor(LazyTensor):
    """An array of transformers' state dict that holds several tensors of a checkpoint."""

    __slots__ = ("_fusion", "_parts")

    def __init__(self, fusion: TensorFusion, parts: Sequence[LazyTensor], dtype: DType) -> None:
        super().__init__(fusion.name, dtype, fusion.shape)
        self._fusion, self._parts = fusion, parts

    def read(self, box: Box) -> Array:
        """Return the elements of `box`, put together from the parts of the tensors that lie there."""
        import torch

        result = torch.empty(box.shape, dtype=self.dtype)
        places = self._fusion.places
        for position, common in places.index.find_overlaps(box):
            view, part = places.views[position], self._parts[position]
            if view.dense:
                within = Box(
                    tuple(common.origin[axis] - view.origin[axis] for axis in view.axes),
                    tuple(common.shape[axis] for axis in view.axes),
                )
                piece = part.read(within)
                result[common.slices(box.origin)] = _align_dims(piece, view.axes, len(self._shape))
            else:  # interleaved: the whole of it, of which the box may want less
                image = view.image(part.shape)
                whole = torch.zeros(image.shape, dtype=self.dtype)
                steps = dict(zip(view.axes, view.steps, strict=True))
                where = tuple(slice(None, None, steps.get(dim, 1)) for dim in range(len(self._shape)))
                whole[where] = _align_dims(part[...], view.axes, len(self._shape))
                taken = torch.zeros(image.shape, dtype=torch.bool)
                taken[where] = True
                inside, target = common.slices(image.origin), result[common.slices(box.origin)]
                target[taken[inside]] = whole[inside][taken[inside]]
        return result


@dataclass(frozen=True)
class LazyStateDict(Mapping[str, LazyTensor]):
    """A checkpoint as a state dict, by name; nothing is read before an entry is indexed.

    It must not outlive the reader it was made with.
    """

    entries: dict[str, LazyTensor]

    def __getitem__(self, name: str) -> LazyTensor:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def build_lazy_state_dict(manifest: Manifest, reader: ByteReader, model: Model | None = None) -> LazyStateDict:
    """Build a lazy state dict over the bytes that `reader` reads, for any layout.

    Names are those of the manifest, a tie by each of its names; with a `model`, to whose names the manifest is bound,
    those of the state dict of transformers' class, with the arrays that it has in place of several tensors. Tensors
    that the class does not have keep their own names.
    """
    return LazyStateDict(
        build_entries(manifest, model, lambda name, called: StoredTensor(manifest.tensors[name], reader, called))
    )


def build_entries(
    manifest: Manifest, model: Model | None, tensor: Callable[[str, str], LazyTensor]
) -> dict[str, LazyTensor]:
    """Build the entries of a state dict: `tensor` makes one from its name in the manifest and the name to use."""
    found: dict[str, LazyTensor] = {}
    fused: set[str] = set()
    for fusion in model.fusions.values() if model else ():
        if not fusion.stored and all(name in manifest.tensors for name in fusion.tensors):
            parts = [tensor(name, name) for name in fusion.tensors]
            found[fusion.name] = FusedTensor(fusion, parts, manifest.tensors[fusion.tensors[0]].dtype)
            fused.update(fusion.tensors)
    for name, each in manifest.tensors.items():
        if name not in fused:
            found |= {called: tensor(name, called) for called in (name, *each.ties)}
    return found


def _resolve_index(index: object, shape: tuple[int, ...]) -> tuple[Box, tuple[object, ...]]:
    """Return the box that an index needs, and what then selects from it."""
    parts = list(index) if isinstance(index, tuple) else [index]
    given = sum(part is not Ellipsis for part in parts)
    if given > len(shape) or parts.count(Ellipsis) > 1:
        raise IndexError(f"index {index!r} does not fit a tensor of {len(shape)} dims")
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    parts[at : at + 1] = [slice(None)] * (len(shape) - given)
    origin, extents, picks = [], [], list[object]()
    for part, extent in zip(parts, shape, strict=True):
        if isinstance(part, slice):
            start, stop, step = part.indices(extent)
            if step < 1:
                raise IndexError(f"a step of {step} is not supported; it must be positive")
            stop = max(stop, start)
            origin.append(start)
            extents.append(stop - start)
            picks.append(slice(None, None, step))
        elif isinstance(part, int):
            where = part + extent if part < 0 else part
            if not 0 <= where < extent:
                raise IndexError(f"index {part} is outside of a dim of {extent}")
            origin.append(where)
            extents.append(1)
            picks.append(0)
        else:
            raise TypeError(f"{part!r} cannot index a tensor that is not read yet; use integers and slices")
    return Box(tuple(origin), tuple(extents)), tuple(picks)


def _align_dims(piece: Array, axes: tuple[int, ...], ndim: int) -> Array:
    """Return a tensor whose dims run along `axes` of an array of `ndim` dims, as a box of that array."""
    order = sorted(range(len(axes)), key=lambda dim: axes[dim])
    shape = [1] * ndim
    for dim, axis in enumerate(axes):
        shape[axis] = piece.shape[dim]
    return piece.permute(order).reshape(shape)
