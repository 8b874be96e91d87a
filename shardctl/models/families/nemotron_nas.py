"""Describes Nemotron-NAS (DeciLM): Llama's names, where a search chose for each layer what it has and how wide it is.

The classes are the Hub's own (`modeling_decilm.py`); names and shapes are those of vLLM's modules (`nemotron_nas.py`):
a layer may lack attention with the norm before it, or the MLP with its.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.tables.decoder import EMBEDDING, GATED, HEADS, LAST_NORM, NORMS, QKVO, build_decoder_facts
from shardctl.models.tables.experts import add_condition
from shardctl.models.tables.family import Family, LogicalDim, ModelClass
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_MAX_MLP_WIDTHS: Final = 32
"""The most widths of MLPs that one model may have; the released ones have up to a dozen."""
_MLP_WIDTH_MULTIPLE: Final = 256
_UNSUPPORTED_BLOCK_KEYS: Final = (
    "replace_with_linear",
    "sparsify",
    "num_sink_tokens",
    "window_length",
    "unshifted_sink",
)
_RULES_FILE_HINT: Final = "say how such tensors are cut with --rules FILE"
_MLP_ROWS: Final = tuple(
    replace(row, dims=row.dims.replace("ffn", f"ffn_{n}"), when=f"{row.when} width_{n}".strip())
    for n in range(_MAX_MLP_WIDTHS)
    for row in GATED
)


def _build_facts(config: ModelConfig) -> ModelDims:
    blocks = _list_blocks(config)
    groups = {_read_group(config, n, block) for n, (block, _) in enumerate(blocks) if not _is_absent(block)}
    if len(groups) > 1:
        raise UnsupportedError(
            f"config.json gives layers {sorted(groups)} query heads for each key/value head; one number is known",
            hint=_RULES_FILE_HINT,
        )
    heads = config.size("num_attention_heads")
    widths = [0 if _is_absent(ffn) else _compute_width(config, ffn) for _, ffn in blocks]
    known = sorted({*widths} - {0})
    if len(known) > _MAX_MLP_WIDTHS:
        raise UnsupportedError(
            f"config.json has MLPs of {len(known)} widths; {_MAX_MLP_WIDTHS} are known", hint=_RULES_FILE_HINT
        )
    bias = config.read_flag("attention_bias", default=False)
    values = {"num_key_value_heads": heads // max(groups, default=1), "intermediate_size": max(known, default=1)}
    facts = build_decoder_facts(
        replace(config, values={**config.values, **values}),
        qkv_bias=config.read_flag("qkv_bias", default=bias),
        o_bias=bias,
        mlp_bias=config.read_flag("mlp_bias", default=False),
    )
    return facts.extend_dims(
        dims={f"ffn_{n}": LogicalDim(width, axis="tp") for n, width in enumerate(known)},
        flags={
            "attention": frozenset(n for n, (attention, _) in enumerate(blocks) if not _is_absent(attention)),
            "mlp": frozenset(n for n, width in enumerate(widths) if width),
            **dict.fromkeys((f"width_{n}" for n in range(_MAX_MLP_WIDTHS)), False),
            **{
                f"width_{n}": frozenset(at for at, width in enumerate(widths) if width == one)
                for n, one in enumerate(known)
            },
        },
    )


def _list_blocks(config: ModelConfig) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """List what the config says of attention and MLP of each layer.

    Raises SourceError if it does not say both of each, UnsupportedError for parts that are no attention and no MLP.
    """
    blocks, layers = config.values.get("block_configs"), config.size("num_hidden_layers")
    if not isinstance(blocks, list) or len(blocks) != layers:
        raise SourceError(f"config.json has block_configs that do not speak of {layers} layers")
    found = []
    for n, block in enumerate(blocks):
        attention, ffn = (block.get(key) if isinstance(block, dict) else None for key in ("attention", "ffn"))
        if not isinstance(attention, dict) or not isinstance(ffn, dict):
            raise SourceError(f"config.json does not say attention and ffn of layer {n} in block_configs")
        odd = next((key for part in (attention, ffn) for key in _UNSUPPORTED_BLOCK_KEYS if part.get(key)), None)
        if odd is not None:
            raise UnsupportedError(f"config.json has {odd} in layer {n}, which is not known", hint=_RULES_FILE_HINT)
        if _is_absent(attention) and _is_absent(ffn):
            raise UnsupportedError(f"config.json has a layer {n} with neither attention nor MLP", hint=_RULES_FILE_HINT)
        found.append((attention, ffn))
    return found


def _is_absent(part: dict[str, Any]) -> bool:
    return bool(part.get("no_op"))


def _read_group(config: ModelConfig, layer: int, attention: dict[str, Any]) -> int:
    """Read how many query heads share a key/value head; raises SourceError for a number that does not divide them."""
    group, heads = replace(config, values=attention).size("n_heads_in_group"), config.size("num_attention_heads")
    if heads % group:
        raise SourceError(f"config.json has n_heads_in_group = {group} in layer {layer}, for {heads} attention heads")
    return group


def _compute_width(config: ModelConfig, ffn: dict[str, Any]) -> int:
    """Compute the columns of an MLP, as vLLM rounds them; raises SourceError if the config does not say them."""
    share = ffn.get("ffn_mult")
    if share is None:
        return replace(config, values=ffn).size("intermediate_size")
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < config.size("hidden_size"):
        raise SourceError(f"config.json has ffn_mult = {share!r} where a positive number is expected")
    return -(-int(2 * share * config.size("hidden_size") / 3) // _MLP_WIDTH_MULTIPLE) * _MLP_WIDTH_MULTIPLE


NEMOTRON_NAS: Final = Family(
    name="nemotron-nas",
    rows=(
        *EMBEDDING,
        *add_condition(QKVO, "attention"),
        *_MLP_ROWS,
        *add_condition(NORMS[:1], "attention"),
        *add_condition(NORMS[1:], "mlp"),
        *LAST_NORM,
        *(row for row in HEADS if row.when in ("", "lm")),
    ),
    facts=_build_facts,
    classes={"DeciLMForCausalLM": ModelClass("model", "lm"), "DeciLMModel": ModelClass()},
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", alone=True),
)
