"""On which devices the tests of this folder run: real ones, devices that are none, or the CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from fake_cuda import GIB, install_fake_cuda
from gpu_models import Scale

if TYPE_CHECKING:
    from fake_cuda import FakeCuda

GPU = torch.cuda.is_available()
ASKED = os.environ.get("SHARDCTL_GPU_TESTS")
FAKE = ASKED == "fake" and not GPU
skipped = pytest.mark.skipif(
    not GPU and ASKED not in {"cpu", "fake"},
    reason="there is no CUDA device here; SHARDCTL_GPU_TESTS=cpu or fake runs what can be run without one",
)
needs_gpu = pytest.mark.skipif(not GPU, reason="there is no CUDA device here")
needs_devices = pytest.mark.skipif(not GPU and not FAKE, reason="there is no CUDA device here, and none is pretended")
ON = Scale("cuda:0" if GPU or FAKE else "cpu", tiny=True)
"""Where shardctl computes; tests use tiny models, and the table those of real proportions."""
BARE = Scale("cuda:0" if GPU else "cpu", tiny=True)
"""Where torch and other libraries compute without it."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda | None:
    """Two devices that are none, if they are asked for."""
    return install_fake_cuda(monkeypatch, GIB, GIB) if FAKE else None


def limit_device(number: int, nbytes: int) -> None:
    """Let this process have so many bytes of a device; all of it, if they are negative."""
    total = torch.cuda.get_device_properties(number).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if nbytes < 0 else nbytes / total, number)
