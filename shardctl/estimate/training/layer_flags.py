"""Lists what holds of a model or a layer that decides which tensors training keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.estimate.model.narrower_types import is_module_scale
from shardctl.estimate.workload import TrainingWorkload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.estimate.model.inventory import TensorInventory
    from shardctl.estimate.model.layer_graph import LayerAttention, LayerGraph, ModelLayer
    from shardctl.estimate.training.saved_activations import Flag
    from shardctl.estimate.workload import Recompute
    from shardctl.models.tables.layer_features import LayerStyle, NormKind
    from shardctl.tensors.mesh import Mesh


_FP32_ELEMENT_BYTES: Final = 4
"""Bytes of an element of what flows between layers that add in fp32."""
_HEAD_NORMS: Final[Mapping[NormKind, Flag]] = {
    "rms": "rms heads",
    "rms16": "rms16 heads",
    "rms32": "rms32 heads",
    "layer": "layer heads",
    "layer32": "layer32 heads",
    "bare32": "bare32 heads",
}
_NORMS_PER_LAYER: Final = 2
"""Before attention and before the MLP; where there are more, they are behind both."""


def list_model_flags(
    anatomy: LayerGraph, work: TrainingWorkload, mesh: Mesh, *, parts: int, narrow_base: bool = False
) -> frozenset[Flag]:
    """List what holds of all layers, and of what follows the last; `parts` is into how many tokens are divided.

    Of a `narrow_base`, embedding and norms are in the type that computes and not trained, so that between its layers
    nothing is in fp32, even under autocast: RMS norms return the type that they read.
    """
    style = anatomy.style
    flags: set[Flag] = {style.norm, "fused" if work.flash and not _is_unfused(style, work) else "scores"}
    flags.add("fused loss" if work.fused_loss else "compiled loss" if work.compiled == "all" else "eager loss")
    always = work.profile == "megatron"  # its arguments have dropout, whatever the model's config says
    if work.dropout and (always or style.dropout):
        flags.add("drop")
    if work.dropout and (always or style.attention_dropout):
        flags.add("drop scores")
    cast = runs_under_autocast(work)
    narrow = style.narrow_softmax and not cast
    named: Mapping[Flag, bool] = {
        "eager model": work.compiled == "none",
        "compiled model": work.compiled != "none",
        "shared loss": work.profile in {"fsdp2", "torchtune"} and mesh.degree("tp") > 1,
        "autocast": cast and not (narrow_base and style.norm == "rms"),
        # PEFT keeps adapters in fp32 and casts what each of them reads to that; autocast casts it back.
        "cast adapters": cast and narrow_base and style.norm == "rms",
        "dropped adapters": work.adapter_dropout,
        "copied adapters": not (cast and not (narrow_base and style.norm == "rms")) and (cast or work.adapter_dropout),
        "relu": style.activation == "relu",
        "drop within": work.dropout and style.inner_dropout,
        "kernel": style.activation != "relu",  # whose backward pass needs its result only
        "wide softmax": not narrow,
        "narrow softmax": narrow,
        "fp32 scores": style.fp32_scores,
        "shifted scores": style.shifted_scores,
        "by heads": style.joined_queries,
        "powered norms": style.powered_norms,
    }
    flags.update(flag for flag, holds in named.items() if holds)
    flags.add("uncast" if "autocast" not in flags else "autocast")
    if narrow or "drop scores" not in flags:
        flags.add("kept softmax")
    if style.capped_scores:
        flags.add("cap scores")
    if style.capped_logits:
        flags.add("cap logits")
    if BY_NAME[work.dtype].bits < 8 * _FP32_ELEMENT_BYTES and any(layer.wide for layer in anatomy.layers):
        flags.add("wide")
    if parts > 1:
        flags.add("gathers")
    if mesh.ep > 1:
        flags.add("sent")
    if mesh.degree("cp") > 1 and work.exchanged_heads:
        flags.add("exchanges")
    return frozenset(flags)


def _is_unfused(style: LayerStyle, work: TrainingWorkload) -> bool:
    """Return whether attention holds its scores because the modules that are trained have no other."""
    return style.unfused and work.profile != "megatron"


def list_model_remarks(work: object, anatomy: LayerGraph | None) -> Iterator[str]:
    """Yield what to know of a model in training: attention that is not what was asked for, and what is not counted."""
    if not isinstance(work, TrainingWorkload) or anatomy is None:
        return
    if work.flash and _is_unfused(anatomy.style, work):
        yield "transformers has only eager attention for this model: its scores are kept, whatever --attention says"
    if anatomy.generates and any(layer.streams > 1 for layer in anatomy.layers):
        yield "what is kept where the states of a token become one, behind the last layer, is not counted"


def list_expert_remarks(work: object, inventory: TensorInventory) -> tuple[str, ...]:
    """List what to know of experts that bitsandbytes quantized, in training: what each version of transformers has."""
    coded = any(kind.spec.of_expert and is_module_scale(kind) for kind in inventory.kinds)
    if not isinstance(work, TrainingWorkload) or not coded:
        return ()
    known = "experts are taken as transformers 4 has them, each with modules of its own, which bitsandbytes quantizes"
    return (f"{known}; transformers 5 has one array of all experts, which bitsandbytes leaves as it is",)


def runs_under_autocast(work: TrainingWorkload) -> bool:
    """Return whether fp32 parameters are cast where matrices are multiplied, and norms and softmax compute in fp32."""
    return (
        work.profile in {"hf", "ddp"}
        and work.precision == "mixed"
        and BY_NAME[work.dtype].bits < 8 * _FP32_ELEMENT_BYTES
    )


def list_layer_flags(
    layer: ModelLayer, style: LayerStyle, work: TrainingWorkload, recompute: Recompute
) -> frozenset[Flag]:
    """List what holds of one layer, in a model of a style, of which `recompute` is computed again."""
    flags: set[Flag] = {"gated" if layer.gated else "plain"}
    # A compiler that computes a layer again has as much of it at once as torch has without one.
    compiled = work.compiled != "none" and recompute == "none"
    flags.add("compiled layer" if compiled else "eager layer")
    flags.add("narrow products" if compiled and work.float8 != "none" else "wide products")
    if layer.feeds:
        flags.add("then mlp")
    cross = layer.attention is not None and layer.attention.cross
    if layer.norms - cross > _NORMS_PER_LAYER and style.norm != "layer":
        flags.add("norm behind")
    if layer.attention is not None:
        flags.update(_list_attention_flags(layer, layer.attention, style, work))
    if layer.head_norm is not None:
        flags.add(_HEAD_NORMS[layer.head_norm])
    if layer.state is not None and layer.state.scan is not None:
        flags.add(layer.state.scan.kind)
        if not layer.state.scan.bounded:
            flags.add("copied gate")
    if layer.experts is not None:
        if style.wide_router and not runs_under_autocast(work):  # which casts fp32 copies back
            flags.add("wide router")
        flags.add("wide weights" if layer.experts.wide else "narrow weights")
        if layer.experts.shared_gate:
            flags.add("gated shared")
    return frozenset(flags)


def _list_attention_flags(
    layer: ModelLayer, attention: LayerAttention, style: LayerStyle, work: TrainingWorkload
) -> Iterator[Flag]:
    yield "latent" if attention.kind == "latent" else "full"
    padded = attention.value_dim != attention.head_dim and work.attention == "flash"
    yield "padded values" if padded else "own values"
    # Given a mask, as of a window or an indexer, torch's fused kernel needs keys and values for each query head.
    seen = attention.window is not None and attention.window < work.sequence
    chosen = attention.chosen is not None
    masked = work.attention == "sdpa" and (seen or chosen or style.masked or attention.kind == "cross")
    copied = style.copied_keys or (masked and attention.kv_heads < attention.heads)
    yield "copied keys" if copied else "shared keys"
    if attention.gated:
        yield "gated attention"
    if attention.sinks:
        yield "sinks"
    if style.rotated_product:
        yield "rotated product" if layer.head_norm is None else "normed product"
