"""Describes state space models: Mamba, Falcon Mamba and Mamba 2.

Names and shapes follow transformers 5 (`models/mamba/modeling_mamba.py`, `models/mamba2/modeling_mamba2.py`). The
cuts are those of Megatron-LM and vLLM: tp divides the channels of the inner width, each with its own convolution,
its rows of A, D and the time step; what all channels share (B, C, the time step's low rank) is computed by summing
over the ranks, and dims of the state, of the low rank and of the convolution's window are never cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.tables.config import ModelConfig


def build_mixer_rows(under: str, when: str = "") -> tuple[Row, ...]:
    """Build the first Mamba's rows in a module `under`, present if `when` holds."""
    conv, bias = f"{when} conv_bias".strip(), f"{when} mixer_bias".strip()
    return (
        Row(f"{under}.A_log", "inner state", when),
        Row(f"{under}.D", "inner", when),
        Row(f"{under}.conv1d.weight", "inner 1 window", when),
        Row(f"{under}.conv1d.bias", "inner", conv),
        Row(f"{under}.in_proj.weight", "inner+inner hidden", when),
        Row(f"{under}.in_proj.bias", "inner+inner", bias),
        Row(f"{under}.x_proj.weight", "rank+state+state inner", when),
        Row(f"{under}.dt_proj.weight", "inner rank", when),
        Row(f"{under}.dt_proj.bias", "inner", when),
        Row(f"{under}.out_proj.weight", "hidden inner", when),
        Row(f"{under}.out_proj.bias", "hidden", bias),
    )


_IN_PROJ_DIMS: Final = "inner+inner+groups+groups+heads"
"""What the input is projected to: the gate, the channels, B, C, and a time step for each head."""
_CONV1D_DIMS: Final = "inner+groups+groups"


def build_mixer2_rows(under: str, when: str = "", *, norm: str = "") -> tuple[Row, ...]:
    """The second Mamba's rows in a module `under`, present if `when` holds, and its norm if `norm` holds as well.

    Heads share the B and C of their group, as query heads share keys and values. The norm before the last projection is
    over the channels of one group; where ranks are more than groups, they sum its variance.
    """
    conv, bias = f"{when} conv_bias".strip(), f"{when} mixer_bias".strip()
    return (
        Row(f"{under}.dt_bias", "heads", when),
        Row(f"{under}.A_log", "heads", when),
        Row(f"{under}.D", "heads", when),
        Row(f"{under}.conv1d.weight", f"{_CONV1D_DIMS} 1 window", when),
        Row(f"{under}.conv1d.bias", _CONV1D_DIMS, conv),
        Row(f"{under}.in_proj.weight", f"{_IN_PROJ_DIMS} hidden", when),
        Row(f"{under}.in_proj.bias", _IN_PROJ_DIMS, bias),
        Row(f"{under}.norm.weight", "inner", f"{when} {norm}".strip()),
        Row(f"{under}.out_proj.weight", "hidden inner", when),
        Row(f"{under}.out_proj.bias", "hidden", bias),
    )


def build_mixer2_dims(
    heads: int, head: int, *, state: int, groups: int, window: int, chunk: int
) -> Mapping[str, LogicalDim]:
    """The dims of those rows: `heads` of `head` channels, and `groups` that share a B and a C of `state` elements."""
    return {
        "inner": LogicalDim(heads * head, head, "tp", noun="state space heads"),
        "heads": LogicalDim(heads, axis="tp", noun="state space heads"),
        "groups": LogicalDim(groups * state, state, "tp", shared=True, noun="key/query groups (B and C)"),
        "window": LogicalDim(window),
        "chunk": LogicalDim(chunk),
    }


def compute_time_step_rank(config: ModelConfig, key: str) -> int:
    """Compute the low rank of the time step; "auto" is a sixteenth of the hidden size, rounded up."""
    automatic = -(-config.size("hidden_size") // 16)
    return automatic if config.values.get(key) == "auto" else config.size(key, automatic)


_EMBEDDING_ROW: Final = Row(".embeddings.weight", "vocab hidden", on="first")
_NORM_ROW: Final = Row(".layers.{layer}.norm.weight", "hidden")
_HEAD_ROWS: Final = (
    Row(".norm_f.weight", "hidden", on="last"),
    Row("lm_head.weight", "vocab hidden", when="lm", on="last", tie=".embeddings.weight"),
)
_MAMBA_ROWS: Final = (_EMBEDDING_ROW, _NORM_ROW, *build_mixer_rows(".layers.{layer}.mixer"), *_HEAD_ROWS)
_MAMBA2_ROWS: Final = (
    _EMBEDDING_ROW,
    _NORM_ROW,
    *build_mixer2_rows(".layers.{layer}.mixer"),
    *_HEAD_ROWS,
)


def _build_common_facts(config: ModelConfig, *, tied: bool) -> ModelDims:
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "hidden": LogicalDim(config.size("hidden_size")),
            "window": LogicalDim(config.size("conv_kernel", 4)),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers")), layer=0)},
        flags={
            "tied": config.read_flag("tie_word_embeddings", default=tied),
            "conv_bias": config.read_flag("use_conv_bias", default=True),
            "mixer_bias": config.read_flag("use_bias", default=False),
        },
    )


def _build_mamba_facts(config: ModelConfig) -> ModelDims:
    """The width that a config says itself goes before that which `expand` gives (falcon-mamba-7b has both)."""
    inner = config.size("intermediate_size", config.size("expand", 2) * config.size("hidden_size"))
    return _build_common_facts(config, tied=True).extend_dims(
        dims={
            "inner": LogicalDim(inner, axis="tp", noun="channels"),
            "state": LogicalDim(config.size("state_size", 16)),
            "rank": LogicalDim(compute_time_step_rank(config, "time_step_rank")),
        }
    )


def _build_mamba2_facts(config: ModelConfig) -> ModelDims:
    return _build_common_facts(config, tied=False).extend_dims(
        dims=build_mixer2_dims(
            config.size("num_heads", 128),
            config.size("head_dim", 64),
            state=config.size("state_size", 128),
            groups=config.size("n_groups", 8),
            window=config.size("conv_kernel", 4),
            chunk=config.size("chunk_size", 256),
        )
    )


_LAYER_FEATURES: Final = LayerFeatures(
    activation=("hidden_act", "silu"), norm="rms", fp32_sums=("residual_in_fp32", True)
)
MAMBA: Final = Family(
    name="mamba",
    rows=_MAMBA_ROWS,
    facts=_build_mamba_facts,
    classes={"MambaForCausalLM": ModelClass("backbone", "lm"), "MambaModel": ModelClass()},
    prefixes=("backbone",),
    traits=_LAYER_FEATURES,
    assumed={"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32},
)
FALCON_MAMBA: Final = Family(
    name="falcon_mamba",
    rows=_MAMBA_ROWS,
    facts=_build_mamba_facts,
    classes={"FalconMambaForCausalLM": ModelClass("backbone", "lm"), "FalconMambaModel": ModelClass()},
    prefixes=("backbone",),
    traits=_LAYER_FEATURES,
    assumed={"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32},
)
MAMBA2: Final = Family(
    name="mamba2",
    rows=_MAMBA2_ROWS,
    facts=_build_mamba2_facts,
    classes={"Mamba2ForCausalLM": ModelClass("backbone", "lm"), "Mamba2Model": ModelClass()},
    prefixes=("backbone",),
    traits=_LAYER_FEATURES,
    assumed={"vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64},
)
