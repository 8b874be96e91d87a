"""Describes the arrays of Llama 4 as Meta publishes it: q, k and v of a rank in one array, experts' rows in another.

Names are those of the published files, which the load hooks of meta-llama/llama-models `models/llama4` (`model.py`,
`ffn.py`, `moe.py`) translate and `models/checkpoint.py` divides further; cuts are those of the layers there. No rows
change their order: Llama 4 of transformers turns neighbouring pairs, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError, UnsupportedError
from shardctl.libraries.arrays.composite import SchemaEntry, join_arrays
from shardctl.libraries.arrays.schema import ModelParts, Schema, SchemaRank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models import Model
    from shardctl.tensors.naming_scheme import NamingScheme

NAME: Final = "meta"
TITLE: Final = "Meta's code for Llama 4"
FAMILIES: Final = frozenset({"llama4", "llama4_text"})
TEXT: Final = "language_model."
"""What stands before the names of the text model in one that sees."""
_VISION_MODEL_PREFIX: Final = "vision_model"
_VISION_ENCODER_PREFIX: Final = "vision_embeddings.vision_encoder"
_VISION_ADAPTER_PREFIX: Final = "vision_embeddings.vision_adapter.mlp"
_PROJECTOR_MODULE_NAME: Final = "multi_modal_projector.linear_1"
_ATTENTION_MODULE_NAME: Final = "self_attn"


def _list_entries(model: Model, dialect: NamingScheme, rank: int) -> Iterator[SchemaEntry]:
    inner = f"{TEXT}model" if model.family == "llama4" else ""
    at = SchemaRank(ModelParts(model, TITLE, inner=inner), dialect.mesh.degree("tp"), rank)
    yield SchemaEntry("tok_embeddings.weight", at.rows("model.embed_tokens.weight"))
    for n in range(model.layers):
        yield from _list_attention(at, n)
        layer = f"model.layers.{n}.feed_forward"
        yield from _list_experts(at, n) if f"{layer}.router.weight" in at else _list_dense(at, n)
    yield SchemaEntry("norm.weight", at["model.norm.weight"])
    yield SchemaEntry("output.weight", at.rows(f"{TEXT if inner else ''}lm_head.weight"))
    if inner:
        yield from _list_vision(at)


def _list_attention(at: SchemaRank, n: int) -> Iterator[SchemaEntry]:
    attention, to = f"model.layers.{n}.{_ATTENTION_MODULE_NAME}", f"layers.{n}.attention"
    for part in "qk":
        _check_heads(at, f"{attention}.{part}_proj.weight")
    qkv = [at.rows(f"{attention}.{part}_proj.weight") for part in "qkv"]
    yield SchemaEntry(f"{to}.wqkv.weight", join_arrays(qkv))
    yield SchemaEntry(f"{to}.wqkv.layer_norm_weight", at[f"model.layers.{n}.input_layernorm.weight"])
    yield SchemaEntry(f"{to}.wo.weight", at.columns(f"{attention}.o_proj.weight"))


def _list_dense(at: SchemaRank, n: int) -> Iterator[SchemaEntry]:
    layer, to = f"model.layers.{n}", f"layers.{n}.feed_forward.mlp"
    gate_up = [at.rows(f"{layer}.feed_forward.{part}_proj.weight") for part in ("gate", "up")]
    yield SchemaEntry(f"{to}.layer_norm_weight", at[f"{layer}.post_attention_layernorm.weight"])
    yield SchemaEntry(f"{to}.fc1_weight", join_arrays(gate_up))
    yield SchemaEntry(f"{to}.fc2_weight", at.columns(f"{layer}.feed_forward.down_proj.weight"))


def _list_experts(at: SchemaRank, n: int) -> Iterator[SchemaEntry]:
    """Yield the experts of a layer: every rank has a part of each, and all of them are one array of two dims."""
    layer, to = f"model.layers.{n}.feed_forward", f"layers.{n}.feed_forward"
    yield SchemaEntry(f"{to}.norm.weight", at[f"model.layers.{n}.post_attention_layernorm.weight"])
    yield SchemaEntry(f"{to}.router_DE", at[f"{layer}.router.weight"].transposed)
    gate_up, down = at[f"{layer}.experts.gate_up_proj"], at[f"{layer}.experts.down_proj"]
    count, hidden, inner = gate_up.shape[0], gate_up.shape[1], gate_up.shape[2] // 2
    for name, first in (("moe_w_in_eD_F", 0), ("moe_w_swiglu_eD_F", inner)):
        content = gate_up.part(2, first, first + inner).share(2, at.index, at.tp)
        yield SchemaEntry(f"{to}.experts.{name}", content, (count * hidden, content.shape[2]))
    content = down.share(1, at.index, at.tp)
    yield SchemaEntry(f"{to}.experts.moe_w_out_eF_D", content, (count * content.shape[1], hidden))
    yield SchemaEntry(f"{to}.w_in_shared_FD.weight", at.rows(f"{layer}.shared_expert.gate_proj.weight"))
    yield SchemaEntry(f"{to}.w_swiglu_FD.weight", at.rows(f"{layer}.shared_expert.up_proj.weight"))
    yield SchemaEntry(f"{to}.w_out_shared_DF.weight", at.columns(f"{layer}.shared_expert.down_proj.weight"))


def _list_vision(at: SchemaRank) -> Iterator[SchemaEntry]:
    """Yield what it sees with; biases of layers whose inputs are cut are whole on every rank."""
    yield SchemaEntry(f"{_VISION_ENCODER_PREFIX}.class_embedding", at[f"{_VISION_MODEL_PREFIX}.class_embedding"])
    yield SchemaEntry(
        f"{_VISION_ENCODER_PREFIX}.positional_embedding_vlm", at[f"{_VISION_MODEL_PREFIX}.positional_embedding_vlm"]
    )
    yield from at.column_layer(
        f"{_VISION_MODEL_PREFIX}.patch_embedding.linear", f"{_VISION_ENCODER_PREFIX}.conv1._linear"
    )
    for end in ("pre", "post"):
        yield from _list_norm(at, f"{_VISION_MODEL_PREFIX}.layernorm_{end}", f"{_VISION_ENCODER_PREFIX}.ln_{end}")
    n = 0
    while f"{_VISION_MODEL_PREFIX}.model.layers.{n}.input_layernorm.weight" in at:
        layer, to = f"{_VISION_MODEL_PREFIX}.model.layers.{n}", f"{_VISION_ENCODER_PREFIX}.transformer.resblocks.{n}"
        for part in "qkv":
            yield from at.column_layer(f"{layer}.{_ATTENTION_MODULE_NAME}.{part}_proj", f"{to}.attn.w{part}")
        yield from at.row_layer(f"{layer}.{_ATTENTION_MODULE_NAME}.o_proj", f"{to}.attn.wo")
        yield from _list_norm(at, f"{layer}.input_layernorm", f"{to}.ln_1")
        yield from _list_norm(at, f"{layer}.post_attention_layernorm", f"{to}.ln_2")
        yield from at.column_layer(f"{layer}.mlp.fc1", f"{to}.mlp.c_fc")
        yield from at.row_layer(f"{layer}.mlp.fc2", f"{to}.mlp.c_proj")
        n += 1
    yield from at.column_layer(f"{_VISION_MODEL_PREFIX}.vision_adapter.mlp.fc1", f"{_VISION_ADAPTER_PREFIX}.c_fc")
    yield from at.row_layer(f"{_VISION_MODEL_PREFIX}.vision_adapter.mlp.fc2", f"{_VISION_ADAPTER_PREFIX}.c_proj")
    yield from at.column_layer(_PROJECTOR_MODULE_NAME, "vision_projection")


def _list_norm(at: SchemaRank, name: str, to: str) -> Iterator[SchemaEntry]:
    for kind in ("weight", "bias"):
        yield SchemaEntry(f"{to}.{kind}", at[f"{name}.{kind}"])


def _check_heads(at: SchemaRank, name: str) -> None:
    """Raise PartitionError if a rank would have part of a head, or none."""
    unit = at.parts.unit(name)
    heads = at[name].shape[0] // unit
    if heads % at.tp:
        raise PartitionError(
            f"cannot split {at.parts.resolve(name)} over tp={at.tp}: {TITLE} gives every rank whole heads, "
            f"and it has {heads}"
        )


def _check_model(model: Model) -> None:
    """Raise UnsupportedError for a model that Meta's code is not for."""
    if model.family not in FAMILIES or not model.architecture.endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise UnsupportedError(f"Meta's code is for Llama 2, 3 and 4, not for {model.architecture or 'this model'}")


SCHEMA: Final = Schema(NAME, TITLE, _check_model, _list_entries)
