"""Describes the arrays that DeepSeek's inference code holds on each rank, for DeepSeek-V2, V3 and V3.2.

Names and cuts are those of `inference/convert.py` of deepseek-ai/DeepSeek-V3 and deepseek-ai/DeepSeek-V3.2-Exp: layers
with many outputs are cut along them, those with many inputs along those, routed experts are divided whole, and the
rest, V3.2's indexer too, is on every rank. The scales of fp8 weights, one for each block of 128 x 128, are cut with
their weights. Layers that predict further tokens have no place.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError, UnsupportedError
from shardctl.libraries.arrays.composite import CompositeArray, SchemaEntry
from shardctl.libraries.arrays.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models import Model
    from shardctl.models.tables.model import ModelTensor
    from shardctl.tensors.naming_scheme import NamingScheme

NAME: Final = "deepseek"
TITLE: Final = "DeepSeek's inference code"
FAMILIES: Final = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32"})
BLOCK: Final = 128
"""Rows and columns that share a scale, as `inference/model.py` has it."""
_NON_LAYER_MODULES: Final[dict[str, tuple[str, int | None]]] = {
    "model.embed_tokens": ("embed", 0),
    "model.norm": ("norm", None),
    "lm_head": ("head", 0),
}
_INDEXER_MODULES: Final = tuple(f"indexer.{part}" for part in ("wq_b", "wk", "k_norm", "weights_proj"))
_LAYER_MODULES: Final[dict[str, tuple[str, int | None]]] = {
    "input_layernorm": ("attn_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "self_attn.q_proj": ("attn.wq", 0),
    "self_attn.q_a_proj": ("attn.wq_a", None),
    "self_attn.q_a_layernorm": ("attn.q_norm", None),
    "self_attn.q_b_proj": ("attn.wq_b", 0),
    "self_attn.kv_a_proj_with_mqa": ("attn.wkv_a", None),
    "self_attn.kv_a_layernorm": ("attn.kv_norm", None),
    "self_attn.kv_b_proj": ("attn.wkv_b", 0),
    "self_attn.o_proj": ("attn.wo", 1),
    **{f"self_attn.{part}": (f"attn.{part}", None) for part in _INDEXER_MODULES},
    "mlp.gate_proj": ("ffn.w1", 0),
    "mlp.up_proj": ("ffn.w3", 0),
    "mlp.down_proj": ("ffn.w2", 1),
    "mlp.gate": ("ffn.gate", None),
    "mlp.shared_experts.gate_proj": ("ffn.shared_experts.w1", 0),
    "mlp.shared_experts.up_proj": ("ffn.shared_experts.w3", 0),
    "mlp.shared_experts.down_proj": ("ffn.shared_experts.w2", 1),
}
"""For each module its name here, and the dim along which ranks cut it; None for one that is whole on every rank."""
_EXPERT_MATRIX_NAMES: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_PARAMETER_NAMES: Final = {"weight": "weight", "weight_scale_inv": "scale", "e_score_correction_bias": "bias"}
_BIASED_MODULE_SUFFIX: Final = ".k_norm"
"""What the module whose bias its code has ends with; it has no place for another."""
_LAYER_PATTERN: Final = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_EXPERT_PATTERN: Final = re.compile(r"mlp\.experts\.([0-9]+)\.([a-z_]+)")


def _list_entries(model: Model, dialect: NamingScheme, rank: int) -> Iterator[SchemaEntry]:
    ranks = dialect.mesh.degree("tp")
    experts = _count_experts(model)
    if experts % ranks:
        raise PartitionError(
            f"{TITLE} divides whole experts over its ranks: {experts} experts cannot be divided over tp={ranks}"
        )
    for tensor in model.own():
        member = tensor.spec.member
        if member is not None and member.index * ranks // experts != rank:
            continue
        for name in (tensor.name, *tensor.ties):
            to, dim = _place_tensor(name, model)
            whole = CompositeArray.whole(tensor.name, tensor.shape)
            if dim is not None:
                _check_cut(tensor, dim, model, ranks)
                whole = whole.share(dim, rank, ranks)
            yield SchemaEntry(to, whole)


def _place_tensor(name: str, model: Model) -> tuple[str, int | None]:
    """Return what a tensor is called here, and the dim along which ranks cut it, or None if it is whole.

    Raises UnsupportedError for a tensor that DeepSeek's code has not.
    """
    module, _, kind = name.rpartition(".")
    kinds = {**_PARAMETER_NAMES, "bias": "bias"} if module.endswith(_BIASED_MODULE_SUFFIX) else _PARAMETER_NAMES
    layer = _LAYER_PATTERN.fullmatch(module)
    if layer is None:
        found, prefix = _NON_LAYER_MODULES.get(module), ""
    else:
        found, prefix = _LAYER_MODULES.get(layer[2]), f"layers.{layer[1]}."
        expert = _EXPERT_PATTERN.fullmatch(layer[2])
        if expert is not None and expert[2] in _EXPERT_MATRIX_NAMES:
            found = f"ffn.experts.{expert[1]}.{_EXPERT_MATRIX_NAMES[expert[2]]}", None
    if found is None or kind not in kinds:
        raise UnsupportedError(f"{TITLE} has no place for {name} of {model.architecture}")
    return f"{prefix}{found[0]}.{kinds[kind]}", found[1]


def _check_cut(tensor: ModelTensor, dim: int, model: Model, ranks: int) -> None:
    """Raise PartitionError if ranks would have unequal parts, parts of heads, or parts of blocks that share a scale."""
    extent, unit, noun = tensor.shape[dim], 1, ""
    if tensor.spec.cuts and tensor.spec.cuts[dim] and tensor.spec.cuts[dim][0].sections:
        section = tensor.spec.cuts[dim][0].sections[0]
        unit, noun = section.unit, f", in heads of {section.unit}" if section.unit > 1 else ""
    weight = model.tensors.get(tensor.name.removesuffix("_scale_inv"), tensor)
    if f"{weight.name}_scale_inv" in model.tensors:
        extent, unit, noun = weight.shape[dim], BLOCK, f", of which {BLOCK} share a scale"
    if ranks > 1 and extent % (ranks * unit):
        raise PartitionError(
            f"cannot split {weight.name} {list(weight.shape)} over tp={ranks}: "
            f"it has {extent} {'columns' if dim else 'rows'}{noun}"
        )


def _count_experts(model: Model) -> int:
    """Count routed experts of a layer; 0 for a model without."""
    member = next((t.spec.member for t in model.tensors.values() if t.spec.member is not None), None)
    return member.count if member is not None else 0


def _check_model(model: Model) -> None:
    """Raise UnsupportedError for a model that DeepSeek's code is not for."""
    if model.family == "deepseek_v4":
        raise UnsupportedError(
            f"{TITLE} has DeepSeek-V4's o_a_proj in bfloat16, scaled back from fp8, beside weights that stay codes, "
            "which is not written here",
            hint="run inference/convert.py of the model's repository on the Hub",
        )
    if model.family not in FAMILIES or not model.architecture.endswith("ForCausalLM"):
        raise UnsupportedError(f"{TITLE} is for DeepSeek-V2, V3 and V3.2, not for {model.architecture or 'this model'}")
    for tensor in model.tensors.values():
        weight = model.tensors.get(tensor.name.removesuffix("_scale_inv")) if "_scale_inv" in tensor.name else None
        if weight is not None and tensor.shape != tuple(-(-extent // BLOCK) for extent in weight.shape):
            raise UnsupportedError(
                f"{TITLE} has a scale for each {BLOCK} x {BLOCK} of fp8 weights, but {tensor.name} is "
                f"{list(tensor.shape)} for {list(weight.shape)}"
            )


_MTP_LAYERS_HINT: Final = "DeepSeek's convert.py leaves them out, too; --only mtp --to hf writes them by themselves"
SCHEMA: Final = Schema(NAME, TITLE, _check_model, _list_entries, _MTP_LAYERS_HINT)
