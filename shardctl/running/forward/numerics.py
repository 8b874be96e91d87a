"""Makes a device compute in plain fp32, and the same bits for the same inputs; names the kernels that cannot."""

from __future__ import annotations

import re
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from shardctl.running.device import is_cuda_device

if TYPE_CHECKING:
    from collections.abc import Iterator

Torch = Any
_NONDETERMINISTIC_WARNING_PATTERN: Final = re.compile(r"^(\S+) does not have a deterministic implementation")
"""How torch warns of a kernel whose result depends on the order in which threads come to add, such as histc
(`alertNotDeterministic` of aten/src/ATen/Context.cpp). For cumulative sums, index_add and cuDNN's convolutions it has
others, which it chooses where it is asked for them."""
_OF_CUBLAS: Final = "CUBLAS_WORKSPACE_CONFIG"
"""What torch asks for in the same mode: it matters to several streams at once, and parts of a model run in one."""


@contextmanager
def use_plain_float32() -> Iterator[None]:
    """Compute fp32 products in fp32, on devices and in libraries that would round their factors first.

    Torch has an older and a newer way to say so, refuses to tell by the older what was said by the newer, and fails in
    kernels where the two contradict: so both are set.
    """
    import torch

    backends: Torch = torch.backends
    legacy = ((backends.cuda.matmul, "allow_tf32"), (backends.cudnn, "allow_tf32"))
    places = [getattr(library, name) for library in (backends.cudnn, backends.mkldnn) for name in ("conv", "rnn")]
    places += [backends.cuda.matmul, backends.mkldnn.matmul]
    new = [(place, "fp32_precision") for place in places if hasattr(place, "fp32_precision")]
    before = [(place, name, _read_setting(place, name)) for place, name in (*legacy, *new)]
    try:
        for place, name in legacy:
            setattr(place, name, False)
        for place, name in new:
            setattr(place, name, "ieee")
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def _read_setting(place: object, name: str) -> Torch:
    """Read a setting; False where torch does not tell because it was set by the newer way alone."""
    with suppress(RuntimeError):
        return getattr(place, name)
    return False


@contextmanager
def record_unstable_kernels(device: str, found: dict[str, None]) -> Iterator[None]:
    """Have torch choose kernels on CUDA that give the same bits each time, and note the names of those without such.

    It knows its own kernels alone, and not those of other libraries.
    """
    if not is_cuda_device(device):
        yield
        return
    import torch
    from torch.utils import deterministic

    fills: Torch = deterministic
    enabled, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled, tried = fills.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        fills.fill_uninitialized_memory = torch.backends.cudnn.benchmark = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warned)
            fills.fill_uninitialized_memory, torch.backends.cudnn.benchmark = filled, tried
    for each in caught:
        name = _NONDETERMINISTIC_WARNING_PATTERN.match(str(each.message))
        if name is not None:
            found[name[1]] = None
        elif _OF_CUBLAS not in str(each.message):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
