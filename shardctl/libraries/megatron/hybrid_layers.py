"""Describes layers of hybrid models (Nemotron-H): each is one of Mamba 2, attention, an MLP, or experts.

Names and orders are those of `ssm/mamba_block.py`, `ssm/mamba_mixer.py` and `models/mamba/mamba_layer_specs.py` of
Megatron-LM core 0.16, and of `models/hybrid` since 0.18. What Mamba projects to has gates, channels, B, C and time
steps, each of which is cut by itself; `torch_dist` keeps each in an array of its own. There are such layers with
Transformer Engine only, whose projections have the layer's norm.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError, UnsupportedError
from shardctl.libraries.megatron.whole_array import WholeArray

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.libraries.arrays.schema import ModelParts
    from shardctl.models import Model

EMBEDDING: Final = "model.embeddings.weight"
LAST_NORM: Final = ("model.norm_f", "decoder.final_norm")
"""The model's name of the norm behind the last layer, and core's, which is another than in other models."""
FURTHER: Final = "mtp.layers."
"""What stands before the numbers of layers that predict further tokens."""
LETTERS: Final = {"A_log": "M", "q_proj.weight": "*", "gate.weight": "E", "up_proj.weight": "-"}
"""By a tensor that only a layer of one kind has, what patterns of layers call the kind."""
WINDOW: Final = 4
"""How many tokens core's convolutions see; no arg says another number."""
_PROJECTION_COMPONENT_NAMES: Final = ("z", "x", "B", "C", "dt")
"""What core calls the parts of the projection, of which the convolution has the middle three."""
_CONVOLUTION_COMPONENT_NAMES: Final = _PROJECTION_COMPONENT_NAMES[1:4]
_LATENT_PROJECTION_NAMES: Final = ("fc1_latent_proj", "fc2_latent_proj")
_OF_CONVOLUTION: Final = ".conv1d.bias"


def list_hybrid_arrays(parts: ModelParts, have: str, held: range | None = None) -> Iterator[WholeArray]:
    """List the arrays of the layer called `have`; of its routed experts only those that are `held`, if that is given.

    Raises UnsupportedError for norms that are stored less one: whether those inside of Mamba are so is not known.
    """
    if parts.norms:
        raise UnsupportedError(f"{parts.title}'s hybrid models with norms that are stored less one are not known")
    norm, mixer = parts[f"{have}.norm.weight"], f"{have}.mixer"
    kind = find_layer_letter(parts.model, have)
    if kind == "M":
        yield WholeArray("norm.weight", (norm,))
        yield from _list_mamba(parts, mixer)
    elif kind == "*":
        yield WholeArray("input_layernorm.weight", (norm,))
        q, k, v = (parts[f"{mixer}.{part}_proj.weight"] for part in "qkv")
        groups = k.shape[0] // parts.unit(f"{mixer}.k_proj.weight")
        yield WholeArray("self_attention.linear_qkv.weight", (q, k, v), 0, groups=groups)
        yield WholeArray("self_attention.linear_proj.weight", (parts[f"{mixer}.o_proj.weight"],), 1)
    else:
        yield WholeArray("pre_mlp_layernorm.weight", (norm,))
        yield from _list_experts(parts, mixer, held) if kind == "E" else _list_mlp(parts, mixer, "mlp")


def find_layer_letter(model: Model, have: str) -> str:
    """Find what patterns call the layer called `have`; raises UnsupportedError for a layer of no such kind."""
    letter = next((LETTERS[name] for name in LETTERS if f"{have}.mixer.{name}" in model.tensors), None)
    if letter is None:
        raise UnsupportedError(f"{have} of {model.architecture or 'this model'} is of no kind that hybrid models have")
    return letter


def format_layer_letters(model: Model) -> str:
    """Format the kinds of all layers, one letter each, without those that predict further tokens."""
    return "".join(find_layer_letter(model, f"model.layers.{number}") for number in range(model.layers))


def format_further_letters(model: Model) -> str:
    """Format the same of layers that predict; empty if the model has none."""
    numbers = {int(name.split(".")[2]) for name in model.tensors if name.startswith(FURTHER)}
    return "".join(find_layer_letter(model, f"{FURTHER}{number}") for number in sorted(numbers))


def format_patterns(model: Model, stages: Sequence[int], further: int) -> dict[str, str]:
    """Format the args that say the kinds of layers: core 0.17's, with `stages` of layers, and those of core 0.16.

    The former ends with those of each layer that predicts, of which there are `further`; the latter has none.
    """
    letters, later, start, parts = format_layer_letters(model), format_further_letters(model), 0, []
    for count in stages or (model.layers,):
        parts.append(letters[start : start + count])
        start += count
    return {
        "hybrid_layer_pattern": "/".join(["|".join(parts), *(later,) * further]),
        "hybrid_override_pattern": letters,
    }


def check_hybrid(model: Model) -> None:
    """Raise UnsupportedError for what core's hybrid models do not have, whatever the mesh."""
    biased = next((n for n in model.tensors if n.endswith(".bias") and not n.endswith(_OF_CONVOLUTION)), None)
    if biased is not None:
        raise UnsupportedError(
            f"Megatron-LM's core has biases in the projections of all layers but Mamba's or in none, and this model "
            f"has {biased}"
        )
    for name, tensor in model.tensors.items():
        if not name.endswith(".conv1d.weight"):
            continue
        if re.sub("weight$", "bias", name) not in model.tensors:
            raise UnsupportedError(f"Megatron-LM's core has no convolution without a bias, and this model has {name}")
        if tensor.shape[-1] != WINDOW:
            raise UnsupportedError(
                f"Megatron-LM's core has convolutions over {WINDOW} tokens, but {name} is over {tensor.shape[-1]}"
            )


def check_mamba_degree(parts: ModelParts, tp: int) -> None:
    """Raise PartitionError if `tp` ranks cannot each have as many heads of Mamba, and groups of them, as any other."""
    for name in parts.model.tensors:
        if not name.endswith(".mixer.in_proj.weight"):
            continue
        _, channels, groups, _, heads = parts.divide(name)
        count = groups.shape[0] // _find_state_size(parts, name)
        if heads.shape[0] % tp or count % tp:
            raise PartitionError(
                f"{parts.title} gives every tp rank whole groups of Mamba's heads, but {count} groups of "
                f"{heads.shape[0]} heads ({channels.shape[0]} channels) cannot be divided over tp={tp}",
                hint=f"use --tp {', '.join(str(n) for n in range(1, count + 1) if count % n == 0)}",
            )
        return


def _find_state_size(parts: ModelParts, name: str) -> int:
    """Find how many rows of B a group has."""
    return parts.model.tensors[name].spec.cuts[0][0].sections[2].unit


def _list_mamba(parts: ModelParts, mixer: str) -> Iterator[WholeArray]:
    yield WholeArray(
        "mixer.in_proj.weight", tuple(parts.divide(f"{mixer}.in_proj.weight")), 0, parts=_PROJECTION_COMPONENT_NAMES
    )
    for kind in ("weight", "bias"):
        pieces = tuple(parts.divide(f"{mixer}.conv1d.{kind}"))
        yield WholeArray(f"mixer.conv1d.{kind}", pieces, 0, parts=_CONVOLUTION_COMPONENT_NAMES)
    for name in ("dt_bias", "A_log", "D", "norm.weight"):
        yield WholeArray(f"mixer.{name}", (parts[f"{mixer}.{name}"],), 0)
    yield WholeArray("mixer.out_proj.weight", (parts[f"{mixer}.out_proj.weight"],), 1)


def _list_mlp(parts: ModelParts, have: str, new: str, expert: int | None = None) -> Iterator[WholeArray]:
    yield WholeArray(f"{new}.linear_fc1.weight", (parts[f"{have}.up_proj.weight"],), 0, expert)
    yield WholeArray(f"{new}.linear_fc2.weight", (parts[f"{have}.down_proj.weight"],), 1, expert)


def _list_experts(parts: ModelParts, mixer: str, held: range | None) -> Iterator[WholeArray]:
    router = parts[f"{mixer}.gate.weight"]
    yield WholeArray("mlp.router.weight", (router,))
    balance = parts[f"{mixer}.gate.e_score_correction_bias"]
    yield WholeArray("mlp.router.expert_bias", (balance,), dtype=BY_NAME["F32"])
    for name in _LATENT_PROJECTION_NAMES:
        if f"{mixer}.{name}.weight" in parts:
            yield WholeArray(f"mlp.{name}.weight", (parts[f"{mixer}.{name}.weight"],))
    for expert in held or range(router.shape[0]):
        yield from _list_mlp(parts, f"{mixer}.experts.{expert}", "mlp.experts", expert)
    if f"{mixer}.shared_experts.up_proj.weight" in parts:
        yield from _list_mlp(parts, f"{mixer}.shared_experts", "mlp.shared_experts")
