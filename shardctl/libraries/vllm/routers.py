"""Says where vLLM keeps the routers of experts, and in which type: each of its classes has its own way.

Names are those of vLLM 0.32.0, `model_executor/models/`; what older profiles call otherwise stands beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.libraries.arrays.composite import SchemaEntry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.libraries.vllm.rank import VllmRank

_WIDE: Final = BY_NAME["F32"]
_APART: Final = frozenset({"mixtral", "qwen2_moe", "olmoe", "lfm2_moe"})
"""Those that do not give the router to the module of the experts, whose name for it would sort first."""
_WIDENED: Final = frozenset({"glm4_moe", "minimax_m2", "ernie4_5_moe"})
"""Those whose router vLLM keeps in fp32 and apart, whatever the type of the others."""
_BESIDE: Final = frozenset({"minimax_m2", "exaone_moe"})
"""Those whose bias stands beside the router."""
_BIAS: Final = "e_score_correction_bias"


def list_router(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List the weights of a router, and the bias with which it chooses experts."""
    family = here.parts.model.family
    shared = f"{have}.shared_experts.down_proj.weight" in here
    given = not here.for_sglang and (shared or (here.modern and family not in _APART))
    gate = f"{have}.gate" if not given else f"{have}.experts.gate" if here.modern else f"{have}.experts._gate"
    bias = f"{gate}.{_BIAS}"
    if family in _WIDENED | {"lfm2_moe"}:
        gate, bias = f"{have}.gate", f"{here.routed(f'{have}.experts')}.{_BIAS}"
    if family in _BESIDE:
        bias = f"{have}.{_BIAS}"
    yield SchemaEntry(f"{gate}.weight", here[f"{have}.gate.weight"], dtype=_WIDE if family in _WIDENED else None)
    for name in (f"{have}.gate.{_BIAS}", f"{have}.{_BIAS}", f"{have}.expert_bias", f"{have}.moe_statics.{_BIAS}"):
        if name in here and not here.parts.is_optional(name):
            yield SchemaEntry(bias, here[name], shape=here[name].shape[-1:])
