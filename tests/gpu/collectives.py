"""Which collectives two processes can do with tensors of one device, or of one device each."""

from __future__ import annotations

import functools
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from shardctl.verify.processes import RankError, run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.verify.worker_process import RankProcess

WORLD = 2
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send and receive", "barrier")
Torch = Any
"""Tensors, and the module of collectives: torch is imported by the ranks alone."""


def tried(device: str) -> Iterator[tuple[str, str, str]]:
    """`(backend and devices, operation, outcome)`: `right`, or what went wrong."""
    import torch

    for operation in OPERATIONS:
        yield (
            f"gloo, 2 processes, 1 {device.partition(':')[0]}",
            operation,
            outcome("gloo", operation, [device] * WORLD),
        )
    if device.startswith("cuda"):
        yield "NCCL, 2 processes, 1 cuda", "all_reduce", outcome("nccl", "all_reduce", [device] * WORLD)
        if torch.cuda.device_count() >= WORLD:
            devices = [f"cuda:{n}" for n in range(WORLD)]
            for operation in OPERATIONS:
                yield "NCCL, 2 processes, 2 cuda", operation, outcome("nccl", operation, devices)


def outcome(backend: str, operation: str, devices: list[str]) -> str:
    """What comes of one operation; a run that fails or hangs is ended and says why."""
    with TemporaryDirectory() as folder:
        work = functools.partial(
            one, backend=backend, operation=operation, devices=devices, store=f"file://{folder}/store"
        )
        start = "spawn" if devices[0].startswith("cuda") else "forkserver"
        try:
            found = run_ranks(work, WORLD, start=start, deadline=60)
        except RankError as error:
            return error.message.splitlines()[0][:160]
    return "right" if all(found) else "wrong values"


def one(rank: RankProcess, backend: str, operation: str, devices: list[str], store: str) -> bool:
    """One operation on one rank; whether its result is right."""
    import torch
    import torch.distributed as dist

    device = torch.device(devices[rank.number])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=store, rank=rank.number, world_size=rank.world)
    mine = torch.full((4,), float(rank.number + 1), device=device)
    return _DONE[operation](mine, rank.number)


def _all_reduce(mine: Torch, _number: int) -> bool:
    _dist().all_reduce(mine)
    return bool((mine == 3).all())


def _broadcast(mine: Torch, _number: int) -> bool:
    _dist().broadcast(mine, 0)
    return bool((mine == 1).all())


def _all_gather(mine: Torch, _number: int) -> bool:
    parts = [mine.new_empty(mine.shape) for _ in range(WORLD)]
    _dist().all_gather(parts, mine)
    return [float(part[0]) for part in parts] == [1.0, 2.0]


def _reduce_scatter(mine: Torch, _number: int) -> bool:
    part = mine.new_empty(len(mine) // WORLD)
    _dist().reduce_scatter_tensor(part, mine)
    return bool((part == 3).all())


def _all_to_all(mine: Torch, _number: int) -> bool:
    got = mine.new_empty(mine.shape)
    _dist().all_to_all_single(got, mine)
    return bool(got.tolist() == [1.0, 1.0, 2.0, 2.0])


def _send_and_receive(mine: Torch, number: int) -> bool:
    got = mine.new_empty(mine.shape)
    calls = [(_dist().send, mine), (_dist().recv, got)]
    for call, tensor in calls if number == 0 else reversed(calls):
        call(tensor, 1 - number)
    return bool((got == 2.0 - number).all())


def _barrier(_mine: Torch, _number: int) -> bool:
    _dist().barrier()
    return True


def _dist() -> Torch:
    import torch.distributed

    return torch.distributed


_DONE = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send and receive": _send_and_receive,
    "barrier": _barrier,
}
