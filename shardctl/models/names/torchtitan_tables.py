"""Lists what torchtitan calls the parts of models, and which of them it divides.

Names are those of torchtitan 0.3.0: of its modules (`models/*/model.py`, `models/common/`), which its runs save and
load, and of its state dict adapters (`models/*/state_dict_adapter.py`). Of gpt-oss the adapter has older names for
experts than the module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

EMBEDDING: Final = "tok_embeddings.weight"
ENDS: Final = {"model.embed_tokens.": "tok_embeddings.", "model.norm.": "norm.", "lm_head.": "lm_head."}
_DENSE_LAYER_MODULES: Final = {
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
}
JOINED: Final = "attention.qkv_linear"
"""The module of queries, keys and values: `wq`, `wk` and `wv` in its state dict, and one parameter, `wqkv`."""
_QKV_MODULES: Final = {f"self_attn.{part}_proj": f"{JOINED}.w{part}" for part in "qkv"}
ROUTED: Final = "moe.routed_experts.inner_experts"
EXPERTS: Final = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}
_ROUTER_MODULES: Final = {"mlp.gate": "moe.router.gate"}
_MLA_MODULES: Final = {
    **{f"self_attn.{part}": f"attention.{own}" for part, own in (("q_proj", "wq"), ("q_a_proj", "wq_a"))},
    **{f"self_attn.{part}": f"attention.{own}" for part, own in (("q_a_layernorm", "q_norm"), ("q_b_proj", "wq_b"))},
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    **{f"mlp.shared_experts.{part}": f"moe.shared_experts.{own[:2]}" for part, own in EXPERTS.items()},
}
_MTP_MODULES: Final = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "mtp_norm"}
_QK_NORMS: Final = {f"self_attn.{part}_norm": f"attention.{part}_norm" for part in "qk"}
_QWEN3_5_MODULES: Final = {
    **{key: part for key, part in _DENSE_LAYER_MODULES.items() if key != "self_attn.o_proj"},
    **{f"self_attn.{part}_proj": f"attn.w{part}" for part in "qkvo"},
    **{f"self_attn.{part}_norm": f"attn.{part}_norm" for part in "qk"},
    **{f"linear_attn.{part}": f"attn.{part}" for part in ("in_proj_z", "in_proj_a", "in_proj_b", "norm", "out_proj")},
    "mlp.gate": "moe.router.gate",
    **{f"mlp.shared_expert.{part}": f"moe.shared_experts.{own[:2]}" for part, own in EXPERTS.items()},
    "mlp.shared_expert_gate": "moe.shared_experts.gate",
}
PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "llama": {**_DENSE_LAYER_MODULES, **_QKV_MODULES},
    "qwen3": {**_DENSE_LAYER_MODULES, **_QKV_MODULES, **_QK_NORMS},
    "qwen3_moe": {**_DENSE_LAYER_MODULES, **_QKV_MODULES, **_QK_NORMS, **_ROUTER_MODULES},
    "gpt_oss": {**_DENSE_LAYER_MODULES, **_QKV_MODULES, "mlp.router": "moe.router.gate"},
    "deepseek_v3": {**_DENSE_LAYER_MODULES, **_MLA_MODULES, **_ROUTER_MODULES, **_MTP_MODULES},
    "kimi_k25": {**_DENSE_LAYER_MODULES, **_MLA_MODULES, **_ROUTER_MODULES},
    **{f"qwen3_5{kind}": _QWEN3_5_MODULES for kind in ("", "_moe", "_text", "_moe_text")},
}
"""By family: the modules of a layer, as transformers and as torchtitan call them."""
PLAIN: Final = {
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
    "linear_attn.A_log": "attn.A_log",
    "linear_attn.dt_bias": "attn.dt_bias",
    "self_attn.sinks": "attention.sinks",
    "mlp.experts.gate_up_proj": f"{ROUTED}.mlp1_weight_EGD",
    "mlp.experts.gate_up_proj_bias": f"{ROUTED}.mlp1_bias_EG",
    "mlp.experts.down_proj": f"{ROUTED}.mlp2_weight_EDF",
    "mlp.experts.down_proj_bias": f"{ROUTED}.mlp2_bias_ED",
}
TURNED: Final = ("mlp1_weight_EGD", "mlp2_weight_EDF")
"""Arrays of gpt-oss whose outputs come before inputs, as in its quantized files; in transformers inputs do."""
BALANCE: Final = "moe.expert_bias_E"
"""What a run adds to the scores of experts to balance them, one number for each; not trained by the optimizer."""
BALANCED: Final = frozenset({"qwen3_moe", "gpt_oss", "qwen3_5_moe", "qwen3_5_moe_text"})
"""Families whose classes in transformers have no place for that, though torchtitan's runs ask for it."""
ROUTERS: Final = ("mlp.gate.weight", "mlp.router.weight")
DIVIDED: Final = {
    "linear_attn.in_proj_qkv.weight": tuple(f"attn.in_proj_{part}.weight" for part in "qkv"),
    "linear_attn.conv1d.weight": tuple(f"attn.conv_{part}.weight" for part in "qkv"),
}
"""Whose rows are several arrays there, one for each section."""
SEEN: Final = {
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
PATCHES: Final = "vision_encoder.patch_embed.weight"
"""A convolution over patches, whose filters are rows there."""
