"""Lists what each runtime keeps for the backward pass: every tensor with its size, width and source."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.estimate.training.recurrent import (
    MEGATRON,
    MEGATRON_MOMENTS,
    MEGATRON_RECURRENT,
    RECURRENT,
    RECURRENT_MOMENTS,
    TRANSFORMERS,
)
from shardctl.estimate.training.saved_activations import PeakEvent, RuntimeProfile, SavedActivation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.estimate.workload import Profile, TrainingWorkload

_ATTENTION_ACTIVATIONS: Final = (
    SavedActivation("queries", "queries"),
    SavedActivation("keys", "keys", None, ("full", "fused")),
    SavedActivation("values", "values", None, ("full", "fused")),
    SavedActivation("keys", "keys", None, ("latent",)),
    SavedActivation("products of the compressed keys and values", "latent_products", None, ("latent",)),
    SavedActivation("attention's result", "contexts"),
    SavedActivation("logarithms of the scores' sums", "rows", 4, ("fused",), core=True),
)
"""Of any attention: its inputs and its result, which is the input of the projection behind it; what fused kernels keep
besides is one number for each query and head (Dao et al. 2022, sec. 3.1)."""

_HF_NORMS: Final = (
    SavedActivation("fp32 copies of what is normed", "norms", 4, ("rms",)),
    SavedActivation("normed, before the weight", "norms", None, ("rms", "norms trained")),
    SavedActivation("what is normed", "norms", None, ("rms16",)),
    SavedActivation("fp32 copies of what is normed", "norms", 4, ("rms16",)),
    SavedActivation("normed, before the weight", "norms", None, ("rms16", "norms trained")),
    SavedActivation("fp32 copies of what is normed", "norms", 4, ("rms32",)),
    SavedActivation("normed in fp32, before the weight", "norms", 4, ("rms32", "norms trained")),
    SavedActivation("what is wider of it", "norms", 2, ("rms", "autocast", "norms trained")),
    SavedActivation("what is wider of what is normed", "normed", 2, ("layer", "autocast")),
    SavedActivation("statistics of the norms, in fp32", "norm_rows", 4, ("layer", "autocast")),
    SavedActivation("casts of the same inputs for other matrices", "readings", None, ("autocast",)),
    SavedActivation("casts of the same inputs for other adapters", "readings", None, ("copied adapters",)),
    SavedActivation("what is normed", "normed", None, ("layer",)),
    SavedActivation("differences from the mean, twice, in fp32", "norms", 8, ("layer32",)),
    SavedActivation("normed in fp32, before the weight", "norms", 4, ("layer32", "norms trained")),
    SavedActivation("fp32 copies of what is normed", "norms", 4, ("bare32",)),
    SavedActivation("statistics of the norms", "norm_rows", 4),
    SavedActivation("more of them", "norm_rows", 4, ("bare32",)),
    SavedActivation("mean squares, of which a power is taken", "norm_rows", 4, ("powered norms",)),
    SavedActivation("inputs of attention and MLP", "inputs"),
)
_HF_ATTENTION: Final = (
    SavedActivation("queries", "queries"),
    SavedActivation("keys", "keys", None, ("full", "fused", "shared keys")),
    SavedActivation(
        "keys of each query head, as kernels with masks need", "repeated_keys", None, ("fused", "copied keys")
    ),
    SavedActivation("values", "values", None, ("full", "fused", "own values", "shared keys")),
    SavedActivation("values of each query head, for the same", "repeated_values", None, ("fused", "copied keys")),
    SavedActivation("values, padded to the width of keys", "keys", None, ("full", "padded values")),
    SavedActivation(
        "queries before rotation, in one product with values", "queries", None, ("rotated product", "fused")
    ),
    SavedActivation("keys before rotation, in the same", "keys", None, ("rotated product", "fused")),
    SavedActivation("keys", "keys", None, ("latent",)),
    SavedActivation(
        "products of the compressed keys and values", "latent_products", None, ("latent", "own values", "fused")
    ),
    SavedActivation("values of each head", "repeated_values", None, ("latent", "scores")),
    SavedActivation("values, padded to the width of keys", "repeated_keys", None, ("latent", "padded values")),
    SavedActivation("attention's result", "contexts", None, ("own values", "result needed")),
    SavedActivation("attention's result, as wide as keys", "repeated_keys", None, ("padded values",)),
    SavedActivation("the same without the padding", "contexts", None, ("padded values", "output trained")),
    SavedActivation("cast of attention's result for an adapter", "contexts", None, ("fused", "copied result")),
    SavedActivation(
        "attention's result, in the order of the projection's input",
        "contexts",
        None,
        ("by heads", "fused", "shared keys", "own values", "result read"),
    ),
    SavedActivation("logarithms of the scores' sums", "rows", 4, ("fused",), core=True),
    SavedActivation("biases of positions", "biases", None, ("fused",)),
    SavedActivation("fp32 copies of queries and keys that are normed", "head_norms", 4, ("rms heads",)),
    SavedActivation(
        "queries and keys normed, before the weight", "head_norms", None, ("rms heads", "head norms trained")
    ),
    SavedActivation("fp32 copies of queries and keys that are normed", "head_norms", 4, ("rms32 heads",)),
    SavedActivation(
        "queries and keys normed in fp32, before the weight", "head_norms", 4, ("rms32 heads", "head norms trained")
    ),
    SavedActivation("queries and keys that are normed", "head_norms", None, ("layer heads",)),
    SavedActivation("the same in fp32 less their mean, twice", "head_norms", 8, ("layer32 heads",)),
    SavedActivation(
        "the same normed in fp32, before the weight", "head_norms", 4, ("layer32 heads", "head norms trained")
    ),
    SavedActivation("fp32 copies of queries and keys that are normed", "head_norms", 4, ("bare32 heads",)),
    SavedActivation("statistics of the norms of queries and keys", "head_norm_rows", 4),
    SavedActivation("mean squares of the same", "head_norm_rows", 4, ("powered norms",)),
    SavedActivation("attention's gate", "contexts", None, ("gated attention",)),
    SavedActivation("attention's result, gated", "contexts", None, ("gated attention", "output trained")),
    SavedActivation("fp32 copies of compressed queries and keys", "latent_norms", 4),
    SavedActivation("statistics of their norms", "latent_norm_rows", 4),
    SavedActivation(
        "compressed queries and keys normed, before the weight", "latent_norms", None, ("head norms trained",)
    ),
    SavedActivation(
        "inputs of the projections from compressed queries and keys", "latent_norms", None, ("latents trained",)
    ),
    SavedActivation("keys of each query head", "repeated_keys", None, ("full", "scores")),
    SavedActivation("values of each query head", "repeated_values", None, ("full", "scores")),
    SavedActivation("what fp32 copies of queries and keys have more", "queries", 2, ("scores", "fp32 scores")),
    SavedActivation("the same of keys", "repeated_keys", 2, ("scores", "fp32 scores")),
    SavedActivation("values in one product with normed queries", "values", None, ("scores", "normed product")),
    SavedActivation("indices of the largest scores", "rows", 8, ("scores", "shifted scores"), core=True),
    SavedActivation("scores of sinks", "rows", None, ("scores", "sinks"), core=True),
    SavedActivation("fp32 softmax", "scores", 4, ("scores", "wide softmax"), core=True),
    SavedActivation("softmax in the type that computes", "scores", None, ("scores", "kept softmax"), core=True),
    SavedActivation("hyperbolic tangent of the scores", "scores", None, ("scores", "cap scores"), core=True),
    SavedActivation("dropout masks of scores", "scores", 1, ("scores", "drop scores"), core=True),
    SavedActivation("scores after dropout", "scores", None, ("scores", "drop scores"), core=True),
)
_HF_MLP: Final = (
    SavedActivation("gate", "intermediate", None, ("gated",)),
    SavedActivation("up", "intermediate", None, ("gated",)),
    SavedActivation("input of the activation", "intermediate", None, ("plain", "kernel")),
    SavedActivation("activation's result", "intermediate", None, ("eager layer", "activation needed")),
    # bitsandbytes, nn/modules.py, `Linear4bit.forward`: the result has the type of the input, which norms made fp32.
    SavedActivation(
        "what is wider of gate, up and the activation's result", "intermediate", 6, ("gated", "fp32 products")
    ),
    SavedActivation("what is wider of the activation's input", "intermediate", 2, ("plain", "fp32 products")),
    SavedActivation("dropout masks of the activation's result", "intermediate", 1, ("drop within",)),
    SavedActivation(
        "activation's result after dropout", "intermediate", None, ("plain", "drop within", "down trained")
    ),
    SavedActivation("results within the activation", "steps"),
    SavedActivation("gated", "intermediate", None, ("gated", "wide products", "down trained")),
)
_HF_EXPERTS: Final = (
    SavedActivation("fp32 probabilities of the router", "router", 4),
    SavedActivation("weights, numbers and order of the experts chosen", "chosen", 48),
    SavedActivation("fp32 copies of the router's input", "hidden", 4, ("wide router", "router trained")),
    SavedActivation("tokens of the experts", "routed_hidden", None, ("experts trained",)),
    SavedActivation("sums of the experts' narrow results", "narrowed"),
    SavedActivation("gate and up of the experts", "routed", 4, ("gated",)),
    SavedActivation("up of the experts", "routed", None, ("plain",)),
    SavedActivation("activation's result of the experts", "routed", None, ("activation needed",)),
    SavedActivation("results within the activation of the experts", "routed_steps"),
    SavedActivation("gated of the experts", "routed", None, ("gated", "experts down trained")),
    SavedActivation("results of the experts, before their weights", "routed_hidden"),
    # `index_add_` keeps what it adds.
    SavedActivation("results of the experts, weighted", "routed_hidden", None, ("looped experts",)),
    SavedActivation("what is wider of these", "routed_hidden", 2, ("looped experts", "wide experts")),
    # torch has no autocast for grouped products (`aten/src/ATen/autocast_mode.h`): they compute in their weights' type.
    SavedActivation("what is wider of the experts' tokens", "routed_hidden", 2, ("wide experts", "experts trained")),
    SavedActivation("what is wider of gate and up of the experts", "routed", 4, ("wide experts", "gated")),
    SavedActivation("what is wider of up of the experts", "routed", 2, ("wide experts", "plain")),
    SavedActivation("what is wider of the activation's result", "routed", 2, ("wide experts", "activation needed")),
    SavedActivation("what is wider within the activation of the experts", "routed_steps", 2, ("wide experts",)),
    SavedActivation("what is wider of what is gated", "routed", 2, ("wide experts", "gated", "experts down trained")),
    SavedActivation("what is wider of the experts' results", "routed_hidden", 2, ("wide experts",)),
    SavedActivation("results of the shared experts, before their gate", "hidden", None, ("gated shared",)),
    SavedActivation("gate of the shared experts", "tokens", None, ("gated shared",)),
)
_ADAPTER_ACTIVATIONS: Final = (
    SavedActivation("products between the matrices of adapters", "narrow_products"),
    SavedActivation("masks of what adapters read", "adapter_inputs", 1, ("dropped adapters",)),
)
_HF_LAYER: Final = (
    PeakEvent(
        "backward pass of the norm behind an MLP",
        (
            SavedActivation("gradient of the layer's output", "hidden", None, ("norm behind",)),
            SavedActivation(
                "fp32 products, quotient, power and gradients of what is normed", "hidden", 16, ("norm behind",)
            ),
        ),
    ),
    PeakEvent(
        "backward pass of an MLP",
        (
            SavedActivation("gradient of the layer's output", "hidden"),
            SavedActivation("the same of further states of a token", "streamed"),
            SavedActivation("gradients of gate, up and their product", "intermediate", 6, ("gated", "eager layer")),
            SavedActivation("the product, freed by then", "intermediate", -2, ("gated", "eager layer", "down trained")),
            SavedActivation("what is wider of these gradients", "intermediate", 6, ("gated", "fp32 products")),
            SavedActivation("what is wider of that gradient", "intermediate", 2, ("plain", "fp32 products")),
            SavedActivation(
                "gradients of gate and up, less the product", "intermediate", None, ("gated", "compiled layer")
            ),
            SavedActivation("gradient of the activation's result", "intermediate", None, ("plain",)),
            SavedActivation("gradients of results within the activation", "steps", 2 / 3),
            SavedActivation("gradient of the norm's output", "hidden", None, ("plain",)),
        ),
    ),
    PeakEvent(
        "backward pass of experts, their MLPs",
        (
            SavedActivation("gradient of the layer's output", "hidden"),
            SavedActivation("the same of further states of a token", "streamed"),
            SavedActivation("gradients of gate, up and their product", "routed", 6, ("gated",)),
            SavedActivation("the product, freed by then", "routed", -2, ("gated", "experts down trained")),
            SavedActivation("gradient of the activation's result", "routed", None, ("plain",)),
            SavedActivation("results of the experts, freed by then", "routed_hidden", -2),
            SavedActivation("what is wider of these gradients", "routed", 6, ("wide experts", "gated")),
            SavedActivation("the same, freed by then", "routed", -2, ("wide experts", "gated", "experts down trained")),
            SavedActivation("what is wider of that gradient", "routed", 2, ("wide experts", "plain")),
            SavedActivation("what is wider of the results, freed by then", "routed_hidden", -2, ("wide experts",)),
        ),
        when=("joined experts",),
    ),
    PeakEvent(
        "backward pass of experts, their weights",
        (
            SavedActivation("gradient of the layer's output", "hidden"),
            SavedActivation("the same of further states of a token", "streamed"),
            SavedActivation(
                "fp32 gradients of results, weighted ones and products", "routed_hidden", 12, ("wide weights",)
            ),
            SavedActivation("gradients of the experts' results", "routed_hidden", None, ("wide weights",)),
            SavedActivation(
                "gradients of results, weighted ones and products", "routed_hidden", 6, ("narrow weights",)
            ),
            SavedActivation("what is wider of these", "routed_hidden", 6, ("narrow weights", "wide experts")),
        ),
        when=("joined experts",),
    ),
    # transformers 4.48, models/mixtral/modeling_mixtral.py, `MixtralSparseMoeBlock.forward`: one expert after another.
    PeakEvent(
        "forward pass of the last expert",
        (
            SavedActivation("gradient of the layer's output, and sum of the experts' results", "hidden", 4),
            SavedActivation("the same of further states of a token", "streamed"),
            SavedActivation("what is wider of these", "hidden", 4, ("wide experts",)),
            SavedActivation("what is gated, in the type that computes", "expert_routed", None, ("gated",)),
            SavedActivation("the same before its cast", "expert_routed", 4, ("gated", "wide experts")),
            SavedActivation("tokens of the expert, less its two results, which come later", "expert_hidden", -2),
            SavedActivation("what is wider of these", "expert_hidden", -2, ("wide experts",)),
            SavedActivation("matrix that bitsandbytes dequantized", "expert_matrix"),
        ),
        when=("looped experts",),
    ),
    PeakEvent(
        "backward pass of the last expert",
        (
            SavedActivation("gradient of the layer's output", "hidden"),
            SavedActivation("the same of further states of a token", "streamed"),
            SavedActivation("what is wider of it", "hidden", 2, ("wide experts",)),
            SavedActivation("gradients of gate, up and their product", "expert_routed", 6, ("gated",)),
            SavedActivation("gradient of the activation's result", "expert_routed", None, ("plain",)),
            SavedActivation("what is wider of these gradients", "expert_routed", 6, ("gated", "wide experts")),
            SavedActivation("what is wider of that gradient", "expert_routed", 2, ("plain", "wide experts")),
            SavedActivation("results of the expert, freed by then", "expert_hidden", -4),
            SavedActivation("what is wider of these results, freed by then", "expert_hidden", -4, ("wide experts",)),
        ),
        when=("looped experts",),
    ),
    PeakEvent(
        "backward pass of the last experts, their tokens",
        (
            SavedActivation("gradients of the layer's output, and of tokens of one expert and of another", "hidden", 6),
            SavedActivation("the same of further states of a token", "streamed"),
            SavedActivation("what is wider of these gradients", "hidden", 6, ("wide experts",)),
            SavedActivation("gate and up of both, freed by then", "expert_routed", -12, ("gated",)),
            SavedActivation("up of both, freed by then", "expert_routed", -8, ("plain",)),
            SavedActivation(
                "what is wider of gate and up, freed by then", "expert_routed", -12, ("gated", "wide experts")
            ),
            SavedActivation("what is wider of up, freed by then", "expert_routed", -8, ("plain", "wide experts")),
            SavedActivation("results of both, freed by then", "expert_hidden", -8),
            SavedActivation("what is wider of these results, freed by then", "expert_hidden", -8, ("wide experts",)),
        ),
        when=("looped experts",),
    ),
    PeakEvent(
        "backward pass of attention's scores",
        (
            SavedActivation("gradients of the layer's output and of attention's result", "hidden", 4, ("scores",)),
            SavedActivation("fp32 gradients of softmax and scores", "scores", 8, ("scores", "wide softmax")),
            SavedActivation("gradients of softmax and scores", "scores", 4, ("scores", "narrow softmax")),
            SavedActivation(
                "softmax in the type that computes, freed by then",
                "scores",
                -2,
                ("scores", "wide softmax", "kept softmax"),
            ),
            SavedActivation("the MLP, freed by then", "intermediate", -6, ("scores", "gated")),
            SavedActivation("its product, freed by then", "intermediate", -2, ("scores", "gated", "down trained")),
            SavedActivation("the MLP, freed by then", "intermediate", -2, ("scores", "plain")),
            SavedActivation("its result, freed by then", "intermediate", -2, ("scores", "plain", "down trained")),
            SavedActivation("experts, freed by then", "routed", -6, ("scores", "gated")),
            SavedActivation("their product, freed by then", "routed", -2, ("scores", "gated", "experts down trained")),
            SavedActivation("experts, freed by then", "routed", -2, ("scores", "plain")),
            SavedActivation("their result, freed by then", "routed", -2, ("scores", "plain", "experts down trained")),
            SavedActivation("results of the experts, freed by then", "routed_hidden", -2, ("scores",)),
            SavedActivation("tokens of the experts, freed by then", "routed_hidden", -2, ("scores", "experts trained")),
            SavedActivation(
                "what is wider of experts, freed by then", "routed", -6, ("scores", "gated", "wide experts")
            ),
            SavedActivation(
                "what is wider of their product, freed by then",
                "routed",
                -2,
                ("scores", "gated", "experts down trained", "wide experts"),
            ),
            SavedActivation(
                "what is wider of experts, freed by then", "routed", -2, ("scores", "plain", "wide experts")
            ),
            SavedActivation(
                "what is wider of their result, freed by then",
                "routed",
                -2,
                ("scores", "plain", "experts down trained", "wide experts"),
            ),
            SavedActivation("what is wider of results, freed by then", "routed_hidden", -2, ("scores", "wide experts")),
            SavedActivation(
                "what is wider of their tokens, freed by then",
                "routed_hidden",
                -2,
                ("scores", "experts trained", "wide experts"),
            ),
            SavedActivation("the norm before the MLP, freed by then", "hidden", -4, ("scores", "rms")),
            SavedActivation("the same, normed, freed by then", "hidden", -2, ("scores", "rms", "norms trained")),
            SavedActivation("the norm before the MLP, freed by then", "hidden", -4, ("scores", "rms32")),
            SavedActivation("the same, normed, freed by then", "hidden", -4, ("scores", "rms32", "norms trained")),
            SavedActivation("the norm before the MLP, freed by then", "hidden", -2, ("scores", "layer")),
            SavedActivation("the MLP's input, freed by then", "hidden", -2, ("scores", "rms", "mlp trained")),
            SavedActivation("the MLP's input, freed by then", "hidden", -2, ("scores", "rms32", "mlp trained")),
            SavedActivation("the MLP's input, freed by then", "hidden", -2, ("scores", "layer", "mlp trained")),
            SavedActivation("values, freed by then", "contexts", -2, ("scores",)),
            SavedActivation("attention's result, freed by then", "contexts", -2, ("scores", "output trained")),
            SavedActivation("gradient of values", "contexts", None, ("scores",)),
        ),
    ),
)
_HF_LOSS: Final = (
    SavedActivation("fp32 logarithms of probabilities", "gathered_logits", 4),
    SavedActivation("hyperbolic tangent of the logits", "gathered_logits", None, ("cap logits",)),
    SavedActivation("labels", "tokens", 16),
    SavedActivation("what the last norm keeps in fp32", "hidden", 2, ("wide",)),
)
_HF_LOSS_MOMENT: Final = PeakEvent(
    "backward pass of the loss",
    (
        SavedActivation("fp32 gradient of the logarithms of probabilities", "gathered_logits", 4),
        SavedActivation("fp32 gradient of the logits", "gathered_logits", 4),
    ),
)
_HF_NORM_MOMENT: Final = PeakEvent(
    "backward pass of the last norm",
    (
        SavedActivation("fp32 copy, products, quotient, power and gradients of what is normed", "hidden", 24, ("rms",)),
        SavedActivation(
            "fp32 copy, products, quotient, power and gradients of what is normed", "hidden", 24, ("rms32",)
        ),
        SavedActivation("what is normed and gradients", "hidden", 6, ("layer",)),
        SavedActivation(
            "fp32 copy, products, quotient, power and gradients of what is normed", "hidden", 24, ("layer32",)
        ),
        SavedActivation("fp32 copy and gradients of what is normed", "hidden", 12, ("bare32",)),
    ),
)
_HF_PROFILE: Final = RuntimeProfile(
    kept={
        "norms": _HF_NORMS,
        "attention": _HF_ATTENTION,
        "recurrent": RECURRENT,
        "mlp": _HF_MLP,
        "experts": _HF_EXPERTS,
        "further": _ADAPTER_ACTIVATIONS,
        "dropout": (SavedActivation("dropout masks", "drops", 1, ("drop",)),),
    },
    checkpoint=(
        SavedActivation("the layer's input", "hidden"),
        SavedActivation("the same of further states of a token", "streamed"),
        SavedActivation("what is wider of it", "hidden", 2, ("wide",)),
        SavedActivation("what is wider of it", "hidden", 2, ("autocast",)),
    ),
    shared=(SavedActivation("the layer's input", "hidden", None, ("layer",)),),
    selected=(),
    selected_shared=(),
    layer=(*_HF_LAYER, *RECURRENT_MOMENTS),
    head=_HF_LOSS,
    loss=_HF_LOSS_MOMENT,
    forward_end=PeakEvent(
        "end of the forward pass",
        (
            SavedActivation("logits", "gathered_logits"),
            SavedActivation("fp32 copies of the logits", "gathered_logits", 4),
            SavedActivation("result of the last norm", "hidden", 4, ("autocast",)),
            SavedActivation("result of the last norm", "hidden", None, ("frozen head", "cast adapters")),
        ),
    ),
    norm=_HF_NORM_MOMENT,
    embedding=(SavedActivation("dropout mask of the embedding", "hidden", 1, ("drop",)),),
    sequence_parallel=False,
    # More, because padded batches repeat keys and values for each query head and copy attention's result: 54 sbh
    # were measured of a Llama-3-8B layer in 16 bits, 49 are kept without padding.
    spread=(0.95, 1.3),
    source="tensors that torch 2.13 keeps of transformers 5.23's modules, counted under FakeTensorMode",
    recurrence=TRANSFORMERS,
)

_MEGATRON_PROFILE: Final = RuntimeProfile(
    kept={
        "norms": (
            SavedActivation("inputs of the norms", "norms", sequence=True),
            SavedActivation("statistics of the norms", "norm_rows", 4, ("rms",), sequence=True),
            SavedActivation("statistics of the norms", "norm_rows", 4, ("rms32",), sequence=True),
            SavedActivation("inputs of attention and MLP", "inputs", sequence=True),
        ),
        "recurrent": MEGATRON_RECURRENT,
        "attention": (
            *(kept for kept in _ATTENTION_ACTIVATIONS if kept.size not in {"latent_products", "values"}),
            # Of the products of compressed keys and values, keys with their rotary part and values are copied.
            SavedActivation("values", "values", None, ("fused",)),
            SavedActivation("keys", "keys", None, ("full", "scores")),
            SavedActivation("values", "values", None, ("scores",)),
            SavedActivation(
                "attention's result, before its heads are exchanged", "contexts", None, ("fused", "exchanges")
            ),
            SavedActivation("queries and keys that are normed", "head_norms"),
            SavedActivation("compressed queries and keys", "latent_norms", 4, sequence=True),
            SavedActivation("softmax", "scores", None, ("scores",), core=True),
            SavedActivation("dropout masks of scores", "scores", 1, ("scores", "drop scores"), core=True),
            SavedActivation("scores after dropout", "scores", None, ("scores", "drop scores"), core=True),
        ),
        "mlp": (
            SavedActivation("gate", "intermediate", None, ("gated",)),
            SavedActivation("up", "intermediate"),
            SavedActivation("input of the projection down", "intermediate", None, ("down trained",)),
        ),
        "experts": (
            SavedActivation("fp32 logits and probabilities of the router", "router", 8, sequence=True),
            SavedActivation("order of the tokens of the experts", "chosen", 16, sequence=True),
            SavedActivation("tokens of the experts", "routed_hidden", None, ("experts trained",)),
            SavedActivation("gate of the experts", "routed", None, ("gated",)),
            SavedActivation("up of the experts", "routed"),
            SavedActivation("input of the experts' projection down", "routed", None, ("experts down trained",)),
        ),
        "further": _ADAPTER_ACTIVATIONS,
        "dropout": (SavedActivation("dropout masks", "drops", 1, ("drop",), sequence=True),),
    },
    checkpoint=(SavedActivation("the layer's input", "hidden", sequence=True),),
    shared=(SavedActivation("the layer's input", "hidden", sequence=True),),
    selected=(),
    selected_shared=(),
    layer=(
        PeakEvent(
            "backward pass of an MLP",
            (
                SavedActivation("gradient of the layer's output", "hidden", sequence=True),
                SavedActivation("gathered input of the projection up", "hidden"),
                SavedActivation("gradients of gate and up", "intermediate", None, ("gated",)),
                SavedActivation("gradient of up and of the activation's result, less the latter", "intermediate"),
            ),
        ),
        PeakEvent(
            "backward pass of experts",
            (
                SavedActivation("gradient of the layer's output", "hidden", sequence=True),
                SavedActivation("gradients of the experts' results", "routed_hidden"),
                SavedActivation("gradients of gate and up of the experts", "routed", None, ("gated",)),
                SavedActivation("gradient of up and of the activation's result, less the latter", "routed"),
            ),
        ),
        PeakEvent(
            # Variables of `MoELayer.forward` and `experts_compute` (megatron-core 0.14) refer to all of these.
            "forward pass of experts",
            (
                SavedActivation("results of the experts, and those in the order of the tokens", "routed_hidden", 4),
                SavedActivation(
                    "tokens before they are sent, and before they are sorted", "routed_hidden", 4, ("sent",)
                ),
                SavedActivation("results of the experts and of shared ones", "hidden", 4, sequence=True),
            ),
        ),
        PeakEvent(
            "backward pass of attention's scores", (SavedActivation("gradients of scores", "scores", 4, ("scores",)),)
        ),
        *MEGATRON_MOMENTS,
    ),
    head=(
        SavedActivation("fp32 softmax of the logits", "logits", 4, ("eager loss",)),
        SavedActivation("logits, which their gradient replaces", "logits", None, ("fused loss",)),
    ),
    loss=PeakEvent(
        "backward pass of the loss",
        (
            SavedActivation("gradient of the logits", "logits", None, ("eager loss",)),
            SavedActivation("gradient of the head's input", "hidden", None, ("fused loss",)),
            SavedActivation("the same, reduced", "hidden", None, ("fused loss", "gathers"), sequence=True),
        ),
    ),
    norm=PeakEvent(
        "backward pass of the last norm", (SavedActivation("what is normed and gradients", "hidden", 6, sequence=True),)
    ),
    embedding=(SavedActivation("dropout mask of the embedding", "hidden", 1, ("drop",), sequence=True),),
    sequence_parallel=True,
    spread=(0.9, 1.15),
    source="Korthikanti et al. 2022, sec. 4, re-summed for gates, shared key heads, experts and latents after "
    "megatron-core 0.14's modules with Transformer Engine 2.11",
    recurrence=MEGATRON,
)

_SELECTIVELY_SAVED_ACTIVATIONS: Final = (
    SavedActivation("the layer's input", "hidden", sequence=True),
    SavedActivation("values", "values"),
    SavedActivation("attention's result", "contexts"),
    SavedActivation("logarithms of the scores' sums", "rows", 4),
    SavedActivation("gate", "intermediate"),
)
_FSDP2_PROFILE: Final = RuntimeProfile(
    kept={
        "norms": (
            SavedActivation("inputs of the norms", "norms", sequence=True),
            SavedActivation("statistics of the norms", "norm_rows", 4, sequence=True),
            SavedActivation("inputs of attention and MLP", "inputs", None, ("wide products",)),
        ),
        "attention": (
            *_ATTENTION_ACTIVATIONS,
            SavedActivation("attention's result in float8", "contexts", 1, ("narrow products",)),
            SavedActivation("queries and keys that are normed", "head_norms"),
            SavedActivation("compressed queries and keys", "latent_norms", 4, sequence=True),
            *(saved for saved in _HF_ATTENTION if "scores" in saved.when),
        ),
        "mlp": tuple(saved for saved in _HF_MLP if saved.size != "steps"),
        "experts": _HF_EXPERTS,
        "further": _ADAPTER_ACTIVATIONS,
        "dropout": (SavedActivation("dropout masks", "drops", 1, ("drop",), sequence=True),),
    },
    checkpoint=(SavedActivation("the layer's input", "hidden", sequence=True),),
    shared=(SavedActivation("the layer's input", "hidden", sequence=True),),
    # torchtitan's `_op_sac_save_list`: attention, and every second product of matrices: q, v, gate and down of seven.
    selected=(
        *_SELECTIVELY_SAVED_ACTIVATIONS,
        SavedActivation("queries, before their positions", "queries"),
        # Nothing reads it, which only a compiler sees.
        SavedActivation("result of the projection down", "hidden", None, ("eager model",)),
    ),
    selected_shared=_SELECTIVELY_SAVED_ACTIVATIONS,
    layer=_HF_LAYER,
    head=(
        SavedActivation("fp32 logarithms of probabilities", "logits", 4, ("eager loss",)),
        SavedActivation("logits", "logits", None, ("compiled loss",)),
        SavedActivation("labels", "tokens", 16),
    ),
    loss=PeakEvent(
        "backward pass of the loss",
        (
            SavedActivation("fp32 gradient of the logarithms of probabilities", "logits", 4, ("eager loss",)),
            SavedActivation("fp32 gradient of the logits", "logits", 4, ("eager loss",)),
            # torch.distributed.tensor.parallel.loss, `_nll_loss_and_log_softmax_backward`
            SavedActivation("fp32 probabilities", "logits", 4, ("eager loss", "shared loss")),
            SavedActivation("gradient of the logits", "logits", None, ("compiled loss",)),
        ),
    ),
    norm=PeakEvent(
        "backward pass of the head",
        (
            SavedActivation("gradient of the logits", "logits"),
            SavedActivation("gradient of the norm's output", "hidden"),
        ),
    ),
    embedding=(SavedActivation("dropout mask of the embedding", "hidden", 1, ("drop",), sequence=True),),
    sequence_parallel=True,
    spread=(0.85, 1.15),
    source="tensors that torch 2.13 keeps of modules with torch.nn.RMSNorm, as torchtitan's are, uncompiled",
    recurrence=TRANSFORMERS,
)

_TORCHTUNE: Final = replace(
    _FSDP2_PROFILE,
    kept={
        **_FSDP2_PROFILE.kept,
        # torchtune 0.5, modules/rms_norm.py: norms compute in fp32, which only a compiler does not keep.
        "norms": (
            SavedActivation("inputs of the norms", "norms", None, ("compiled model",)),
            SavedActivation("fp32 copies of what is normed", "norms", 4, ("eager model",)),
            SavedActivation("normed, before the weight", "norms", None, ("eager model", "norms trained")),
            SavedActivation("statistics of the norms", "norm_rows", 4),
            SavedActivation("inputs of attention and MLP", "inputs"),
        ),
        # modules/attention.py: keys and values are repeated for each query head before their kernel.
        "attention": (
            *(saved for saved in _FSDP2_PROFILE.kept["attention"] if saved.size not in {"keys", "values"}),
            SavedActivation("keys of each query head", "repeated_keys", None, ("fused",)),
            SavedActivation("values of each query head", "repeated_values", None, ("fused",)),
        ),
    },
    head=(
        # modules/transformer.py, `unembed`: the whole logits are cast outside of the loss, compiled or not.
        SavedActivation("fp32 logits, or logarithms of probabilities", "logits", 4),
        SavedActivation("labels", "tokens", 16),
    ),
    loss=PeakEvent(
        "backward pass of the loss",
        (
            SavedActivation("fp32 gradient of the logarithms of probabilities", "logits", 4, ("eager loss",)),
            SavedActivation("fp32 gradient of the logits", "logits", 4),
            SavedActivation("gradient of the logits", "logits", None, ("compiled loss",)),
        ),
    ),
    source="modules of torchtune 0.6.1 with the fp32 norms of its 0.5, and keys repeated for each query head",
)
_TRANSFORMERS_MODULES_SOURCE: Final = "transformers' modules"
RUNTIMES: Final[Mapping[Profile, RuntimeProfile]] = {
    "megatron": _MEGATRON_PROFILE,
    "hf": _HF_PROFILE,
    "fsdp2": _FSDP2_PROFILE,
    "torchtune": _TORCHTUNE,
    "ddp": _FSDP2_PROFILE,
    "deepspeed": replace(
        _HF_PROFILE,
        spread=(0.85, 1.15),
        source=f"{_TRANSFORMERS_MODULES_SOURCE}, which DeepSpeed trains as they are: as profile hf",
    ),
}
"""By profile."""
_RECURRENT_KERNELS_SOURCE: Final = (
    "with the kernels of mamba-ssm 2.3, causal-conv1d 1.7 and flash-linear-attention 0.6 installed, "
    "without which several times as much is kept"
)
_RECURRENT_PROFILES: Final[Mapping[Profile, RuntimeProfile]] = {
    "megatron": replace(
        _MEGATRON_PROFILE, source=f"tensors of megatron-core 0.15's MambaMixer, {_RECURRENT_KERNELS_SOURCE}"
    ),
    "hf": replace(_HF_PROFILE, source=f"{_HF_PROFILE.source}, {_RECURRENT_KERNELS_SOURCE}"),
    "fsdp2": replace(
        _HF_PROFILE,
        spread=(0.85, 1.15),
        source=f"{_TRANSFORMERS_MODULES_SOURCE}, sharded as they are, {_RECURRENT_KERNELS_SOURCE}: as profile hf",
    ),
    "deepspeed": replace(
        _HF_PROFILE,
        spread=(0.85, 1.15),
        source=f"{_TRANSFORMERS_MODULES_SOURCE}, {_RECURRENT_KERNELS_SOURCE}: as profile hf",
    ),
    "torchtune": replace(
        _HF_PROFILE,
        spread=(0.85, 1.15),
        source=f"{_TRANSFORMERS_MODULES_SOURCE}, {_RECURRENT_KERNELS_SOURCE}: as profile hf",
    ),
    "ddp": replace(
        _HF_PROFILE,
        spread=(0.85, 1.15),
        source=f"{_TRANSFORMERS_MODULES_SOURCE}, {_RECURRENT_KERNELS_SOURCE}: as profile hf",
    ),
}
"""The same for models with recurrent layers, whose modules are transformers' whatever shards them, or Megatron-LM's."""


def choose_modules(work: TrainingWorkload) -> Profile:
    """Choose the profile whose modules a workload trains: under autocast, DDP's are taken as transformers' are."""
    return "hf" if work.profile == "ddp" and work.precision == "mixed" else work.profile


def get_runtime(profile: Profile, *, recurrent: bool, further: bool) -> RuntimeProfile:
    """Return what the runtime of a profile keeps of a model.

    It may have recurrent layers, or such of which transformers keeps something further than of others.
    """
    if further and profile in {"fsdp2", "torchtune", "ddp"} and not recurrent:
        return replace(
            _HF_PROFILE,
            spread=(0.85, 1.15),
            source=f"{_TRANSFORMERS_MODULES_SOURCE}, sharded as they are: as profile hf",
        )
    return (_RECURRENT_PROFILES if recurrent else RUNTIMES)[profile]
