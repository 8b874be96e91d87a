"""Describes the arrays that torchtitan has of a model, for both directions: names, and what is stacked or divided.

Names are those of torchtitan 0.3.0 (`models/*/state_dict_adapter.py`). It stacks gate, up and down projections of
experts, each by itself. What transformers has in one as queries, keys and values, of linear attention and of vision
models, are three arrays. Rows of queries and keys are in transformers' order, except for Llama, whose names and order
are Meta's (`meta_names`).
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError, format_first_few
from shardctl.models.fusion import TensorFusion, cut_rows, join_tensors, merge_last_dims, stack_tensors
from shardctl.models.trainer_arrays import bind_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.manifest import Manifest
    from shardctl.models.fusion import FusionPlaces
    from shardctl.models.model import Model, ModelTensor

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
_DELTA: Final = {
    **{key: part for key, part in _DENSE.items() if key != "self_attn.o_proj"},
    **{f"self_attn.{part}_proj": f"attn.w{part}" for part in "qkvo"},
    **{f"self_attn.{part}_norm": f"attn.{part}_norm" for part in "qk"},
    **{f"linear_attn.{part}": f"attn.{part}" for part in ("in_proj_z", "in_proj_a", "in_proj_b", "norm", "out_proj")},
    "mlp.gate": "moe.router.gate",
    **{f"mlp.shared_expert.{part}": f"moe.shared_experts.{own[:2]}" for part, own in _EXPERTS.items()},
    "mlp.shared_expert_gate": "moe.shared_experts.gate",
}
_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "qwen3": {**_DENSE, **_QKV, **_QK_NORMS},
    "qwen3_moe": {**_DENSE, **_QKV, **_QK_NORMS, **_ROUTER},
    "deepseek_v3": {**_DENSE, **_LATENT, **_ROUTER},
    "kimi_k25": {**_DENSE, **_LATENT, **_ROUTER},
    **{f"qwen3_5{kind}": _DELTA for kind in ("", "_moe", "_text", "_moe_text")},
}
"""By family: the modules of a layer, as transformers and as torchtitan call them."""
_PLAIN: Final = {
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
    "linear_attn.A_log": "attn.A_log",
    "linear_attn.dt_bias": "attn.dt_bias",
}
_DIVIDED: Final = {
    "linear_attn.in_proj_qkv.weight": tuple(f"attn.in_proj_{part}.weight" for part in "qkv"),
    "linear_attn.conv1d.weight": tuple(f"attn.conv_{part}.weight" for part in "qkv"),
}
"""Whose rows are several arrays there, one for each section."""
_SEEN: Final = {
    r"model\.visual\.blocks\.([0-9]+)\.attn\.qkv\.(weight|bias)": r"vision_encoder.layers.\1.attn.w*.\2",
    r"model\.visual\.blocks\.(.+)": r"vision_encoder.layers.\1",
    r"model\.visual\.pos_embed\.weight": "vision_encoder.pos_embed",
    r"(?:model\.visual|vision_tower)\.patch_embed\.proj\.(.+)": r"vision_encoder.patch_embed.\1",
    r"model\.visual\.merger\.(.+)": r"vision_encoder.merger.\1",
    r"vision_tower\.patch_embed\.pos_emb\.weight": "vision_encoder.pos_embed",
    r"vision_tower\.encoder\.blocks\.([0-9]+)\.wqkv\.(weight|bias)": r"vision_encoder.layers.\1.attn.w*.\2",
    r"vision_tower\.encoder\.blocks\.([0-9]+)\.norm0\.(.+)": r"vision_encoder.layers.\1.norm1.\2",
    r"vision_tower\.encoder\.blocks\.([0-9]+)\.norm1\.(.+)": r"vision_encoder.layers.\1.norm2.\2",
    r"vision_tower\.encoder\.blocks\.([0-9]+)\.wo\.(.+)": r"vision_encoder.layers.\1.attn.proj.\2",
    r"vision_tower\.encoder\.blocks\.([0-9]+)\.mlp\.fc0\.(.+)": r"vision_encoder.layers.\1.mlp.linear_fc1.\2",
    r"vision_tower\.encoder\.blocks\.([0-9]+)\.mlp\.fc1\.(.+)": r"vision_encoder.layers.\1.mlp.linear_fc2.\2",
    r"vision_tower\.encoder\.final_layernorm\.(.+)": r"vision_encoder.final_norm.\1",
    r"mm_projector\.pre_norm\.(.+)": r"vision_encoder.projector.pre_norm.\1",
    r"mm_projector\.proj\.0\.(.+)": r"vision_encoder.projector.linear_1.\1",
    r"mm_projector\.proj\.2\.(.+)": r"vision_encoder.projector.linear_2.\1",
}
"""What vision models have, of Qwen3.5 and of Kimi-K2.5; a `*` is q, k and v, each a third of the rows."""
_PATCHES: Final = "vision_encoder.patch_embed.weight"
"""A convolution over patches, whose filters are rows there."""
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
        plain = _strip_text_prefix(name)
        layer = _LAYER.fullmatch(plain)
        expert = _EXPERT.fullmatch(layer[2]) if layer is not None else None
        if layer is not None and expert is not None and expert[2] in _EXPERTS:
            array = f"layers.{layer[1]}.{_ROUTED}.{_EXPERTS[expert[2]]}"
            stacks.setdefault(array, {})[int(expert[1])] = name
        elif found := _find_names(model.family, plain):
            places = _divide_rows(model.tensors[canonical], found)
            arrays |= {array: TensorFusion(array, (canonical,), place) for array, place in places.items()}
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
    if not all(name in arrays and arrays[name].declared == tensor.shape for name, tensor in stored.tensors.items()):
        return stored
    return bind_arrays(stored, arrays, _NOTE)


def _strip_text_prefix(name: str) -> str:
    """Return the name of a tensor of a text model as if it was by itself; others as they are.

    >>> [_strip_text_prefix(f"{front}layers.0.mlp.up_proj.weight") for front in ("model.language_model.", "model.")]
    ['model.layers.0.mlp.up_proj.weight', 'model.layers.0.mlp.up_proj.weight']
    >>> [_strip_text_prefix(f"language_model.{name}.weight") for name in ("model.norm", "lm_head")]
    ['model.norm.weight', 'lm_head.weight']
    """
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def _find_names(family: str, name: str) -> tuple[str, ...]:
    """Find what torchtitan calls the arrays of a tensor; several if each has some of its rows, none if it has none."""
    for ours, theirs in _ENDS.items():
        if name == f"{ours}weight":
            return (f"{theirs}weight",)
    for pattern, theirs in _SEEN.items():
        if (seen := re.fullmatch(pattern, name)) is not None:
            array = seen.expand(theirs)
            return tuple(array.replace("*", part) for part in "qkv") if "*" in array else (array,)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return ()
    module, _, kind = layer[2].rpartition(".")
    part = _PARTS[family].get(module)
    own = f"{part}.{kind}" if part is not None and kind in _KINDS else _PLAIN.get(layer[2])
    found = _DIVIDED.get(layer[2], (own,) if own is not None else ())
    return tuple(f"layers.{layer[1]}.{each}" for each in found)


def _divide_rows(tensor: ModelTensor, arrays: tuple[str, ...]) -> dict[str, FusionPlaces]:
    """Return where a tensor is in each of some arrays: all of it in the one, or in each the rows of one section."""
    shape = tensor.shape
    if len(arrays) == 1:
        return {arrays[0]: merge_last_dims(shape) if arrays[0] == _PATCHES else join_tensors((shape,))}
    sizes = [section.size for cut in tensor.spec.cuts[0] for section in cut.sections]
    sizes = sizes if len(sizes) == len(arrays) else [shape[0] // len(arrays)] * len(arrays)
    ends = list(accumulate(sizes))
    places = (cut_rows(shape, end - size, end) for end, size in zip(ends, sizes, strict=True))
    return dict(zip(arrays, places, strict=True))
