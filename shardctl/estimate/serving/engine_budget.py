"""Counts what an engine that serves keeps free of a device, because it was told to use a part of the memory only.

Engines count differently what that part holds:

- `vllm`: the part of all memory holds weights, the peak of a forward pass, the graphs (since 0.21) and the cache. The
  context and the communicators are there before it measures, and lie beside it, as does the allocator's slack (vLLM
  0.32, v1/worker/gpu_worker.py, `init_device` and `determine_available_memory`; v1/worker/utils.py, `request_memory`);
- `sglang`: the part of what is free beside the context and the communicators holds weights and the cache, and all else
  lies beside it (SGLang 0.5, model_executor/model_runner_kv_cache_mixin.py, `profile_max_num_token`). It asks the
  device what is free, where weights take whole blocks of torch's allocator; vLLM asks torch what is allocated.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final

from shardctl.estimate.runtime import COMMUNICATORS, CONTEXT, MIB, SLACK
from shardctl.estimate.term import MemoryTerm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardctl.estimate.workload import EngineBudget

_ROUNDING: Final = "blocks of weights, rounded up"
_BLOCK: Final = 2 * MIB
"""Bytes whose multiples torch's allocator gives to tensors of 10 MiB and more."""
_KEPT: Final = "kept free by the engine"
_SOURCES: Final = {
    "vllm": "vLLM 0.32, v1/worker/utils.py, request_memory, and v1/worker/gpu_worker.py, determine_available_memory",
    "sglang": "SGLang 0.5, model_executor/model_runner_kv_cache_mixin.py, profile_max_num_token",
}


def build_rounding_term(layers: int) -> MemoryTerm:
    """Build the term of what SGLang finds occupied beyond the weights of so many layers, each of four matrices."""
    matrices = 4 * layers + 2
    return MemoryTerm(
        _ROUNDING,
        "runtime",
        _BLOCK // 2 * matrices,
        "matrices * block / 2",
        {"matrices": matrices, "block": _BLOCK},
        "torch 2.13, c10/core/AllocatorConfig.h, kRoundLarge; half a block for q, k, v together, the output, gate and "
        "up together, and down. SGLang's logs: 0.11 to 0.28 GiB more than the weights (docs/benchmarks/estimates.md)",
        interval=(0, _BLOCK * matrices),
        counter="reserved",
    )


def build_reserve_term(budget: EngineBudget, terms: Iterable[MemoryTerm]) -> MemoryTerm:
    """Build the term of what stays free; `terms` are all that a rank needs but for its weights.

    With it a rank fits if what the engine counts fits its part, and all together fit the device.
    """
    some = tuple(terms)
    fixed = sum(term.nbytes for term in some if term.name in {CONTEXT, COMMUNICATORS})
    if budget.engine == "vllm":
        beside = sum(term.nbytes for term in some if term.name in {CONTEXT, COMMUNICATORS, SLACK})
        left, formula = budget.usable - ceil(budget.usable * budget.utilization), "(1 - u) * memory"
    else:
        beside = sum(term.nbytes for term in some if term.category != "kv cache" and term.name != _ROUNDING) - fixed
        left = ceil((budget.usable - fixed) * (1 - budget.utilization))
        formula = "(1 - u) * (memory - context - communicators)"
    kept = max(0, left - beside)
    return MemoryTerm(
        _KEPT,
        "runtime",
        kept,
        f"max(0, {formula} - beside)",
        {"u": budget.utilization, "memory": budget.usable, "beside": beside},
        _SOURCES[budget.engine],
        interval=(kept, kept),
    )
