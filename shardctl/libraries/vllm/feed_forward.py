"""Describes vLLM's arrays of what stands behind attention in a layer: one MLP, or experts and their router.

Names and orders are those of vLLM 0.32.0, `model_executor/models/` and `layers/fused_moe/`; what older profiles call
otherwise stands beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError
from shardctl.libraries.arrays.composite import SchemaEntry, join_arrays

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.libraries.vllm.rank import VllmRank

USUAL: Final = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_EXPERT_NAMES: Final = ("w1", "w3", "w2")
_UNGATED_MLP_MODULES: Final = (("up_proj", "down_proj"), ("c_fc", "c_proj"))
"""Of an MLP without a gate."""
_ACTIVATION_PARAMETERS: Final = ("alpha_p", "alpha_n", "beta", "eps")
"""What an activation function that is trained has, Apertus' alone."""
_TRANSFORMERS_BACKEND_FAMILIES: Final = frozenset({"solar_open", "mistral4"})
"""Those with experts that vLLM's Transformers backend runs, which keeps the name of the module of shared experts."""

_ROUTER_DTYPE: Final = BY_NAME["F32"]
_SEPARATE_ROUTER_FAMILIES: Final = frozenset({"mixtral", "qwen2_moe", "olmoe", "lfm2_moe"})
"""Those that do not give the router to the module of the experts, whose name for it would sort first."""
_FP32_ROUTER_FAMILIES: Final = frozenset({"glm4_moe", "minimax_m2", "ernie4_5_moe"})
"""Those whose router vLLM keeps in fp32 and apart, whatever the type of the others."""
_SIBLING_BIAS_FAMILIES: Final = frozenset({"minimax_m2", "exaone_moe"})
"""Those whose bias stands beside the router."""
_CORRECTION_BIAS_NAME: Final = "e_score_correction_bias"


def list_feed_forward(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List an MLP of a layer, or its experts; nothing if it has neither under this name."""
    if f"{have}.gate.weight" in here:
        yield from _list_mixture(here, have)
    elif f"{have}.gate_proj.weight" in here:
        yield from _list_gated_mlp(here, have, have)
    elif f"{have}.gate_up_proj.weight" in here:
        halves = (part.share(0, here.index, here.tp) for part, _ in here.sections(f"{have}.gate_up_proj.weight"))
        yield SchemaEntry(f"{have}.gate_up_proj.weight", join_arrays(list(halves)))
        yield from here.row_layer(f"{have}.down_proj")
    elif f"{have}.w1.weight" in here:
        yield from here.merged(f"{have}.w13", [f"{have}.w1", f"{have}.w3"])
        yield from here.row_layer(f"{have}.w2")
    for wide, narrow in _UNGATED_MLP_MODULES:
        if f"{have}.{wide}.weight" in here and f"{have}.gate_proj.weight" not in here:
            yield from here.column_layer(f"{have}.{wide}")
            yield from here.row_layer(f"{have}.{narrow}")
            yield from here.same(*(f"{have}.act_fn.{name}" for name in _ACTIVATION_PARAMETERS))


def _list_mixture(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List routed experts, their router, and experts that all tokens share."""
    if f"{have}.experts.gate_up_proj" in here:
        yield from _list_stacked_experts(here, f"{have}.experts")
    else:
        names = _MIXTRAL_EXPERT_NAMES if f"{have}.experts.0.w1.weight" in here else USUAL
        yield from list_experts(here, have, names, f"{have}.gate")
    yield from _list_router(here, have)
    if here.for_sglang:
        yield from _list_sglang_shared(here, have)
        return
    shared = f"{have}.experts._shared_experts{'._layer' if here.modern else ''}"
    if here.parts.model.family in _TRANSFORMERS_BACKEND_FAMILIES:
        shared = f"{shared}.shared_experts"
    if f"{have}.shared_experts.down_proj.weight" in here:
        yield from _list_gated_mlp(here, f"{have}.shared_experts", shared)
    elif f"{have}.shared_expert.down_proj.weight" in here:
        yield from _list_gated_mlp(here, f"{have}.shared_expert", shared)
        yield SchemaEntry(f"{shared}.expert_gate.weight", here[f"{have}.shared_expert_gate.weight"])


def _list_sglang_shared(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List experts that all tokens share as SGLang's classes call them, which is as the model does."""
    for name in ("shared_experts", "shared_expert"):
        if f"{have}.{name}.down_proj.weight" in here and not here.shared_last:
            yield from _list_gated_mlp(here, f"{have}.{name}", f"{have}.{name}")
    yield from here.same(f"{have}.shared_expert_gate.weight")


def _list_gated_mlp(here: VllmRank, have: str, new: str) -> Iterator[SchemaEntry]:
    yield from here.merged(f"{new}.gate_up_proj", [f"{have}.gate_proj", f"{have}.up_proj"])
    yield from here.row_layer(f"{have}.down_proj", f"{new}.down_proj")


def list_experts(here: VllmRank, have: str, parts: tuple[str, str, str], router: str) -> Iterator[SchemaEntry]:
    """List experts that the model has one by one, as many as the router has rows."""
    count = here[f"{router}.weight"].shape[0]
    names = [f"{have}.experts.{number}" for number in range(count)]
    if here.shared_last:
        names.append(f"{have}.shared_experts")
    yield from here.experts(f"{have}.experts", names, parts)


def _list_stacked_experts(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List experts that the model has in two arrays, of rows or, as in Qwen3-VL, of columns."""
    both, down = here[f"{have}.gate_up_proj"], here[f"{have}.down_proj"]
    turned = len(here.parts.model.tensors[here.parts.resolve(f"{have}.gate_up_proj")].spec.cuts[2]) > 0
    if turned:
        both, down = both.transposed, down.transposed
    held = here.held(both.shape[0])
    if not held:
        raise PartitionError(f"{have}: {both.shape[0]} experts are too few for ep={here.tp}")
    both, down = (stack.part(0, held.start, held.stop) for stack in (both, down))
    halves = [here.inside(half, 1) for half in both.shares(1, 2)]
    yield SchemaEntry(f"{here.routed(have)}.w13_weight", join_arrays(halves, 1))
    yield SchemaEntry(f"{here.routed(have)}.w2_weight", here.inside(down, 2))


def _list_router(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List the weights of a router, and the bias with which it chooses experts."""
    family = here.parts.model.family
    shared = f"{have}.shared_experts.down_proj.weight" in here
    given = not here.for_sglang and (shared or (here.modern and family not in _SEPARATE_ROUTER_FAMILIES))
    gate = f"{have}.gate" if not given else f"{have}.experts.gate" if here.modern else f"{have}.experts._gate"
    bias = f"{gate}.{_CORRECTION_BIAS_NAME}"
    if family in _FP32_ROUTER_FAMILIES | {"lfm2_moe"}:
        gate, bias = f"{have}.gate", f"{here.routed(f'{have}.experts')}.{_CORRECTION_BIAS_NAME}"
    if family in _SIBLING_BIAS_FAMILIES:
        bias = f"{have}.{_CORRECTION_BIAS_NAME}"
    yield SchemaEntry(
        f"{gate}.weight", here[f"{have}.gate.weight"], dtype=_ROUTER_DTYPE if family in _FP32_ROUTER_FAMILIES else None
    )
    for name in (
        f"{have}.gate.{_CORRECTION_BIAS_NAME}",
        f"{have}.{_CORRECTION_BIAS_NAME}",
        f"{have}.expert_bias",
        f"{have}.moe_statics.{_CORRECTION_BIAS_NAME}",
    ):
        if name in here and not here.parts.is_optional(name):
            yield SchemaEntry(bias, here[name], shape=here[name].shape[-1:])
