"""Tells trouble of the machine, such as too little memory or a device that fails, from what a checkpoint does wrong."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import MachineError, ShardctlError

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEVICE_MEMORY: Final = re.compile(
    r"(CUDA|HIP|MPS|XPU) (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|out of memory on"
)
_HOST_MEMORY: Final = re.compile(
    r"DefaultCPUAllocator|std::bad_alloc|Cannot allocate memory|can't start new thread|Unable to allocate \d"
)
_DEVICE_ERROR_PATTERN: Final = re.compile(
    r"(CUDA|HIP) error|CUDA driver|NVIDIA driver|CUDA-capable|CUBLAS_STATUS_|CUSOLVER_STATUS_|CUSPARSE_STATUS_"
    r"|cuDNN error|CUDNN_STATUS_|CUDA kernel errors|NVML|CUDA initialization"
)
_PROCESS_GROUP_ERROR_PATTERN: Final = re.compile(
    r"gloo/|Connection (closed|reset) by peer|NCCL|wait timeout after|Socket Timeout"
)
_NO_MEMORY: Final = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN})
"""How the system refuses memory, files and processes."""
_TORCH_KINDS: Final = {
    "OutOfMemoryError": "memory of the device",
    "AcceleratorError": "device",
    "DistError": "group",
}
"""Exceptions of torch that are trouble of the machine, whatever they say."""
_HINTS_BY_ERROR_KIND: Final = {
    "memory of the device": "end what else uses the device, or name another one with --load, such as cpu",
    "memory": "end what else uses the memory, or use fewer processes (--virtual) and threads (--threads)",
    "device": "look at nvidia-smi and the system's log, or use --load cpu",
    "group": "run it again, or with --virtual, which runs all ranks in one process",
}


def find_machine_error(error: BaseException, device: str = "") -> MachineError | None:
    """Find what of the machine made `error` happen on `device`; None if nothing of it says so."""
    for each in _list_causes(error):
        if isinstance(each, MachineError):
            return each
        if isinstance(each, ShardctlError):
            continue
        kind = _find_kind(each)
        if kind is not None:
            return _build_error(kind, str(each) or type(each).__name__, device)
    return None


def raise_machine_error(error: BaseException, device: str = "") -> None:
    """Raise MachineError if the machine made `error` happen."""
    found = find_machine_error(error, device)
    if found is not None:
        raise found from error


def raise_machine_text(text: str, device: str = "") -> None:
    """Raise MachineError if a library's message tells of such trouble: some catch the exception and keep its words."""
    kind = _find_text_kind(text)
    if kind is not None:
        raise _build_error(kind, text, device)


@contextmanager
def tell_machine_errors(device: str = "") -> Iterator[None]:
    """Make trouble of the machine a MachineError; every other error stays what it is."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        raise_machine_error(error, device)
        raise


def release_frames(error: BaseException) -> None:
    """Let go of what the functions that an error came through had in memory; tensors, most of all."""
    for each in _list_causes(error):
        traceback.clear_frames(each.__traceback__)


def _list_causes(error: BaseException) -> Iterator[BaseException]:
    """List an error and what it came from, each once."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        yield each
        seen.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _find_kind(error: BaseException) -> str | None:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NO_MEMORY):
        return "memory"
    torch: Any = sys.modules.get("torch")
    for name, kind in _TORCH_KINDS.items() if torch is not None else ():
        place = getattr(torch, "distributed", None) if name == "DistError" else torch
        known = getattr(place, name, None)
        if known is not None and isinstance(error, known):
            return _find_text_kind(str(error)) or kind
    return _find_text_kind(str(error)) if isinstance(error, RuntimeError) else None


def _find_text_kind(text: str) -> str | None:
    patterns = {
        "memory of the device": _DEVICE_MEMORY,
        "memory": _HOST_MEMORY,
        "device": _DEVICE_ERROR_PATTERN,
        "group": _PROCESS_GROUP_ERROR_PATTERN,
    }
    return next((kind for kind, pattern in patterns.items() if pattern.search(text)), None)


def _build_error(kind: str, text: str, device: str) -> MachineError:
    said = text.strip().splitlines()[0].rstrip(". ")
    where = device or "the device"
    message = {
        "memory of the device": f"{where} has too little free memory: {said}",
        "memory": f"this machine has too little free memory: {said}",
        "device": f"{where} failed: {said}",
        "group": f"the processes of the ranks lost each other: {said}",
    }[kind]
    return MachineError(message, hint=_HINTS_BY_ERROR_KIND[kind])
