"""What each runtime keeps for the backward pass: every tensor with its size, its width and where that was found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.memory.recurrent import (
    MEGATRON,
    MEGATRON_MOMENTS,
    MEGATRON_RECURRENT,
    RECURRENT,
    RECURRENT_MOMENTS,
    TRANSFORMERS,
)
from shardctl.memory.saved import Moment, Runtime, Saved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.memory.workload import Profile

_ATTENTION: Final = (
    Saved("queries", "queries"),
    Saved("keys", "keys", None, ("full", "fused")),
    Saved("values", "values", None, ("full", "fused")),
    Saved("keys", "keys", None, ("latent",)),
    Saved("products of the compressed keys and values", "latent_products", None, ("latent",)),
    Saved("attention's result", "contexts"),
    Saved("logarithms of the scores' sums", "rows", 4, ("fused",), core=True),
)
"""Of any attention: its inputs and its result, which is the input of the projection behind it; what fused kernels keep
besides is one number for each query and head (Dao et al. 2022, sec. 3.1)."""

_HF_NORMS: Final = (
    Saved("fp32 copies of what is normed", "norms", 4, ("rms",)),
    Saved("normed, before the weight", "norms", None, ("rms",)),
    Saved("fp32 copies of what is normed", "norms", 4, ("rms32",)),
    Saved("normed in fp32, before the weight", "norms", 4, ("rms32",)),
    Saved("what is normed", "norms", None, ("layer",)),
    Saved("differences from the mean, twice, and normed before the weight, in fp32", "norms", 12, ("layer32",)),
    Saved("fp32 copies of what is normed", "norms", 4, ("bare32",)),
    Saved("statistics of the norms", "norm_rows", 4),
    Saved("inputs of attention and MLP", "inputs"),
)
_HF_ATTENTION: Final = (
    *_ATTENTION,
    Saved("attention's result, in the order of the projection's input", "contexts", None, ("latent", "fused")),
    Saved("biases of positions", "biases", None, ("fused",)),
    Saved("fp32 copies of queries and keys that are normed", "head_norms", 4, ("rms heads",)),
    Saved("queries and keys normed, before the weight", "head_norms", None, ("rms heads",)),
    Saved("fp32 copies of queries and keys that are normed", "head_norms", 4, ("rms32 heads",)),
    Saved("queries and keys normed in fp32, before the weight", "head_norms", 4, ("rms32 heads",)),
    Saved("queries and keys that are normed", "head_norms", None, ("layer heads",)),
    Saved("the same in fp32 less their mean, twice, and normed", "head_norms", 12, ("layer32 heads",)),
    Saved("fp32 copies of queries and keys that are normed", "head_norms", 4, ("bare32 heads",)),
    Saved("statistics of the norms of queries and keys", "head_norm_rows", 4),
    Saved("attention's result, in the order of its gate", "contexts", None, ("gated attention",)),
    Saved("attention's gate", "contexts", None, ("gated attention",)),
    Saved("attention's result, gated", "contexts", None, ("gated attention",)),
    Saved("fp32 copies of compressed queries and keys", "latent_norms", 4),
    Saved("compressed queries and keys normed, before the weight", "latent_norms"),
    Saved("inputs of the projections from compressed queries and keys", "latent_norms"),
    Saved("keys of each query head", "repeated_keys", None, ("full", "scores")),
    Saved("values of each query head", "repeated_values", None, ("full", "scores")),
    Saved("fp32 softmax", "scores", 4, ("scores",), core=True),
    Saved("softmax in the type that computes", "scores", None, ("scores",), core=True),
    Saved("hyperbolic tangent of the scores", "scores", None, ("scores", "cap scores"), core=True),
    Saved("dropout masks of scores", "scores", 1, ("scores", "drop scores"), core=True),
    Saved("scores after dropout", "scores", None, ("scores", "drop scores"), core=True),
)
_HF_MLP: Final = (
    Saved("gate", "intermediate", None, ("gated",)),
    Saved("up", "intermediate"),
    Saved("activation's result", "intermediate"),
    Saved("results within the activation", "steps"),
    Saved("gated", "intermediate", None, ("gated",)),
)
_HF_EXPERTS: Final = (
    Saved("fp32 probabilities of the router", "router", 4),
    Saved("weights, numbers and order of the experts chosen", "chosen", 48),
    Saved("tokens of the experts", "routed_hidden"),
    Saved("gate and up of the experts", "routed", 4, ("gated",)),
    Saved("up of the experts", "routed", None, ("plain",)),
    Saved("activation's result of the experts", "routed"),
    Saved("gated of the experts", "routed", None, ("gated",)),
    Saved("results of the experts, before their weights", "routed_hidden"),
    Saved("results of the shared experts, before their gate", "hidden", None, ("gated shared",)),
    Saved("gate of the shared experts", "tokens", None, ("gated shared",)),
)
_HF_LAYER: Final = (
    Moment(
        "backward pass of the norm behind an MLP",
        (
            Saved("gradient of the layer's output", "hidden", None, ("norm behind",)),
            Saved("fp32 products, quotient, power and gradients of what is normed", "hidden", 16, ("norm behind",)),
        ),
    ),
    Moment(
        "backward pass of an MLP",
        (
            Saved("gradient of the layer's output", "hidden"),
            Saved("gradients of gate, up and their product, less the product", "intermediate", 4, ("gated",)),
            Saved("gradient of the activation's result", "intermediate", None, ("plain",)),
            Saved("gradients of results within the activation", "steps", 2 / 3),
            Saved("gradient of the norm's output", "hidden", None, ("plain",)),
        ),
    ),
    Moment(
        "backward pass of experts, their MLPs",
        (
            Saved("gradient of the layer's output", "hidden"),
            Saved("gradients of gate, up and their product, less the product", "routed", 4, ("gated",)),
            Saved("gradient of the activation's result", "routed", None, ("plain",)),
            Saved("results of the experts, gone by then", "routed_hidden", -2),
        ),
    ),
    Moment(
        "backward pass of experts, their weights",
        (
            Saved("gradient of the layer's output", "hidden"),
            Saved("fp32 gradients of results, weighted ones and products", "routed_hidden", 12, ("wide weights",)),
            Saved("gradients of the experts' results", "routed_hidden", None, ("wide weights",)),
            Saved("gradients of results, weighted ones and products", "routed_hidden", 6, ("narrow weights",)),
        ),
    ),
    Moment(
        "backward pass of attention's scores",
        (
            Saved("gradients of the layer's output and of attention's result", "hidden", 4, ("scores",)),
            Saved("fp32 gradients of softmax and scores", "scores", 8, ("scores",)),
            Saved("softmax in the type that computes, gone by then", "scores", -2, ("scores",)),
            Saved("the MLP, gone by then", "intermediate", -8, ("scores", "gated")),
            Saved("the MLP, gone by then", "intermediate", -4, ("scores", "plain")),
            Saved("experts, gone by then", "routed", -8, ("scores", "gated")),
            Saved("experts, gone by then", "routed", -4, ("scores", "plain")),
            Saved("tokens and results of the experts, gone by then", "routed_hidden", -4, ("scores",)),
            Saved("the norm before the MLP, gone by then", "hidden", -8, ("scores", "rms")),
            Saved("the norm before the MLP, gone by then", "hidden", -10, ("scores", "rms32")),
            Saved("the norm before the MLP, gone by then", "hidden", -4, ("scores", "layer")),
            Saved("values and attention's result, gone by then", "contexts", -4, ("scores",)),
            Saved("gradient of values", "contexts", None, ("scores",)),
        ),
    ),
)
_HF_LOSS: Final = (
    Saved("fp32 logarithms of probabilities", "gathered_logits", 4),
    Saved("hyperbolic tangent of the logits", "gathered_logits", None, ("cap logits",)),
    Saved("labels", "tokens", 16),
    Saved("what the last norm keeps in fp32", "hidden", 2, ("wide",)),
)
_HF_LOSS_MOMENT: Final = Moment(
    "backward pass of the loss",
    (
        Saved("fp32 gradient of the logarithms of probabilities", "gathered_logits", 4),
        Saved("fp32 gradient of the logits", "gathered_logits", 4),
    ),
)
_HF_NORM_MOMENT: Final = Moment(
    "backward pass of the last norm",
    (
        Saved("fp32 copy, products, quotient, power and gradients of what is normed", "hidden", 24, ("rms",)),
        Saved("fp32 copy, products, quotient, power and gradients of what is normed", "hidden", 24, ("rms32",)),
        Saved("what is normed and gradients", "hidden", 6, ("layer",)),
        Saved("fp32 copy, products, quotient, power and gradients of what is normed", "hidden", 24, ("layer32",)),
        Saved("fp32 copy and gradients of what is normed", "hidden", 12, ("bare32",)),
    ),
)
_HF: Final = Runtime(
    kept={
        "norms": _HF_NORMS,
        "attention": _HF_ATTENTION,
        "recurrent": RECURRENT,
        "mlp": _HF_MLP,
        "experts": _HF_EXPERTS,
        "dropout": (Saved("dropout masks", "drops", 1, ("drop",)),),
    },
    checkpoint=(Saved("the layer's input", "hidden"), Saved("what is wider of it", "hidden", 2, ("wide",))),
    shared=(Saved("the layer's input", "hidden", None, ("layer",)),),
    layer=(*_HF_LAYER, *RECURRENT_MOMENTS),
    head=_HF_LOSS,
    loss=_HF_LOSS_MOMENT,
    norm=_HF_NORM_MOMENT,
    embedding=(Saved("dropout mask of the embedding", "hidden", 1, ("drop",)),),
    sequence_parallel=False,
    # More, because padded batches repeat keys and values for each query head and copy attention's result: 54 sbh
    # were measured of a Llama-3-8B layer, 49 are kept without padding.
    spread=(0.95, 1.12),
    source="tensors that torch 2.13 keeps of transformers 5.23's modules, counted under FakeTensorMode",
    recurrence=TRANSFORMERS,
)

_MEGATRON: Final = Runtime(
    kept={
        "norms": (
            Saved("inputs of the norms", "norms", sequence=True),
            Saved("statistics of the norms", "norm_rows", 4, ("rms",), sequence=True),
            Saved("statistics of the norms", "norm_rows", 4, ("rms32",), sequence=True),
            Saved("inputs of attention and MLP", "inputs", sequence=True),
        ),
        "recurrent": MEGATRON_RECURRENT,
        "attention": (
            *_ATTENTION,
            Saved("keys", "keys", None, ("full", "scores")),
            Saved("values", "values", None, ("full", "scores")),
            Saved("queries and keys that are normed", "head_norms"),
            Saved("compressed queries and keys", "latent_norms", 4, sequence=True),
            Saved("softmax", "scores", None, ("scores",), core=True),
            Saved("dropout masks of scores", "scores", 1, ("scores", "drop scores"), core=True),
            Saved("scores after dropout", "scores", None, ("scores", "drop scores"), core=True),
        ),
        "mlp": (
            Saved("gate", "intermediate", None, ("gated",)),
            Saved("up", "intermediate"),
            Saved("input of the projection down", "intermediate"),
        ),
        "experts": (
            Saved("fp32 logits and probabilities of the router", "router", 8, sequence=True),
            Saved("order of the tokens of the experts", "chosen", 16, sequence=True),
            Saved("tokens of the experts", "routed_hidden"),
            Saved("gate of the experts", "routed", None, ("gated",)),
            Saved("up of the experts", "routed"),
            Saved("input of the experts' projection down", "routed"),
            Saved("results of the experts, before their weights", "routed_hidden"),
        ),
        "dropout": (Saved("dropout masks", "drops", 1, ("drop",), sequence=True),),
    },
    checkpoint=(Saved("the layer's input", "hidden", sequence=True),),
    shared=(Saved("the layer's input", "hidden", sequence=True),),
    layer=(
        Moment(
            "backward pass of an MLP",
            (
                Saved("gradient of the layer's output", "hidden", sequence=True),
                Saved("gathered input of the projection up", "hidden"),
                Saved("gradients of gate and up", "intermediate", None, ("gated",)),
                Saved("gradient of up and of the activation's result, less the latter", "intermediate"),
            ),
        ),
        Moment(
            "backward pass of experts",
            (
                Saved("gradient of the layer's output", "hidden", sequence=True),
                Saved("gradients of the experts' results", "routed_hidden"),
                Saved("gradients of gate and up of the experts", "routed", None, ("gated",)),
                Saved("gradient of up and of the activation's result, less the latter", "routed"),
            ),
        ),
        Moment("backward pass of attention's scores", (Saved("gradients of scores", "scores", 4, ("scores",)),)),
        *MEGATRON_MOMENTS,
    ),
    head=(Saved("fp32 softmax of the logits", "logits", 4),),
    loss=Moment("backward pass of the loss", (Saved("gradient of the logits", "logits"),)),
    norm=Moment("backward pass of the last norm", (Saved("what is normed and gradients", "hidden", 6, sequence=True),)),
    embedding=(Saved("dropout mask of the embedding", "hidden", 1, ("drop",), sequence=True),),
    sequence_parallel=True,
    spread=(0.9, 1.15),
    source="Korthikanti et al. 2022, sec. 4, re-summed for gates, shared key heads and experts",
    recurrence=MEGATRON,
)

_FSDP2: Final = Runtime(
    kept={
        "norms": (
            Saved("inputs of the norms", "norms", sequence=True),
            Saved("statistics of the norms", "norm_rows", 4, sequence=True),
            Saved("inputs of attention and MLP", "inputs"),
        ),
        "attention": (
            *_ATTENTION,
            Saved("queries and keys that are normed", "head_norms"),
            Saved("compressed queries and keys", "latent_norms", 4, sequence=True),
            *(saved for saved in _HF_ATTENTION if "scores" in saved.when),
        ),
        "mlp": tuple(saved for saved in _HF_MLP if saved.size != "steps"),
        "experts": _HF_EXPERTS,
        "dropout": (Saved("dropout masks", "drops", 1, ("drop",), sequence=True),),
    },
    checkpoint=(Saved("the layer's input", "hidden", sequence=True),),
    shared=(Saved("the layer's input", "hidden", sequence=True),),
    layer=_HF_LAYER,
    head=(Saved("fp32 logarithms of probabilities", "logits", 4), Saved("labels", "tokens", 16)),
    loss=Moment(
        "backward pass of the loss",
        (
            Saved("fp32 gradient of the logarithms of probabilities", "logits", 4),
            Saved("fp32 gradient of the logits", "logits", 4),
        ),
    ),
    norm=Moment("backward pass of the last norm", (Saved("what is normed and gradients", "hidden", 6),)),
    embedding=(Saved("dropout mask of the embedding", "hidden", 1, ("drop",), sequence=True),),
    sequence_parallel=True,
    spread=(0.85, 1.15),
    source="tensors that torch 2.13 keeps of modules with torch.nn.RMSNorm, as torchtitan's are, uncompiled",
    recurrence=TRANSFORMERS,
)

_MODULES: Final = "transformers' modules"
RUNTIMES: Final[Mapping[Profile, Runtime]] = {
    "megatron": _MEGATRON,
    "hf": _HF,
    "fsdp2": _FSDP2,
    "deepspeed": replace(
        _HF, spread=(0.85, 1.15), source=f"{_MODULES}, which DeepSpeed trains as they are: as profile hf"
    ),
}
"""By profile."""
_KERNELS: Final = (
    "with the kernels of mamba-ssm 2.3, causal-conv1d 1.7 and flash-linear-attention 0.6 installed, "
    "without which several times as much is kept"
)
_RECURRENT: Final[Mapping[Profile, Runtime]] = {
    "megatron": replace(_MEGATRON, source=f"tensors of megatron-core 0.15's MambaMixer, {_KERNELS}"),
    "hf": replace(_HF, source=f"{_HF.source}, {_KERNELS}"),
    "fsdp2": replace(_HF, spread=(0.85, 1.15), source=f"{_MODULES}, sharded as they are, {_KERNELS}: as profile hf"),
    "deepspeed": replace(_HF, spread=(0.85, 1.15), source=f"{_MODULES}, {_KERNELS}: as profile hf"),
}
"""The same for models with recurrent layers, whose modules are transformers' whatever shards them, or Megatron-LM's."""


def runtime(profile: Profile, *, recurrent: bool) -> Runtime:
    """What the runtime of a profile keeps of a model, which may have recurrent layers."""
    return (_RECURRENT if recurrent else RUNTIMES)[profile]
