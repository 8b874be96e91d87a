"""Describes DeepSeek-V3.2 and GLM-5: latent attention to the tokens that an indexer chooses, and experts as in V3.

Names and shapes follow the Hub (`models/deepseek_v32/modeling_deepseek_v32.py`, and its namesake `glm_moe_dsa`). The
indexer is small, and whole on every tp rank, as in vLLM. In GLM-5.2 some layers take over the choice of the layer
before: transformers gives them no indexer, but the files may have one (vLLM, `deepseek_v2.py`, `load_weights`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.families.deepseek import BALANCED_EXPERTS, add_balanced_facts, build_balanced_rows
from shardctl.models.tables.decoder import LAYER, NORMS, assume_sizes
from shardctl.models.tables.experts import build_fused_experts, list_sparse_layers
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row
from shardctl.models.tables.latent_attention import LATENT, build_latent_facts
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

INDEXER: Final = (
    Row(f"{LAYER}.self_attn.indexer.wq_b.weight", "index_q q_rank", needed="indexer"),
    Row(f"{LAYER}.self_attn.indexer.wk.weight", "index hidden", needed="indexer"),
    Row(f"{LAYER}.self_attn.indexer.k_norm.weight", "index", needed="indexer"),
    Row(f"{LAYER}.self_attn.indexer.k_norm.bias", "index", needed="indexer"),
    Row(f"{LAYER}.self_attn.indexer.weights_proj.weight", "index_heads hidden", needed="indexer"),
)
"""What scores earlier tokens for each query, with one key for all its heads (DeepSeek sparse attention)."""
_INDEXER_TYPES_BY_LETTER: Final = {"F": "full", "S": "shared"}


def build_indexer_facts(config: ModelConfig, *, heads: int, indexer: bool | Collection[int] = True) -> ModelDims:
    """Build the facts of a decoder with latent attention and, in the layers `indexer`, an indexer of `heads`."""
    count, width = config.size("index_n_heads", heads), config.size("index_head_dim", 128)
    return build_latent_facts(config, mlp_bias=False).extend_dims(
        dims={
            "index": LogicalDim(width),
            "index_q": LogicalDim(count * width),
            "index_heads": LogicalDim(count),
            "chosen": LogicalDim(config.size("index_topk", 2048)),
        },
        flags={"indexer": indexer},
    )


def _build_v32_facts(config: ModelConfig) -> ModelDims:
    facts = build_indexer_facts(config, heads=64)
    return add_balanced_facts(facts, config, moe=list_sparse_layers(config, 3), following=1)


def _build_glm_facts(config: ModelConfig) -> ModelDims:
    facts = build_indexer_facts(
        config.over({"q_lora_rank": 2048, "v_head_dim": 256, "qk_nope_head_dim": 192}),
        heads=32,
        indexer=list_indexer_layers(config),
    )
    return add_balanced_facts(facts, config, moe=list_sparse_layers(config, 3), following=1)


def list_indexer_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers that choose tokens themselves, as `GlmMoeDsaConfig` finds them; raises SourceError for others."""
    layers = config.size("num_hidden_layers")
    pattern = config.values.get("index_topk_pattern")
    kinds = config.entries("indexer_types") or (
        pattern if isinstance(pattern, str) else config.entries("index_topk_pattern")
    )
    if kinds is None:
        period, offset = max(config.count("index_topk_freq", 1), 1), config.count("index_skip_topk_offset", 2)
        return frozenset(n for n in range(layers) if max(n - offset + 1, 0) % period == 0)
    said = [_INDEXER_TYPES_BY_LETTER.get(kind, kind) for kind in kinds]
    if len(said) != layers or not {"full", "shared"}.issuperset(said):
        raise SourceError(f"config.json has {kinds!r} where {layers} entries, full or shared, are expected")
    return frozenset(n for n, kind in enumerate(said) if kind == "full")


_LAYER_ROWS: Final = (*LATENT, *INDEXER, *BALANCED_EXPERTS, *NORMS)
_MODEL_ROWS: Final = build_balanced_rows(_LAYER_ROWS, "moe shared indexer")
_CONFIG_KEY_ALIASES: Final = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
_EXPERT_CONFIG_DEFAULTS: Final = {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1}
_LAYER_FEATURES: Final = LayerFeatures(
    activation=("hidden_act", "silu"),
    norm="rms",
    experts_per_token=8,
    wide_router=True,
    further=(FurtherTensor("the mask of tokens that an indexer chose", "pairs", width=1, given=("fused",)),),
)
DEEPSEEK_V32: Final = Family(
    name="deepseek_v32",
    rows=_MODEL_ROWS,
    facts=_build_v32_facts,
    classes={"DeepseekV32ForCausalLM": ModelClass("model", "lm"), "DeepseekV32Model": ModelClass()},
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=_LAYER_FEATURES,
    aliases=_CONFIG_KEY_ALIASES,
    assumed={**assume_sizes(129280, 7168, 18432, 61, 128), **_EXPERT_CONFIG_DEFAULTS},
)
GLM_MOE_DSA: Final = Family(
    name="glm_moe_dsa",
    rows=_MODEL_ROWS,
    facts=_build_glm_facts,
    classes={"GlmMoeDsaForCausalLM": ModelClass("model", "lm"), "GlmMoeDsaModel": ModelClass()},
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=_LAYER_FEATURES,
    aliases=_CONFIG_KEY_ALIASES,
    assumed={**assume_sizes(154880, 6144, 12288, 78, 64), **_EXPERT_CONFIG_DEFAULTS},
)
