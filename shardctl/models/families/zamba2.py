"""Describes Zamba2: layers of Mamba 2, and before some of them a block of attention that several share.

Names and shapes follow transformers 5 (`models/zamba2/modeling_zamba2.py`). There are `num_mem_blocks` blocks, which
the layers that have one take in turn; each sees the embedding beside its input, and has an adapter for each layer that
shares it, numbered by the layers that have a block. A stage holds every block that one of its layers has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.mamba import build_mixer2_dims, build_mixer2_rows
from shardctl.models.tables.decoder import EMBEDDING, HEADS, LAYER, build_decoder_facts
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row, RowIndex
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_SHARED_BLOCK_PREFIX: Final = f"{LAYER}.shared_transformer"
_DEFAULT_HYBRID_LAYERS: Final = (6, 12, 18, 24, 30, 36, 42, 47, 51)
"""The layers that have a block where a config does not say which; then there are 54, whatever else it says."""


def _build_adapter_rows(module: str, slot: str, dims: tuple[str, str], when: str = "") -> tuple[Row, Row]:
    """Build the two matrices of each adapter of a list, whose `slot` has a name of its own: a list follows another."""
    return (
        Row(f"{_SHARED_BLOCK_PREFIX}.{module}.{{{slot}}}.0.weight", f"adapter {dims[0]}", when),
        Row(f"{_SHARED_BLOCK_PREFIX}.{module}.{{{slot}}}.1.weight", f"{dims[1]} adapter", when),
    )


_SHARED_BLOCK_ROWS: Final = (
    Row(f"{_SHARED_BLOCK_PREFIX}.self_attn.q_proj.weight", "q both"),
    Row(f"{_SHARED_BLOCK_PREFIX}.self_attn.k_proj.weight", "kv both"),
    Row(f"{_SHARED_BLOCK_PREFIX}.self_attn.v_proj.weight", "kv both"),
    Row(f"{_SHARED_BLOCK_PREFIX}.self_attn.o_proj.weight", "hidden q"),
    *_build_adapter_rows("self_attn.linear_q_adapter_list", "q_slot", ("both", "q"), "adapted"),
    *_build_adapter_rows("self_attn.linear_k_adapter_list", "k_slot", ("both", "q"), "adapted"),
    *_build_adapter_rows("self_attn.linear_v_adapter_list", "v_slot", ("both", "q"), "adapted"),
    Row(f"{_SHARED_BLOCK_PREFIX}.feed_forward.gate_up_proj.weight", "ffn+ffn hidden"),
    Row(f"{_SHARED_BLOCK_PREFIX}.feed_forward.gate_up_proj.bias", "ffn+ffn", "mixer_bias"),
    Row(f"{_SHARED_BLOCK_PREFIX}.feed_forward.down_proj.weight", "hidden ffn"),
    Row(f"{_SHARED_BLOCK_PREFIX}.feed_forward.down_proj.bias", "hidden", "mixer_bias"),
    *_build_adapter_rows("feed_forward.gate_up_proj_adapter_list", "ffn_slot", ("hidden", "ffn+ffn")),
    Row(f"{_SHARED_BLOCK_PREFIX}.input_layernorm.weight", "both"),
    Row(f"{_SHARED_BLOCK_PREFIX}.pre_ff_layernorm.weight", "hidden"),
)
_ADAPTER_INDEX_NAMES: Final = ("q_slot", "k_slot", "v_slot", "ffn_slot")


def _build_layer_rows() -> Iterator[Row]:
    yield from build_mixer2_rows(f"{LAYER}.mamba", "!hybrid")
    yield Row(f"{LAYER}.input_layernorm.weight", "hidden", "!hybrid")
    yield Row(f"{LAYER}.linear.weight", "hidden hidden", "hybrid")
    yield from build_mixer2_rows(f"{LAYER}.mamba_decoder.mamba", "hybrid")
    yield Row(f"{LAYER}.mamba_decoder.input_layernorm.weight", "hidden", "hybrid")
    for row in _SHARED_BLOCK_ROWS:
        yield replace(row, when=f"hybrid {row.when}".strip(), tie=row.name, tied="shared")


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    sizes = {"intermediate_size": config.size("intermediate_size", 4 * hidden), "head_dim": 2 * hidden // heads}
    facts = build_decoder_facts(replace(config, values={**config.values, **sizes}), tied=True)
    kinds = config.entries("layers_block_type")
    hybrid = (
        [n for n, kind in enumerate(kinds) if kind == "hybrid"] if kinds is not None else list(_DEFAULT_HYBRID_LAYERS)
    )
    blocks = config.size("num_mem_blocks", 1)
    slots = {layer: range(place % blocks, len(hybrid), blocks) for place, layer in enumerate(hybrid)}
    adapters = RowIndex(range(len(hybrid)), within=slots)
    mixers = config.size("n_mamba_heads", 8)
    return facts.extend_dims(
        dims={
            "both": LogicalDim(2 * hidden),
            "adapter": LogicalDim(config.size("adapter_rank", 128)),
            **build_mixer2_dims(
                mixers,
                config.size("mamba_expand", 2) * hidden // mixers,
                state=config.size("mamba_d_state", 64),
                groups=config.size("mamba_ngroups", 1),
                window=config.size("mamba_d_conv", 4),
                chunk=config.size("chunk_size", 256),
            ),
        },
        indices={
            "layer": RowIndex(range(54 if kinds is None else len(kinds)), layer=0),
            **dict.fromkeys(_ADAPTER_INDEX_NAMES, adapters),
        },
        flags={
            "hybrid": frozenset(hybrid),
            "shared": {layer: hybrid[place % blocks] for place, layer in enumerate(hybrid) if place >= blocks},
            "adapted": config.read_flag("use_shared_attention_adapter", default=False),
            "conv_bias": config.read_flag("use_conv_bias", default=True),
            "mixer_bias": config.read_flag("add_bias_linear", default=False),
        },
    )


_EXTRA_SAVED_ACTIVATIONS: Final = (
    FurtherTensor("fp32 copies of the embedding that is normed beside the input", "hidden", width=4, when="hybrid"),
    FurtherTensor("the same normed, before the weight", "hidden", when="hybrid"),
    FurtherTensor("the same, of the input of attention", "hidden", when="hybrid"),
    FurtherTensor("what the block makes, before its last matrix", "hidden", when="hybrid"),
    FurtherTensor("input of the layer of Mamba 2 behind the block", "hidden", when="hybrid"),
    FurtherTensor("latents of the MLP's adapter", dims="adapter", when="hybrid"),
    FurtherTensor("latents of the adapter of queries", dims="adapter", when="hybrid adapted"),
    FurtherTensor("latents of the adapter of keys", dims="adapter", when="hybrid adapted"),
    FurtherTensor("latents of the adapter of values", dims="adapter", when="hybrid adapted"),
)
ZAMBA2: Final = Family(
    name="zamba2",
    rows=(
        *EMBEDDING,
        *_build_layer_rows(),
        Row(".final_layernorm.weight", "hidden", on="last"),
        *(row for row in HEADS if row.when in {"lm", "score"}),
    ),
    facts=_build_facts,
    classes={
        "Zamba2ForCausalLM": ModelClass("model", "lm"),
        "Zamba2Model": ModelClass(),
        "Zamba2ForSequenceClassification": ModelClass("model", "score"),
    },
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "gelu"), norm="rms", further=_EXTRA_SAVED_ACTIVATIONS),
    assumed={"vocab_size": 32000, "hidden_size": 2560, "num_hidden_layers": 54, "num_attention_heads": 32},
    aliases={"layer_types": "layers_block_type"},
)
