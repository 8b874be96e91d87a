"""CUDA devices that are none: torch says that they are there, and tensors on them are on the CPU, their bytes counted.

What is as on a real device: how many there are and how much of each is free, whether a tensor still fits, on which
devices a context was opened, and which thread made which device its own. Kernels, streams and their order are not.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardctl.running.worker_process import RankProcess

GIB = 1 << 30
_FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")


@dataclass
class FakeCuda:
    """Some devices; `install` makes torch tell of them."""

    free: tuple[int, ...] = (GIB, GIB)
    """Bytes of each device that are there to be taken."""
    total: int = GIB
    broken: dict[int, str] = field(default_factory=dict)
    """What a device says to everything it is asked, by its number."""
    contexts: set[int] = field(default_factory=set)
    """The devices that a context was opened on."""
    used: dict[int, int] = field(default_factory=dict)
    peak: dict[int, int] = field(default_factory=dict)
    homes: dict[int, int] = field(default_factory=dict)
    """The device of each storage that was made on one, by the storage's address."""
    _own: Any = field(default_factory=threading.local)

    def install(self, put: Callable[[Any, str, Any], None] = setattr) -> FakeCuda:
        """Put functions into torch, with `monkeypatch.setattr` for as long as a test."""
        for name in _FACTORIES:
            put(torch, name, self._wrap(getattr(torch, name)))
        for name in _METHODS:
            put(torch.Tensor, name, self._wrap(getattr(torch.Tensor, name), method=True))
        told = {
            "is_available": lambda: True,
            "device_count": lambda: len(self.free),
            "current_device": self.current,
            "set_device": self.select,
            "device": self.using,
            "synchronize": lambda device=None: self.open(device),
            "empty_cache": lambda: None,
            "memory_allocated": lambda device=None: self.used.get(self.number(device), 0),
            "max_memory_allocated": lambda device=None: self.peak.get(self.number(device), 0),
            "reset_peak_memory_stats": self.forget_peak,
            "mem_get_info": self.tell_memory,
            "set_per_process_memory_fraction": self.limit,
            "get_device_properties": lambda _=None: SimpleNamespace(name="fake", total_memory=self.total),
            "get_device_name": lambda _=None: "fake",
            "Stream": type("Stream", (), {"__init__": lambda made, device=None: self._make_stream(made, device)}),
            "Event": type(
                "Event", (), {"synchronize": lambda _: None, "record": lambda _, stream: self._record(stream)}
            ),
            "stream": self._enter_stream,
        }
        for name, function in told.items():
            put(torch.cuda, name, function)
        return self

    def number(self, device: Any = None) -> int:
        """The number of a device, as torch reads it; raises as CUDA does for one that is not there."""
        if device is None:
            return self.current()
        if isinstance(device, int):
            index = device
        else:
            index = torch.device(device).index
            index = self.current() if index is None else index
        if not 0 <= index < len(self.free):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return index

    def current(self) -> int:
        """The device of this thread: the first, unless it chose."""
        return getattr(self._own, "device", 0)

    def select(self, device: Any) -> None:
        self._own.device = self.open(device)

    @contextmanager
    def using(self, device: Any) -> Iterator[None]:
        before = self.current()
        self._own.device = self.number(device)
        try:
            yield
        finally:
            self._own.device = before

    def open(self, device: Any = None) -> int:
        """Use a device, as everything but asking how many there are does."""
        number = self.number(device)
        self.contexts.add(number)
        if number in self.broken:
            raise torch.AcceleratorError(self.broken[number])
        return number

    def limit(self, fraction: float, device: Any = None) -> None:
        number = self.number(device)
        self.free = (*self.free[:number], int(fraction * self.total), *self.free[number + 1 :])

    def forget_peak(self, device: Any = None) -> None:
        number = self.number(device)
        self.peak[number] = self.used.get(number, 0)

    def tell_memory(self, device: Any = None) -> tuple[int, int]:
        number = self.open(device)
        return self.free[number] - self.used.get(number, 0), self.total

    def _make_stream(self, stream: Any, device: Any = None) -> None:
        stream.device = self.open(device)

    def _record(self, stream: Any) -> None:
        assert stream.device == self.current(), "an event is of the device that was current when it was made"

    @contextmanager
    def _enter_stream(self, stream: Any) -> Iterator[None]:
        with self.using(stream.device):
            yield

    def _wrap(self, usual: Callable[..., Any], *, method: bool = False) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if kwargs.pop("pin_memory", False):
                self.open()
            device, first = kwargs.get("device"), args[1] if method and len(args) > 1 else None
            if usual.__name__ == "to" and isinstance(first, str | torch.device):
                device = first
            if device is None or torch.device(device).type != "cuda":
                return usual(*args, **kwargs)
            number = self.open(device)
            if method and usual.__name__ == "to" and self.find_home(args[0]) == number and len(args) + len(kwargs) <= 2:
                return args[0]
            if device is first:
                found = usual(args[0], "cpu", *args[2:], **kwargs)
            else:
                found = usual(*args, **{**kwargs, "device": "cpu"})
            if method and found is args[0]:
                found = found.clone()
            self._take(number, found)
            return found

        return made

    def _take(self, number: int, tensor: torch.Tensor) -> None:
        nbytes = tensor.nbytes
        used = self.used.get(number, 0)
        if used + nbytes > self.free[number]:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes} bytes. GPU {number} has a total capacity of "
                f"{self.total} bytes of which {self.free[number] - used} bytes is free."
            )
        self.used[number] = used + nbytes
        self.peak[number] = max(self.peak.get(number, 0), used + nbytes)
        storage = tensor.untyped_storage()
        self.homes[storage._cdata] = number
        weakref.finalize(storage, self._give, number, nbytes, storage._cdata)

    def _give(self, number: int, nbytes: int, storage: int) -> None:
        self.used[number] -= nbytes
        self.homes.pop(storage, None)

    def find_home(self, tensor: torch.Tensor) -> int | None:
        """The device that a tensor was made on, as a copy there or from nothing; None for what kernels made."""
        return self.homes.get(tensor.untyped_storage()._cdata)


def install_fake_cuda(monkeypatch: Any, *free: int) -> FakeCuda:
    """Make devices that are none, here and in the processes of ranks, for as long as a test."""
    from shardctl.running.forward import by_processes

    usual = by_processes.run_ranks

    def run_ranks(work: Any, *args: Any, start: str, **kwargs: Any) -> Any:
        assert start == "spawn", "a device of CUDA cannot be used in a copy of a process that has used one"
        return usual(FakeRankWork(work, free), *args, start=start, **kwargs)

    monkeypatch.setattr(by_processes, "run_ranks", run_ranks)
    return FakeCuda(free).install(monkeypatch.setattr)


@dataclass
class FakeRankWork:
    """What a rank's process does, on devices that are none; for processes that start afresh."""

    work: Callable[[RankProcess], object]
    free: tuple[int, ...]

    def __call__(self, rank: RankProcess) -> object:
        FakeCuda(self.free).install()
        return self.work(rank)
