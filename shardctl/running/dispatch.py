"""Dispatches a checkpoint that is not cut into ranks: whole blocks over devices, then host memory, then a folder.

    with open_dispatch(checkpoint, VerifyOptions(device="cuda"), forward=True) as dispatch:
        for place in dispatch.plan():
            dispatch.load(place, ...)

A block is a layer, or a module outside of layers such as the embedding; it is never divided, because code within it
adds tensors to one another (`no_split_modules` of transformers).
"""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import MemoryBudgetError, UnsupportedError, UsageError, format_first_few
from shardctl.base.value import state_class, value_class
from shardctl.running.device import (
    is_cuda_device,
    list_devices,
    measure_device_memory,
    measure_host_memory,
)
from shardctl.running.forward.lazy_state_dict import StoredTensor, get_torch_type
from shardctl.running.load import as_bytes
from shardctl.running.loaded import collect_arrays, find_array_parts, place_loaded_arrays
from shardctl.tensors.copyplan import cover_tensor
from shardctl.tensors.manifest import Region, name_block, sort_naturally
from shardctl.verify import rank_files
from shardctl.verify.level import BlockPlacement

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.options import VerifyOptions
    from shardctl.running.loaded import Array, Parts
    from shardctl.tensors.bands import ByteReader
    from shardctl.tensors.box import Box
    from shardctl.tensors.manifest import Chunk, Tensor

Torch = Any
HOST: Final = "cpu"
DISK: Final = "disk"
BALANCED, SEQUENTIAL = "balanced", "sequential"
_ALLOCATOR_SHARE: Final = 0.05
"""Share of a device's free memory that stays free: torch rounds sizes up, to 2 MiB for large tensors."""
_HOST_SHARE: Final = 0.5
"""Share of the available host memory that blocks may take by default: the forward pass also holds the source's block
and its activations there."""
_FP32_BYTES: Final = 4


@value_class
class DispatchedBlock:
    """A block, and the arrays that belong to it."""

    name: str
    arrays: tuple[Array, ...]
    nbytes: int
    """As they are stored."""


@contextmanager
def open_dispatch(
    checkpoint: OpenedCheckpoint, verify_options: VerifyOptions, *, forward: bool
) -> Iterator[CheckpointDispatch | None]:
    """Open the dispatch of a checkpoint, if its blocks are to be placed one by one; what it holds is freed on exit.

    They are where `--load cuda` names all devices, or an option says where blocks go. Raises UsageError for such an
    option where the checkpoint is cut into ranks, or for a map that does not fit.
    """
    given = [
        flag
        for flag, value in (
            ("--device-map", verify_options.device_map),
            ("--host-memory", verify_options.host_memory),
            ("--offload-folder", verify_options.offload_folder),
        )
        if value is not None
    ]
    dialect = checkpoint.stored.dialect
    if rank_files.list_ranks(checkpoint.stored) or (dialect is not None and len(dialect.ranks) > 1):
        if given:
            raise UsageError(
                f"{given[0]} places the blocks of a whole checkpoint, and {checkpoint.source.name} is cut into ranks",
                hint=f"leave {given[0]} out: each rank has its device",
            )
        yield None
        return
    if not given and verify_options.device != "cuda":
        yield None
        return
    dispatch = CheckpointDispatch(checkpoint, verify_options, forward)
    try:
        yield dispatch
    finally:
        dispatch.release()


@state_class
class CheckpointDispatch:
    """Where each block of a checkpoint goes, and the arrays that are there."""

    checkpoint: OpenedCheckpoint
    verify_options: VerifyOptions
    forward: bool
    """Whether the model is run, so that each device needs room for the source's block and an fp32 copy."""
    arrays: dict[Array, Chunk] = field(init=False)
    parts: Parts = field(init=False)
    """What each array holds."""
    blocks: list[DispatchedBlock] = field(init=False)
    placements: list[BlockPlacement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _tensors: dict[Array, Torch] = field(default_factory=dict)
    _offsets: dict[Array, int] = field(default_factory=dict)
    """Where in the file of the folder an array begins."""
    _last: tuple[Array, Torch] | None = None
    """The array that was read from the folder last: rows of an embedding are asked for one by one."""
    _homes: dict[Array, str] = field(default_factory=dict)
    _begins: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    _file: Any = None
    _complete: bool = False
    _host_limit: int | None = None
    """Bytes of host memory that blocks may take by default, measured once: a note names them, for every plan."""

    def __post_init__(self) -> None:
        self.arrays = collect_arrays(self.checkpoint.stored)
        self.parts = find_array_parts(self.checkpoint.manifest, self.arrays)
        self.blocks = _collect_blocks(self.arrays, self.parts)
        for file, name, offset in sorted(self.arrays):
            self._begins.setdefault((file, name), []).append(offset)

    @property
    def complete(self) -> bool:
        """Whether every array was loaded and compared, so that the model can be run with them."""
        return self._complete

    @property
    def may_place_again(self) -> bool:
        """Whether another device may take what one has failed to hold: no map or number names it."""
        chosen = self.verify_options.device_map in {None, BALANCED, SEQUENTIAL}
        return chosen and self.verify_options.device in {"cuda", "auto", None}

    @property
    def main_device(self) -> str:
        """The device that computes what is outside of blocks, and blocks whose weights are in host memory or on disk.

        The first that has a block.
        """
        found = [each.place for each in self.placements if is_cuda_device(each.place)]
        if found:
            return min(found, key=sort_naturally)
        usable = list_devices(self.verify_options.device or "auto")
        return usable[0]

    def plan(self, failed: Sequence[str] = ()) -> dict[str, list[DispatchedBlock]]:
        """Choose the place of each block, without the devices that have `failed`; returns the blocks by place.

        Raises MemoryBudgetError with the sizes if they do not fit, UsageError for a map that names no block or device.
        """
        options = self.verify_options
        capacities = self._measure_devices(failed)
        host = options.host_memory
        if host is None:
            if self._host_limit is None:
                self._host_limit = int(_HOST_SHARE * measure_host_memory())
            host = self._host_limit
            self._note(f"blocks may take {host:,} bytes of host memory, half of what is free; --host-memory sets it")
        disk = self._measure_folder() if options.offload_folder is not None else 0
        if disk:
            host = max(host - max(map(self.measure, self.arrays), default=0), 0)  # each array passes through it
        if options.device_map not in {None, BALANCED, SEQUENTIAL}:
            chosen = _apply_map(self.blocks, _read_map(str(options.device_map)), [*capacities, HOST, DISK])
        else:
            balanced = options.device_map != SEQUENTIAL
            chosen = _place_blocks(self.blocks, capacities, host, disk, balanced=balanced)
        self._require_room(chosen, capacities | {HOST: host, DISK: disk})
        self.placements = [BlockPlacement(b.name, chosen[b.name], b.nbytes) for b in self.blocks if b.name in chosen]
        self._homes = {key: chosen[block.name] for block in self.blocks for key in block.arrays}
        found: dict[str, list[DispatchedBlock]] = {}
        for block in self.blocks:
            found.setdefault(chosen[block.name], []).append(block)
        return found

    def measure(self, key: Array) -> int:
        """Measure the bytes of an array."""
        chunk = self.arrays[key]
        return chunk.dtype.nbytes(chunk.box.shape)

    def keep(self, place: str, tensors: Mapping[Array, Torch]) -> Mapping[Array, Torch]:
        """Hold loaded arrays for the forward pass, those of the folder in its file; returns them as they are held."""
        if place != DISK:
            self._tensors |= tensors
            return tensors
        for key, tensor in tensors.items():
            data: Any = as_bytes(tensor.contiguous()).numpy()
            if self._file is None:
                # A file without a name: the system frees it when this process ends, however it does.
                self._file = tempfile.TemporaryFile(dir=self.verify_options.offload_folder)  # noqa: SIM115
            self._offsets[key] = self._file.seek(0, os.SEEK_END)
            self._file.write(data)
        self._file.flush()
        return {key: self.read_back(key) for key in tensors}

    def read_back(self, key: Array) -> Torch:
        """Read an array from the folder's file into host memory."""
        import torch

        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self._last = None
        chunk = self.arrays[key]
        buffer = torch.empty(self.measure(key), dtype=torch.uint8)
        view: Any = buffer.numpy()
        at = 0
        while at < len(view):
            count = os.preadv(self._file.fileno(), [view[at:]], self._offsets[key] + at)
            if not count:
                raise OSError("the file in --offload-folder ended early")
            at += count
        made = buffer.view(get_torch_type(chunk.dtype)).reshape(chunk.dtype.unit_shape(chunk.box.shape))
        self._last = key, made
        return made

    def finish(self) -> None:
        """Note that every array was loaded."""
        self._complete = True

    def release(self) -> None:
        """Free what is held."""
        self._tensors.clear()
        self._offsets.clear()
        self._last = None
        self._complete = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def build_tensor(self, name: str, called: str) -> StoredTensor:
        """Build the entry of a state dict for a tensor, which reads from where its arrays were placed."""
        tensor = self.checkpoint.manifest.tensors[name]
        return DispatchedTensor(tensor, self.checkpoint.source, called, self)

    def find_place(self, tensor: Tensor) -> str | None:
        """Find where the first array of a tensor is."""
        keys = (self._find_array(chunk) for chunk in tensor.chunks if isinstance(chunk.where, Region))
        return next((self._homes[key] for key in keys), None)

    def list_boxes(self, tensor: Tensor) -> list[tuple[Box, Torch]] | None:
        """List the boxes that make up a tensor, as they are held; None if its elements are in another order there."""
        cover = cover_tensor(tensor)
        if not cover or tensor.turns != 1 or tensor.dtype.unit_elements != 1:
            return None
        found = []
        for chunk in cover:
            if not isinstance(chunk.where, Region):
                return None
            key = self._find_array(chunk)
            memory = self._tensors[key] if key in self._tensors else self.read_back(key)
            try:
                (placed,) = place_loaded_arrays({key: [(tensor, chunk)]}, self.arrays, {key: memory})
            except UnsupportedError:
                return None
            found.append((chunk.box, placed.values.view(get_torch_type(tensor.dtype))))
        return found

    def _find_array(self, chunk: Chunk) -> Array:
        """Find the array that a chunk lies in."""
        assert isinstance(chunk.where, Region)  # noqa: S101 - asked before
        begins = self._begins[chunk.where.file, chunk.name]
        return chunk.where.file, chunk.name, begins[bisect_right(begins, chunk.where.offset) - 1]

    def _measure_devices(self, failed: Sequence[str]) -> dict[str, int]:
        """Measure the bytes that blocks may take on each device."""
        found: dict[str, int] = {}
        largest = max((block.nbytes for block in self.blocks), default=0)
        elements = max((self._count_elements(block) for block in self.blocks), default=0)
        reserve = (
            2 * _FP32_BYTES * elements if self.forward else min(largest, max(map(self.measure, self.arrays), default=0))
        )
        for device in list_devices(self.verify_options.device or "auto"):
            if device == HOST or device in failed:
                continue
            memory = measure_device_memory(device)
            if memory is None:
                self._note(f"{device} does not say how much of its memory is free, so no block was placed on it")
                continue
            limit = self.verify_options.device_memory
            free = int(memory[0] * (1 - _ALLOCATOR_SHARE)) - reserve
            found[device] = max(min(free, limit) if limit is not None else free, 0)
        return found

    def _count_elements(self, block: DispatchedBlock) -> int:
        return sum(self.arrays[key].box.size for key in block.arrays)

    def _measure_folder(self) -> int:
        folder = self.verify_options.offload_folder
        assert folder is not None  # noqa: S101 - asked before
        if not folder.is_dir():
            raise UsageError(f"--offload-folder {folder} is not a directory", hint="create it, on a disk with room")
        told = os.statvfs(folder)
        return told.f_bavail * told.f_frsize

    def _require_room(self, chosen: Mapping[str, str], capacities: Mapping[str, int]) -> None:
        used = dict.fromkeys(capacities, 0)
        left = [block for block in self.blocks if block.name not in chosen]
        for block in self.blocks:
            if block.name in chosen:
                used[chosen[block.name]] += block.nbytes
        over = [place for place, size in used.items() if size > capacities[place]]
        if not left and not over:
            return
        sizes = ", ".join(
            f"{_name_place(place)} {size:,}" for place, size in capacities.items() if place != DISK or size
        )
        needed = sum(block.nbytes for block in self.blocks)
        if over:
            what = f"{_name_place(over[0])} cannot hold the {used[over[0]]:,} bytes that --device-map gives it"
        else:
            names = format_first_few([block.name for block in left])
            what = f"{sum(b.nbytes for b in left):,} of {needed:,} bytes fit nowhere ({names})"
        folder = self.verify_options.offload_folder is not None
        hint = "free memory, or raise --host-memory" + ("" if folder else ", or name a disk with --offload-folder DIR")
        raise MemoryBudgetError(f"{what}; bytes that blocks may take: {sizes}", needed=needed, hint=hint)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class DispatchedTensor(StoredTensor):
    """A tensor that is read from where its arrays were placed, on that device."""

    __slots__ = ("_dispatch",)

    def __init__(self, tensor: Tensor, reader: ByteReader, name: str, dispatch: CheckpointDispatch) -> None:
        super().__init__(tensor, reader, name)
        self._dispatch = dispatch

    def read(self, box: Box) -> Torch:
        """Return the elements of `box`, without a copy if one array has all of them."""
        import torch

        boxes = self._dispatch.list_boxes(self._tensor) if box.size else None
        if boxes is None:
            return super().read(box)
        if len(boxes) == 1 and boxes[0][0].shape == self._tensor.shape:
            return boxes[0][1][box.slices()]
        first = boxes[0][1]
        result = torch.empty(box.shape, dtype=first.dtype, device=first.device)
        for where, values in boxes:
            common = box.intersect(where)
            if common is not None:
                result[common.slices(box.origin)] = values[common.slices(where.origin)]
        return result


def _collect_blocks(arrays: Mapping[Array, Chunk], parts: Parts) -> list[DispatchedBlock]:
    """Collect the arrays of each block, blocks in the natural order of their names.

    An array that holds tensors of more than one block, such as of stacked layers, is a block of its own.
    """
    found: dict[str, list[Array]] = {}
    for key in arrays:
        names = {name_block(tensor.name) for tensor, _ in parts.get(key, ())} or {name_block(key[1])}
        found.setdefault(names.pop() if len(names) == 1 else key[1], []).append(key)
    return [
        DispatchedBlock(name, tuple(keys), sum(arrays[k].dtype.nbytes(arrays[k].box.shape) for k in keys))
        for name, keys in sorted(found.items(), key=lambda item: sort_naturally(item[0]))
    ]


def _place_blocks(
    blocks: Sequence[DispatchedBlock], capacities: Mapping[str, int], host: int, disk: int, *, balanced: bool
) -> dict[str, str]:
    """Place blocks on devices in order, then in host memory, then in the folder; what fits nowhere is left out.

    `balanced` gives each device its share by free memory; if that leaves more over than filling them in turn, they are
    filled in turn.
    """
    filled = _fill_devices(blocks, capacities, capacities)
    if balanced and capacities:
        total, room = sum(block.nbytes for block in blocks), max(sum(capacities.values()), 1)
        shares = {device: total * size // room for device, size in capacities.items()}
        even = _fill_devices(blocks, capacities, shares)
        if _count_placed(blocks, even) >= _count_placed(blocks, filled):
            filled = even
    for place, limit in ((HOST, host), (DISK, disk)):
        room = limit
        for block in blocks:
            if block.name not in filled and block.nbytes <= room:
                filled[block.name] = place
                room -= block.nbytes
    return filled


def _fill_devices(
    blocks: Sequence[DispatchedBlock], capacities: Mapping[str, int], shares: Mapping[str, int]
) -> dict[str, str]:
    """Fill devices one after another up to their share, and then what is left up to their capacity."""
    placed, used, devices = dict[str, str](), dict.fromkeys(capacities, 0), list(capacities)
    at = 0
    for block in blocks:
        while at < len(devices):
            device = devices[at]
            fits = used[device] + block.nbytes <= capacities[device]
            if fits and used[device] + block.nbytes // 2 <= shares[device]:
                placed[block.name] = device
                used[device] += block.nbytes
                break
            at += 1
    for block in blocks:
        if block.name in placed:
            continue
        roomy = [each for each in devices if used[each] + block.nbytes <= capacities[each]]
        if roomy:
            placed[block.name] = roomy[0]
            used[roomy[0]] += block.nbytes
    return placed


def _count_placed(blocks: Sequence[DispatchedBlock], placed: Mapping[str, str]) -> int:
    return sum(block.nbytes for block in blocks if block.name in placed)


def _read_map(path: str) -> dict[str, str]:
    """Read a device map as transformers has it (`hf_device_map`): modules, and numbers or names of devices."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            told = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--device-map {path} cannot be read: {error}", hint=f"use {BALANCED}, {SEQUENTIAL} or a JSON file"
        ) from error
    wrong = not isinstance(told, dict) or any(
        isinstance(value, bool) or not isinstance(value, int | str) for value in told.values()
    )
    if wrong:
        hint = 'write {"model.embed_tokens": 0, "model.layers.0": "cuda:1", "lm_head": "cpu"}'
        raise UsageError(f"--device-map {path} is not a JSON object of modules and devices", hint=hint)
    return {name: f"cuda:{value}" if isinstance(value, int) else value for name, value in told.items()}


def _apply_map(blocks: Sequence[DispatchedBlock], told: Mapping[str, str], places: Sequence[str]) -> dict[str, str]:
    """Give each block the place of the longest module that contains it."""
    for name, place in told.items():
        if place not in places:
            raise UsageError(
                f"--device-map puts {name or 'the model'} on {place}, which is none of {', '.join(places)}",
                hint="use the devices that --load names, cpu, or disk with --offload-folder DIR",
            )
        if not any(_contains(name, block.name) for block in blocks):
            within = next((block.name for block in blocks if _contains(block.name, name)), None)
            if within is not None:
                raise UsageError(
                    f"--device-map divides the block {within}, whose tensors are added to one another",
                    hint=f"name {within} alone",
                )
            raise UsageError(
                f"--device-map names {name}, of which the checkpoint has nothing",
                hint=f"the blocks are {format_first_few([block.name for block in blocks])}",
            )
    chosen = {}
    for block in blocks:
        over = [name for name in told if _contains(name, block.name)]
        if not over:
            raise UsageError(f"--device-map gives {block.name} no device", hint='"" stands for all modules')
        chosen[block.name] = told[max(over, key=len)]
    return chosen


def _contains(module: str, name: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _name_place(place: str) -> str:
    return {HOST: "host memory", DISK: "--offload-folder"}.get(place, place)
