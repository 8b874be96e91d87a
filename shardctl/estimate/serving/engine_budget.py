"""Counts what an engine that serves keeps free of a device, because it was told to use a part of the memory only.

Engines count differently what that part holds:

- `vllm`: the part of all memory holds weights, the peak of a forward pass, the graphs (since 0.20) and the cache. The
  context and the communicators are there before it measures, and lie beside it, as does the allocator's slack (vLLM
  0.33, v1/worker/gpu_worker.py, `init_device` and `determine_available_memory`; v1/worker/utils.py, `request_memory`);
- `sglang`: the part of what is free beside the context and the communicators holds weights and the cache, and all else
  lies beside it (SGLang 0.5, model_executor/model_runner_kv_cache_mixin.py, `profile_max_num_token`). It asks the
  device what is free, where weights take whole blocks of torch's allocator; vLLM asks torch what is allocated.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.estimate.runtime import COMMUNICATORS, CONTEXT, GRAPHS, MIB, SLACK
from shardctl.estimate.term import MemoryTerm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardctl.estimate.workload import EngineBudget

_WEIGHT_ROUNDING_TERM: Final = "blocks of weights, rounded up"
_ALLOCATOR_BLOCK_BYTES: Final = 2 * MIB
"""Bytes whose multiples torch's allocator gives to tensors of 10 MiB and more."""
_ENGINE_RESERVE_TERM: Final = "kept free by the engine"
_BUDGET_SOURCES: Final = {
    "vllm": "vLLM 0.33, v1/worker/utils.py, request_memory, and v1/worker/gpu_worker.py, determine_available_memory",
    "sglang": "SGLang 0.5, model_executor/model_runner_kv_cache_mixin.py, profile_max_num_token",
}

_H100_BYTES: Final = 70 << 30
_B200_BYTES: Final = 160 << 30
"""From so many bytes of device memory on, vLLM's defaults are larger."""
_A100_COMPUTE_CAPABILITY: Final = 8.0
"""The compute capability of an A100, which has the defaults of smaller devices since 0.9 (vllm-project/vllm#17885)."""
_GB10_COMPUTE_CAPABILITY: Final = 12.1
"""The compute capability of a GB10 (DGX Spark), which has the defaults of smaller devices since 0.33."""


@value_class
class EngineRules:
    """How one version of vLLM counts, read from its source (each minor version from 0.8 to 0.21, then 0.23 to 0.33)."""

    utilization: float
    """`gpu_memory_utilization` if nobody says (config/cache.py)."""
    graphs_inside: bool
    """Whether the part holds CUDA graphs (envs.py, VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS)."""
    ahead: int
    """Forward passes under way beyond one for each stage: 1 with asynchronous scheduling (config/vllm.py)."""
    sampler: tuple[int, int, int]
    """Tenths of an fp32 logit for each logit that the sampler has at its peak: the least, the usual, the most."""
    sampler_rows: int
    """Rows of fp32 logits that Triton's programs keep, one each, at most one for each sequence."""


_SORTING_SAMPLER_TENTHS: Final = (35, 97, 120)
"""Without Triton, top-p sorts the logits, with int64 indices; FlashInfer, where it is enabled, does not."""
_UNSORTED_SAMPLER_TENTHS: Final = (35, 35, 60)
"""Logits in 16 bits, in fp32, probabilities and noise, or FlashInfer's masked logits: 14 bytes of each logit."""
_RUNNER_V2_SAMPLER_TENTHS: Final = (15, 15, 40)
"""Model Runner V2 profiles logits in 16 bits and in fp32, without top-k and top-p (v1/worker/gpu/model_runner.py,
`_dummy_sampler_run`); in use, the fp32 logits are masked in place."""
_WARMED_SAMPLER_TENTHS: Final = (15, 35, 60)
"""Model Runner V2 since 0.33 profiles top-k, top-p and penalties, too: with FlashInfer, which is the default, logits in
16 bits, a copy in fp32, masked logits and probabilities; Triton changes the copy in place (vLLM 0.33,
v1/worker/gpu/model_runner.py, `_dummy_sampler_run`, and v1/worker/gpu/sample/sampler.py)."""
_EITHER_RUNNER_SAMPLER_TENTHS: Final = (15, 35, 60)
"""Versions in which the class decides between both model runners."""
_ANY_VERSION_SAMPLER_TENTHS: Final = (15, 35, 97)
_TRITON_SAMPLER_PROGRAMS: Final = 132
"""Multiprocessors of an H100: programs of v1/sample/ops/topk_topp_triton.py, whose buffer stays."""


def get_engine_rules(version: tuple[int, int] | None) -> EngineRules:
    """Return the rules of a version of vLLM, such as ``(0, 19)``.

    None stands for a version that nobody said: it counts as 0.33 does, but for the sampler, which differs most.

    >>> get_engine_rules((0, 19)).graphs_inside, get_engine_rules((0, 20)).utilization
    (False, 0.92)
    """
    if version is None:
        return EngineRules(
            0.92,
            graphs_inside=True,
            ahead=1,
            sampler=_ANY_VERSION_SAMPLER_TENTHS,
            sampler_rows=_TRITON_SAMPLER_PROGRAMS,
        )
    if version < (0, 12):
        sampler = _SORTING_SAMPLER_TENTHS
    elif version < (0, 14):
        sampler = _UNSORTED_SAMPLER_TENTHS  # FlashInfer, which these versions require, samples unless it is disabled
    elif version < (0, 17):
        sampler = _SORTING_SAMPLER_TENTHS  # FlashInfer must be enabled
    elif version < (0, 23):
        sampler = _UNSORTED_SAMPLER_TENTHS
    elif version < (0, 28):
        sampler = _EITHER_RUNNER_SAMPLER_TENTHS
    else:
        sampler = _RUNNER_V2_SAMPLER_TENTHS if version < (0, 33) else _WARMED_SAMPLER_TENTHS
    return EngineRules(
        utilization=0.9 if version < (0, 20) else 0.92,
        graphs_inside=version >= (0, 20),
        ahead=int(version >= (0, 14)),
        sampler=sampler,
        sampler_rows=_TRITON_SAMPLER_PROGRAMS if (0, 17) <= version < (0, 28) else 0,
    )


_OLDEST_READ_VERSION: Final = (0, 8)
_NEWEST_READ_VERSION: Final = (0, 33)


def describe_unread_version(budget: EngineBudget) -> str:
    """Say by which rules the memory of a version is counted whose source was not read; empty for all others.

    >>> from shardctl.estimate.workload import EngineBudget
    >>> describe_unread_version(EngineBudget("vllm", 0.9, 80 << 30, (0, 34)))
    'vllm 0.34 was not read: its memory is counted by the rules of 0.33'
    """
    version = budget.version
    if budget.engine != "vllm" or version is None or _OLDEST_READ_VERSION <= version <= _NEWEST_READ_VERSION:
        return ""
    near = _OLDEST_READ_VERSION if version < _OLDEST_READ_VERSION else _NEWEST_READ_VERSION
    asked, known = (".".join(map(str, each)) for each in (version, near))
    return f"vllm {asked} was not read: its memory is counted by the rules of {known}"


def choose_batch_limits(budget: EngineBudget) -> tuple[int, int]:
    """Return vLLM's `max_num_seqs` and `max_num_batched_tokens` of a server if nobody says them.

    They depend on the device (engine/arg_utils.py, `get_batch_defaults`).
    """
    recent = budget.version is None or budget.version >= (0, 29)
    if recent and budget.usable >= _B200_BYTES:
        return 1024, 16384
    a100 = budget.compute_capability == _A100_COMPUTE_CAPABILITY and (
        budget.version is None or budget.version >= (0, 9)
    )
    gb10 = budget.compute_capability == _GB10_COMPUTE_CAPABILITY and (
        budget.version is None or budget.version >= (0, 33)
    )
    return (256, 2048) if a100 or gb10 or budget.usable < _H100_BYTES else (1024, 8192)


_OUTSIDE_TORCH: Final = {False: (48 * MIB, 256 * MIB, 640 * MIB), True: (256 * MIB, 2144 * MIB, 2560 * MIB)}
"""Bytes outside of torch that appear while vLLM profiles, by whether tp ranks reduce over NVLink: the least, the usual
and the most. Modules of kernels and cuBLAS's workspaces; with tp also NCCL's channels, which open at the first use, and
the buffers of fused reductions."""
_NVLINK_COMPUTE_CAPABILITIES: Final = frozenset({8.0, 9.0, 10.0, 10.3})
"""Compute capabilities of devices that NVLink joins: A100, H100 and H200, B200, B300."""


def build_outside_term(budget: EngineBudget, tp: int) -> MemoryTerm | None:
    """Build the term of what lies outside of torch, and vLLM counts in its part; None where another term has it.

    Up to 0.8, logs name it together with the context.
    """
    if budget.engine != "vllm" or (budget.version is not None and budget.version < (0, 9)):
        return None
    linked = tp > 1 and budget.compute_capability in _NVLINK_COMPUTE_CAPABILITIES
    low, usual, high = _OUTSIDE_TORCH[linked]
    if tp > 1 and not linked:
        high = _OUTSIDE_TORCH[True][2]
    return MemoryTerm(
        "kernels and buffers outside of torch",
        "runtime",
        usual,
        "outside",
        {"outside": usual, "tp": tp},
        "vLLM 0.19.0 on H100: 0.24 to 0.27 GiB, with tp 2.06 to 2.17, of stages 0.07 (llm-d-planner, "
        "docs/accuracy/vllm-v0.19.0-accuracy-report.md); on two RTX 4090 0.25 (vllm-project/vllm issue 13061)",
        interval=(low, high),
        counter="device",
    )


def build_rounding_term(layers: int) -> MemoryTerm:
    """Build the term of what SGLang finds occupied beyond the weights of so many layers, each of four matrices."""
    matrices = 4 * layers + 2
    return MemoryTerm(
        _WEIGHT_ROUNDING_TERM,
        "runtime",
        _ALLOCATOR_BLOCK_BYTES // 2 * matrices,
        "matrices * block / 2",
        {"matrices": matrices, "block": _ALLOCATOR_BLOCK_BYTES},
        "torch 2.13, c10/core/AllocatorConfig.h, kRoundLarge; half a block for q, k, v together, the output, gate and "
        "up together, and down. SGLang's logs: 0.11 to 0.28 GiB more than the weights (docs/benchmarks/estimates.md)",
        interval=(0, _ALLOCATOR_BLOCK_BYTES * matrices),
        counter="reserved",
    )


def _list_outside_names(budget: EngineBudget) -> frozenset[str]:
    """List the terms that vLLM does not count in its part of the device."""
    graphs = () if get_engine_rules(budget.version).graphs_inside else (GRAPHS,)
    return frozenset({CONTEXT, COMMUNICATORS, SLACK, *graphs})


def count_engine_room(budget: EngineBudget, terms: Iterable[MemoryTerm]) -> tuple[int, int, int]:
    """Count the bytes that an engine's part of a device leaves for caches: usual, least and most.

    `terms` are all that a rank needs but for caches.
    """
    some = [term for term in terms if term.name != _ENGINE_RESERVE_TERM]
    if budget.engine == "vllm":
        outside = _list_outside_names(budget)
        inside = [term for term in some if term.name not in outside]
        whole = ceil(budget.usable * budget.utilization)
        usual, low, high = (
            whole - sum(sizes) for sizes in zip(*((t.nbytes, t.high, t.low) for t in inside), strict=True)
        )
        return usual, low, high
    inside = [term for term in some if term.category == "weights" or term.name == _WEIGHT_ROUNDING_TERM]
    fixed = [term for term in some if term.name in {CONTEXT, COMMUNICATORS}]
    found = []
    for pick in (lambda t: t.nbytes, lambda t: t.high, lambda t: t.low):
        free = budget.usable - sum(map(pick, fixed))
        found.append(int(free * budget.utilization) - sum(map(pick, inside)))
    return found[0], found[1], found[2]


def build_reserve_term(budget: EngineBudget, terms: Iterable[MemoryTerm]) -> MemoryTerm:
    """Build the term of what stays free; `terms` are all that a rank needs but for its weights.

    With it a rank fits if what the engine counts fits its part, and all together fit the device.
    """
    some = tuple(terms)
    fixed = sum(term.nbytes for term in some if term.name in {CONTEXT, COMMUNICATORS})
    if budget.engine == "vllm":
        outside = _list_outside_names(budget)
        beside = sum(term.nbytes for term in some if term.name in outside)
        left, formula = budget.usable - ceil(budget.usable * budget.utilization), "(1 - u) * memory"
    else:
        beside = (
            sum(term.nbytes for term in some if term.category != "kv cache" and term.name != _WEIGHT_ROUNDING_TERM)
            - fixed
        )
        left = ceil((budget.usable - fixed) * (1 - budget.utilization))
        formula = "(1 - u) * (memory - context - communicators)"
    kept = max(0, left - beside)
    return MemoryTerm(
        _ENGINE_RESERVE_TERM,
        "runtime",
        kept,
        f"max(0, {formula} - beside)",
        {"u": budget.utilization, "memory": budget.usable, "beside": beside},
        _BUDGET_SOURCES[budget.engine],
        interval=(kept, kept),
    )
