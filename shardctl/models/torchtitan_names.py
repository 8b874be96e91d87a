"""Describes the arrays that torchtitan has of a model, for both directions: their names, and experts in stacks.

Names are those of torchtitan 0.3.0 (`models/*/state_dict_adapter.py`). It stacks gate, up and down projections of
experts, each by itself. Rows of queries and keys are in transformers' order, except for Llama, whose names and order
are Meta's (`meta_names`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError, format_first_few
from shardctl.models.fusion import TensorFusion, join_tensors, stack_tensors
from shardctl.models.trainer_arrays import bind_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.manifest import Manifest
    from shardctl.models.model import Model

TRAINER: Final = "torchtitan"
_EMBEDDING: Final = "tok_embeddings.weight"
_ENDS: Final = {"model.embed_tokens.": "tok_embeddings.", "model.norm.": "norm.", "lm_head.": "lm_head."}
_DENSE: Final = {
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
}
_QKV: Final = {f"self_attn.{part}_proj": f"attention.qkv_linear.w{part}" for part in "qkv"}
_ROUTED: Final = "moe.routed_experts.inner_experts"
_EXPERTS: Final = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}
_ROUTER: Final = {"mlp.gate": "moe.router.gate"}
_LATENT: Final = {
    **{f"self_attn.{part}": f"attention.{own}" for part, own in (("q_proj", "wq"), ("q_a_proj", "wq_a"))},
    **{f"self_attn.{part}": f"attention.{own}" for part, own in (("q_a_layernorm", "q_norm"), ("q_b_proj", "wq_b"))},
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    **{f"mlp.shared_experts.{part}": f"moe.shared_experts.{own[:2]}" for part, own in _EXPERTS.items()},
}
_QK_NORMS: Final = {f"self_attn.{part}_norm": f"attention.{part}_norm" for part in "qk"}
_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "qwen3": {**_DENSE, **_QKV, **_QK_NORMS},
    "qwen3_moe": {**_DENSE, **_QKV, **_QK_NORMS, **_ROUTER},
    "deepseek_v3": {**_DENSE, **_LATENT, **_ROUTER},
}
"""By family: the modules of a layer, as transformers and as torchtitan call them."""
_PLAIN: Final = {
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
}
_KINDS: Final = ("weight", "bias")
_NOTE: Final = "torchtitan's names and stacked experts; read as those of transformers"
_LAYER: Final = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_EXPERT: Final = re.compile(r"mlp\.experts\.([0-9]+)\.([a-z_]+)\.weight")


def build_trainer_arrays(model: Model) -> dict[str, TensorFusion]:
    """Build every array that torchtitan has of a model, by its name there; of a tie there are several.

    Raises UnsupportedError for a family whose names are not known here, and for tensors that torchtitan does not have.
    """
    if model.family not in _PARTS:
        raise UnsupportedError(
            f"torchtitan's names for {model.architecture or 'this model'} are not known here",
            hint=f"known are {', '.join(_PARTS)}; Llama's are read, and --to meta writes them",
        )
    arrays: dict[str, TensorFusion] = {}
    stacks: dict[str, dict[int, str]] = {}
    unknown = []
    for name, canonical in {**{tensor.name: tensor.name for tensor in model.own()}, **model.aliases}.items():
        shape, layer = model.tensors[canonical].shape, _LAYER.fullmatch(name)
        expert = _EXPERT.fullmatch(layer[2]) if layer is not None else None
        array = _find_name(model.family, name)
        if layer is not None and expert is not None and expert[2] in _EXPERTS:
            array = f"layers.{layer[1]}.{_ROUTED}.{_EXPERTS[expert[2]]}"
            stacks.setdefault(array, {})[int(expert[1])] = name
        elif array is not None:
            arrays[array] = TensorFusion(array, (canonical,), join_tensors((shape,)))
        else:
            unknown.append(name)
    if unknown:
        raise UnsupportedError(f"torchtitan has no array for {format_first_few(unknown)} of {model.architecture}")
    for array, members in stacks.items():
        names = tuple(members[number] for number in sorted(members))
        arrays[array] = TensorFusion(array, names, stack_tensors((model.tensors[names[0]].shape,), len(names)))
    return arrays


def bind_trainer_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` under the names of transformers, experts apart, if all names are torchtitan's; else as it is."""
    if model.family not in _PARTS or _EMBEDDING not in stored.tensors:
        return stored
    arrays = build_trainer_arrays(model)
    if not all(name in arrays and arrays[name].shape == tensor.shape for name, tensor in stored.tensors.items()):
        return stored
    return bind_arrays(stored, arrays, _NOTE)


def _find_name(family: str, name: str) -> str | None:
    """Find what torchtitan calls a tensor that it has as it is; None if it has no such."""
    for ours, theirs in _ENDS.items():
        if name == f"{ours}weight":
            return f"{theirs}weight"
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return None
    module, _, kind = layer[2].rpartition(".")
    part = _PARTS[family].get(module)
    own = f"{part}.{kind}" if part is not None and kind in _KINDS else _PLAIN.get(layer[2])
    return f"layers.{layer[1]}.{own}" if own is not None else None
