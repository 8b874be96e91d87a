"""Describes Nemotron-H and Nemotron 3: each layer is one of Mamba 2, attention, an MLP, or experts, behind one norm.

Names and shapes follow transformers 5 (`models/nemotron_h/modeling_nemotron_h.py`); on the Hub the base model is called
`backbone`. No MLP has a gate. Routed experts of the larger models read and write a latent, which one projection makes
and another unfolds, both whole on every tp rank. The layers that predict further tokens, `mtp.layers`, are on the Hub
only (vLLM's `models/nemotron_h_mtp.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.families.mamba import build_mixer2_dims, build_mixer2_rows
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.decoder import build_decoder_facts
from shardctl.models.tables.experts import add_expert_facts, build_predicting_ends, build_predicting_rows
from shardctl.models.tables.family import Family, FusedArray, LogicalDim, ModelClass, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.family import ModelDims

_LAYER_PREFIX: Final = ".layers.{layer}"
_MIXER_PREFIX: Final = f"{_LAYER_PREFIX}.mixer"
_EXPERT_PREFIX: Final = f"{_MIXER_PREFIX}.experts.{{expert}}"
_NORM_ROW: Final = Row(f"{_LAYER_PREFIX}.norm.weight", "hidden")
_ATTENTION_ROWS: Final = (
    Row(f"{_MIXER_PREFIX}.q_proj.weight", "q hidden", "attention"),
    Row(f"{_MIXER_PREFIX}.k_proj.weight", "kv hidden", "attention"),
    Row(f"{_MIXER_PREFIX}.v_proj.weight", "kv hidden", "attention"),
    Row(f"{_MIXER_PREFIX}.o_proj.weight", "hidden q", "attention"),
)
_MOE_ROWS: Final = (
    Row(f"{_EXPERT_PREFIX}.up_proj.weight", "effn routed", "moe"),
    Row(f"{_EXPERT_PREFIX}.down_proj.weight", "routed effn", "moe"),
    Row(f"{_MIXER_PREFIX}.gate.weight", "experts hidden", "moe"),
    Row(f"{_MIXER_PREFIX}.gate.e_score_correction_bias", "experts", "moe", dtype="F32"),
    Row(f"{_MIXER_PREFIX}.shared_experts.up_proj.weight", "sffn hidden", "moe shared"),
    Row(f"{_MIXER_PREFIX}.shared_experts.up_proj.bias", "sffn", "moe shared mlp_bias"),
    Row(f"{_MIXER_PREFIX}.shared_experts.down_proj.weight", "hidden sffn", "moe shared"),
    Row(f"{_MIXER_PREFIX}.shared_experts.down_proj.bias", "hidden", "moe shared mlp_bias"),
    Row(f"{_MIXER_PREFIX}.fc1_latent_proj.weight", "routed hidden", "moe latent"),
    Row(f"{_MIXER_PREFIX}.fc1_latent_proj.bias", "routed", "moe latent mlp_bias"),
    Row(f"{_MIXER_PREFIX}.fc2_latent_proj.weight", "hidden routed", "moe latent"),
    Row(f"{_MIXER_PREFIX}.fc2_latent_proj.bias", "hidden", "moe latent mlp_bias"),
)
_MLP_ROWS: Final = (
    Row(f"{_MIXER_PREFIX}.up_proj.weight", "ffn hidden", "mlp"),
    Row(f"{_MIXER_PREFIX}.up_proj.bias", "ffn", "mlp mlp_bias"),
    Row(f"{_MIXER_PREFIX}.down_proj.weight", "hidden ffn", "mlp"),
    Row(f"{_MIXER_PREFIX}.down_proj.bias", "hidden", "mlp mlp_bias"),
)


def _build_next_rows() -> tuple[Row, ...]:
    """The layers that predict: each of one kind, the first joins two streams, and the last has a norm of its own."""
    first, last, layer = "mtp.layers.{next_first}", "mtp.layers.{next_last}", "mtp.layers.%s"
    return (
        *build_predicting_ends(first, {"enorm": "hidden", "hnorm": "hidden", "eh_proj": "hidden hidden+hidden"}),
        *build_predicting_rows((_NORM_ROW, *_ATTENTION_ROWS), layer % "{next_attention}", "attention"),
        *build_predicting_rows((_NORM_ROW, *_MOE_ROWS), layer % "{next_moe}", "moe shared"),
        *build_predicting_ends(last, {"final_layernorm": "hidden"}),
    )


_NEMOTRON_H: Final = (
    Row(".embeddings.weight", "vocab hidden", on="first"),
    _NORM_ROW,
    *build_mixer2_rows(_MIXER_PREFIX, "mamba"),
    *_ATTENTION_ROWS,
    *_MLP_ROWS,
    *_MOE_ROWS,
    Row(".norm_f.weight", "hidden", on="last"),
    Row("lm_head.weight", "vocab hidden", when="lm", on="last"),
    *_build_next_rows(),
)
_LAYER_TYPES_BY_LETTER: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""What `hybrid_override_pattern` calls the kinds of layers."""
_LAYER_TYPES_BY_NAME: Final = {"linear_attention": "mamba", "full_attention": "attention"} | {
    kind: kind for kind in _LAYER_TYPES_BY_LETTER.values()
}
"""What lists of them do, today and formerly."""


def _list_kinds(config: ModelConfig, listed: str, pattern: str, usual: list[str]) -> list[str]:
    """The kind of each layer, from a list or the pattern of letters; raises SourceError for one that is not known."""
    said = config.entries(listed)
    letters = config.text(pattern, "")
    if said is None:
        said = [_LAYER_TYPES_BY_LETTER.get(letter, letter) for letter in letters] if letters else usual
    odd = [kind for kind in said if kind not in _LAYER_TYPES_BY_NAME]
    if odd:
        raise SourceError(f"config.json has layers of type {odd[0]!r}; the types are {', '.join(_LAYER_TYPES_BY_NAME)}")
    return [_LAYER_TYPES_BY_NAME[kind] for kind in said]


def _build_facts(config: ModelConfig) -> ModelDims:
    kinds = _list_kinds(config, "layers_block_type", "hybrid_override_pattern", ["mamba", "moe", "attention", "mlp"])
    following = _list_kinds(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern", ["attention", "moe"])
    following *= config.count("num_nextn_predict_layers", 0)
    facts = build_decoder_facts(
        ModelConfig({**config.values, "num_hidden_layers": len(kinds)}),
        head_dim=128,
        kv_heads=8,
        mlp_bias=config.read_flag("mlp_bias", default=False),
    )
    at = {kind: [n for n, one in enumerate(kinds) if one == kind] for kind in _LAYER_TYPES_BY_LETTER.values()}
    latent = config.values.get("moe_latent_size") is not None
    return add_expert_facts(
        facts,
        config.size("n_routed_experts", 8),
        config.size("moe_intermediate_size", 7688),
        moe=at["moe"],
        shared=config.size("moe_shared_expert_intermediate_size", 7688),
    ).extend_dims(
        dims={
            **build_mixer2_dims(
                config.size("mamba_num_heads", 128),
                config.size("mamba_head_dim", 64),
                state=config.size("ssm_state_size", 128),
                groups=config.size("n_groups", 8),
                window=config.size("conv_kernel", 4),
                chunk=config.size("chunk_size", 128),
            ),
            "routed": LogicalDim(config.size("moe_latent_size", facts.size("hidden"))),
        },
        indices={
            "next_first": RowIndex(range(0, len(following), max(len(following), 1))),
            "next_last": RowIndex(range(len(following))[-1:]),
            **{f"next_{k}": RowIndex([n for n, one in enumerate(following) if one == k]) for k in ("attention", "moe")},
        },
        flags={
            **{kind: numbers for kind, numbers in at.items() if kind != "moe"},
            "latent": latent,
            "conv_bias": config.read_flag("use_conv_bias", default=True),
            "mixer_bias": config.read_flag("use_bias", default=False),
        },
    )


NEMOTRON_H: Final = Family(
    name="nemotron_h",
    rows=_NEMOTRON_H,
    facts=_build_facts,
    classes={"NemotronHForCausalLM": ModelClass("model", "lm"), "NemotronHModel": ModelClass()},
    prefixes=("model", "backbone"),
    fused=(
        FusedArray(f"{_MIXER_PREFIX}.experts.up_proj", (f"{_EXPERT_PREFIX}.up_proj.weight",)),
        FusedArray(f"{_MIXER_PREFIX}.experts.down_proj", (f"{_EXPERT_PREFIX}.down_proj.weight",)),
    ),
    traits=LayerFeatures(
        activation=("mlp_hidden_act", "relu2"),
        norm="rms32",
        dropout=("hidden_dropout", 0.0),
        window=WindowRule(None, "none"),
        experts_per_token=2,
        alone=True,
        wide_router=True,
    ),
    assumed={"vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 21504},
    aliases={
        "layer_types": "layers_block_type",
        "num_local_experts": "n_routed_experts",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_chunk_size": "chunk_size",
    },
)
