"""Finds devices, and speaks to them: the only functions that know a CUDA device from the CPU, besides `load`.

Whoever works on `cuda:1` makes it the current device of the thread: else events, pinned memory and kernels written in
Triton belong to device 0, which takes some hundred MB of it, or fails where another program has it for itself.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.base.extras import format_install_command

if TYPE_CHECKING:
    from collections.abc import Iterator

_CGROUP_FILES: Final = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controller, which is empty in version 2: where cgroups are mounted, and what limit, usage and page cache are."""


def list_devices(kind: str) -> list[str]:
    """List the devices that `cpu`, `cuda`, `auto` or one device such as ``cuda:1`` stands for.

    Numbers count what `CUDA_VISIBLE_DEVICES` leaves. Raises UnsupportedError if torch or the device is not there,
    UsageError for what is no device.
    """
    number = parse_device_number(kind)
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(f"loading needs torch: {error}", hint=format_install_command("verify")) from error
    count = torch.cuda.device_count() if has_cuda_device() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return ["cpu"]
    if not count:
        raise UnsupportedError(f"there is no CUDA device for {kind} (torch {torch.__version__})")
    if number is None:
        return [f"cuda:{index}" for index in range(count)]
    if number >= count:
        raise UnsupportedError(f"there is no device {kind}; CUDA has {count}", hint="use cpu, cuda or cuda:0")
    return [f"cuda:{number}"]


def parse_device_number(kind: str) -> int | None:
    """Parse the number in such as ``cuda:1``; None for a kind of devices. Raises UsageError for what is no device."""
    if kind in {"cpu", "cuda", "auto"}:
        return None
    number = kind.removeprefix("cuda:")
    if number == kind or not (number.isascii() and number.isdecimal()) or len(number) > 3:  # noqa: PLR2004 - as many as fit
        raise UsageError(f"there is no device {kind!r}", hint="use cpu, cuda, auto, or a number such as cuda:1")
    return int(number)


def has_cuda_device() -> bool:
    """Return whether torch finds a device of CUDA."""
    import torch

    return bool(torch.cuda.is_available())


def is_cuda_device(device: str) -> bool:
    """Return whether it is one of CUDA."""
    return device.startswith("cuda")


@contextmanager
def use_device(device: str) -> Iterator[None]:
    """Make it the current device of this thread, if it is one of CUDA."""
    if not is_cuda_device(device):
        yield
        return
    import torch

    with torch.cuda.device(device):
        yield


def select_device(device: str) -> None:
    """Make it the current device of this thread until the thread ends, if it is one of CUDA."""
    if is_cuda_device(device):
        import torch

        torch.cuda.set_device(device)


def synchronize_device(device: str) -> None:
    """Return once all that was asked of the device is done."""
    import torch

    if is_cuda_device(device):
        torch.cuda.synchronize(device)


def empty_device_cache(device: str) -> None:
    """Give memory that no tensor uses any more back to the device; one that has failed keeps it."""
    import torch

    if is_cuda_device(device):
        with suppress(RuntimeError), use_device(device):
            torch.cuda.empty_cache()


def measure_device_memory(device: str) -> tuple[int, int] | None:
    """Measure bytes of the device that are free, and that it has; None where it does not say, as of the CPU."""
    import torch

    if is_cuda_device(device):
        with suppress(RuntimeError):
            free, total = torch.cuda.mem_get_info(device)
            return free, total
    return None


def measure_host_memory(root: Path = Path("/")) -> int:
    """Measure bytes of memory that this process may still take: the machine has them, and its cgroups allow them."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    with suppress(OSError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), available)
    return min([available, *_list_cgroup_memory(root)])


def _list_cgroup_memory(root: Path) -> Iterator[int]:
    """List the bytes that each limit on this process leaves, of a container or of a job; page cache counts as free."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            mounted = next((files for name, files in _CGROUP_FILES.items() if name in controllers.split(",")), None)
            if mounted is None:
                continue
            top, limit, usage, cache = root / mounted[0], *mounted[1:]
            group = top / path.lstrip("/")
            # Each group above has a limit, too. In a container the path may be that of the host: only the top is there.
            for folder in [each for each in (group, *group.parents) if each.is_relative_to(top)]:
                with suppress(OSError, ValueError):  # there is no such file, or it says "max"
                    left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                    told = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                    yield max(left + (int(told[1]) if told is not None else 0), 0)
