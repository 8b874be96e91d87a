"""Decides how much host memory a copy may use, and divides it into blocks and threads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import MemoryBudgetError
from shardctl.base.value import value_class
from shardctl.base.workers import check_threads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardctl.base.dtype import DType
    from shardctl.tensors.copyplan import CopyPlan, TensorCopy

MIB: Final = 1 << 20
INTERPRETER: Final = 40 * MIB
"""Anonymous memory of the command line besides what tensors and threads take: 32 to 33.5 MiB before any tensor is read
(nine sources and seven layouts with Python 3.11, two of each with 3.12 and 3.13, NumPy 2.4, rich 15), and 3 MiB of the
digest's keys."""
PER_TENSOR: Final = 2_500
"""Bytes of bookkeeping for a tensor: manifest, plan, digest, and its line in `shardctl.json` (1,800 for a small Llama
whose names have 40 characters)."""
PER_CHUNK: Final = 1_500
"""Bytes of bookkeeping for a stored or wanted box of a tensor (1,100 to 1,500)."""
PER_THREAD: Final = 8 * MIB
"""What a thread needs besides its blocks (6 to 7 MiB): 4 MiB of aligned memory for direct I/O, 2.5 MiB for the digest,
a stack, and what the allocator keeps."""
PER_READ_TENSOR: Final = 1_600
"""Bytes of bookkeeping for a tensor that is read and not converted: names, places, digest, and its line in the report
(1,000 for names of 50 characters, 1,250 where every digest is printed as JSON)."""
PER_READ_CHUNK: Final = 1_000
"""Bytes of bookkeeping for each further chunk of it."""
USUAL_BLOCK: Final = 8 * MIB
"""Larger blocks were not faster; smaller ones cost more calls."""
SMALLEST_BLOCK: Final = 256 << 10
"""Below this the cost of a call shows."""


@value_class
class HostMemoryBudget:
    """`projected` is a promise: the engine's anonymous memory stays below it, whatever the size of the model."""

    limit: int
    """Bytes the user allows."""
    threads: int
    block: int
    """Bytes of a band."""
    per_thread: int
    """Bytes of each thread: the band, the gather scratch, the cast's output, and what comes on top."""
    reserved: int
    """Bytes that do not depend on threads and block: the interpreter and the manifests."""
    buffers: float
    """Blocks each thread holds: the band, the scratch, and the output of a cast."""

    def with_block(self, block: int) -> HostMemoryBudget:
        """Return the same limit with the block size of an earlier run, and as many threads as then fit.

        Raises MemoryBudgetError if not even one does.
        """
        per_thread = int(block * self.buffers) + PER_THREAD
        threads = min(self.threads, (self.limit - self.reserved) // per_thread)
        if threads < 1:
            raise MemoryBudgetError(
                f"the interrupted run had blocks of {block:,} bytes, too many for --memory {self.limit / MIB:.0f}MiB",
                needed=self.reserved + per_thread,
                hint="allow as much memory as that run had, or add --no-resume to start again",
            )
        return replace(self, block=block, per_thread=per_thread, threads=threads)

    @property
    def projected(self) -> int:
        """Peak anonymous memory in bytes."""
        return self.threads * self.per_thread + self.reserved


_READ_BUFFERS: Final = 5
"""Blocks each thread holds that compares replicas: both sides, scratch, the output of a cast, and where they differ."""
_CHEAP_LISTS: Final = 16 << 20
"""Bytes of bookkeeping up to which a plan is made even if it cannot fit: it is cheap, and then the refusal is exact."""


def require_bookkeeping(tensors: int, chunks: int, limit: int, *, wanted: int = 0, counted: bool = False) -> None:
    """Raise MemoryBudgetError if `limit` bytes cannot even hold the list of what is converted.

    It needs the numbers of the source's tensors and chunks only, and of those that are `wanted` as far as they are
    known, all if they were `counted`, so it can be asked before a plan is made of them; the optimizer's states, which
    may be left behind, are not counted.
    """
    lists = PER_TENSOR * tensors + PER_CHUNK * (chunks + wanted)
    least = INTERPRETER + PER_THREAD + lists
    if least > limit and lists > _CHEAP_LISTS:
        stored = f"{tensors:,} tensors in {chunks:,} chunks" if tensors else f"at least {chunks:,} chunks of tensors"
        result = f", the result {'' if counted else 'at least '}{wanted:,}" if wanted else ""
        raise MemoryBudgetError(
            f"--memory {limit / MIB:.0f}MiB cannot hold this conversion: it needs more than {-(-least // MIB)} MiB",
            needed=least,
            hint=f"the source has {stored}{result}; allow more memory",
        )


def require_reading(chunks: int, limit: int, verb: str = "digest") -> None:
    """Raise MemoryBudgetError if `limit` bytes cannot hold the list of so many chunks of a source that is only read.

    Each may be a tensor, or a further chunk of one, so this can be asked before anything is made of a header. `verb` is
    what the message calls the work.
    """
    lists = PER_READ_CHUNK * chunks
    least = INTERPRETER + PER_THREAD + lists
    if least > limit and lists > _CHEAP_LISTS:
        raise MemoryBudgetError(
            f"--memory {limit / MIB:.0f}MiB cannot hold this {verb}: it needs more than {-(-least // MIB)} MiB",
            needed=least,
            hint=f"the source has at least {chunks:,} chunks of tensors; allow more memory",
        )


def divide_host_memory(plan: CopyPlan, limit: int, threads: int, *, beside: int = 0) -> HostMemoryBudget:
    """Divide `limit` bytes; blocks shrink before threads are given up. `beside` are those that the source holds.

    Raises UsageError for more threads than any machine uses, MemoryBudgetError if not even one thread with the smallest
    block fits.
    """
    chunks = sum([len(c.source.chunks) + len(c.target.chunks) for c in plan.copies])
    casts = {(id(c.source.dtype), id(c.target.dtype)): (c.source.dtype, c.target.dtype) for c in plan.copies}
    aside = [copy for copy in plan.copies for chunk in copy.target.chunks if chunk.aside]
    besides = max((_compute_aside_ratio(copy) for copy in aside), default=0)
    return divide_counted_memory(len(plan.copies), chunks, casts.values(), limit, threads, beside, aside=besides)


def divide_counted_memory(
    tensors: int,
    chunks: int,
    casts: Iterable[tuple[DType, DType]],
    limit: int,
    threads: int,
    beside: int,
    *,
    aside: float = 0,
) -> HostMemoryBudget:
    """Divide `limit` bytes as `divide_host_memory`, for so many tensors with so many chunks on both sides together.

    `casts` are the types that tensors have and will have, `aside` what each byte of a source takes in further copies.
    """
    reserved = INTERPRETER + beside + PER_TENSOR * tensors + PER_CHUNK * chunks
    buffers = 2 + max((_compute_cast_ratio(have, want) for have, want in casts), default=0) + aside
    return _divide_rest(reserved, buffers, limit, threads, "conversion", f"{tensors} tensors in {chunks} chunks")


def divide_reading_memory(
    tensors: int, chunks: int, limit: int, threads: int, beside: int = 0, verb: str = "digest"
) -> HostMemoryBudget:
    """Divide `limit` bytes as `divide_host_memory`, for tensors that are read and compared with their replicas."""
    reserved = INTERPRETER + beside + PER_READ_TENSOR * tensors + PER_READ_CHUNK * max(chunks - tensors, 0)
    return _divide_rest(reserved, _READ_BUFFERS, limit, threads, verb, f"{tensors} tensors in {chunks} chunks")


def _divide_rest(reserved: int, buffers: float, limit: int, threads: int, verb: str, listed: str) -> HostMemoryBudget:
    """Divide what is left of `limit` bytes among threads; `verb` and what is `listed` are said if it holds not one."""
    check_threads(threads)
    for count in range(threads, 0, -1):
        block = min(USUAL_BLOCK, int(((limit - reserved) / count - PER_THREAD) / buffers) // 4096 * 4096)
        if block >= (MIB if count > 1 else SMALLEST_BLOCK):
            return HostMemoryBudget(limit, count, block, int(block * buffers) + PER_THREAD, reserved, buffers)
    least = reserved + PER_THREAD + int((SMALLEST_BLOCK + 4096) * buffers)
    raise MemoryBudgetError(
        f"--memory {limit / MIB:.0f}MiB cannot hold this {verb}: it needs at least {-(-least // MIB)} MiB",
        needed=least,
        hint=f"{reserved / MIB:.0f} MiB of that is the program and {listed}",
    )


def _compute_aside_ratio(copy: TensorCopy) -> float:
    """Compute bytes of the copies that are written aside in another type, for one byte of their source."""
    dtypes = {chunk.dtype for chunk in copy.target.chunks if chunk.aside} - {copy.target.dtype}
    return max((dtype.bits / copy.source.dtype.bits for dtype in dtypes), default=0)


def _compute_cast_ratio(have: DType, want: DType) -> float:
    """Compute bytes of a cast's output for one byte of its input; none without a cast."""
    return 0 if have == want else want.bits / have.bits
