"""Names the model families and their files, each of which contains everything that is said of one family or a few.

A file is loaded when one of its families is asked for: a command needs one or two of them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Final

from shardctl.models.tables.family import Family

FAMILY_FILES: Final = {
    "afmoe": ("afmoe",),
    "albert": ("albert",),
    "apertus": ("apertus",),
    "arcee": ("arcee",),
    "bailing": ("bailing_hybrid",),
    "bamba": ("bamba", "falcon_h1", "granitemoehybrid"),
    "bart": ("bart", "m2m_100", "marian", "mbart", "pegasus", "whisper"),
    "bert": ("bert",),
    "big_bird": ("big_bird",),
    "bitnet": ("bitnet",),
    "bloom": ("bloom",),
    "clip": ("clip", "clip_text_model", "clip_vision_model", "siglip"),
    "cohere": ("cohere", "cohere2"),
    "dbrx": ("dbrx",),
    "deberta": ("deberta", "deberta-v2"),
    "deepseek": ("deepseek", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"),
    "deepseek_sparse": ("deepseek_v32", "glm_moe_dsa"),
    "deepseek_v4": ("deepseek_v4",),
    "distilbert": ("distilbert",),
    "dots": ("dots1",),
    "electra": ("electra",),
    "ernie": ("ernie4_5",),
    "ernie_moe": ("ernie4_5_moe",),
    "ernie_vision": ("ernie4_5_vl_moe",),
    "eurobert": ("eurobert",),
    "exaone": ("exaone4", "exaone_moe"),
    "falcon": ("falcon",),
    "gemma": ("gemma", "gemma2", "gemma3_text", "vaultgemma"),
    "gemma3n": ("gemma3n_text",),
    "gemma4": (
        "gemma4",
        "gemma4_assistant",
        "gemma4_text",
        "gemma4_unified",
        "gemma4_unified_assistant",
        "gemma4_unified_text",
    ),
    "glm": ("glm", "glm4"),
    "glm5_next": ("glm5_next",),
    "gpt2": ("gpt2",),
    "gpt_bigcode": ("gpt_bigcode",),
    "gpt_neo": ("gpt_neo",),
    "gpt_neox": ("gpt_neox",),
    "gpt_oss": ("gpt_oss",),
    "gptj": ("gptj",),
    "granite": ("granite", "hyperclovax"),
    "granite_moe": ("granitemoe", "granitemoeshared"),
    "hunyuan": ("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3"),
    "hunyuan_v4": ("hy_v4",),
    "jamba": ("jamba",),
    "jetmoe": ("jetmoe",),
    "kimi": ("kimi_k3", "kimi_k25"),
    "kimi_linear": ("kimi_linear",),
    "lfm2": ("lfm2", "lfm2_moe"),
    "llama": ("cwm", "helium", "llama"),
    "llama4": ("llama4", "llama4_text"),
    "longcat": ("longcat_flash",),
    "mamba": ("falcon_mamba", "mamba", "mamba2"),
    "mimo": ("mimo", "mimo_v2_flash"),
    "minimax": ("minimax_m2",),
    "minimax_m3": ("minimax_m3_vl", "minimax_m3_vl_text"),
    "mistral": ("ministral", "ministral3", "mistral"),
    "mistral4": ("mistral4",),
    "mistral_large4": ("mistral_large4",),
    "mixtral": ("mixtral", "phimoe"),
    "mllama": ("mllama", "mllama_text_model"),
    "modernbert": ("modernbert", "modernbert-decoder"),
    "mpnet": ("mpnet",),
    "mpt": ("mpt",),
    "nemotron": ("nemotron",),
    "nemotron_h": ("nemotron_h",),
    "nemotron_nas": ("nemotron-nas",),
    "olmo": ("olmo", "olmo2", "olmo3"),
    "olmo_hybrid": ("olmo_hybrid",),
    "opt": ("opt",),
    "persimmon": ("persimmon",),
    "phi": ("phi", "phi3"),
    "qwen": ("qwen2", "qwen3"),
    "qwen3_5": ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
    "qwen3_next": ("qwen3_next",),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl_moe"),
    "qwen4_exp": ("qwen4_exp", "qwen4_exp_text"),
    "qwen_moe": ("flex_olmo", "olmoe", "qwen2_moe", "qwen3_moe"),
    "recurrent_gemma": ("recurrent_gemma",),
    "roberta": ("camembert", "roberta", "xlm-roberta"),
    "roberta_prenorm": ("roberta-prelayernorm", "xlm-roberta-xl"),
    "rotary_encoders": ("gte", "jina_embeddings_v3", "nomic_bert"),
    "seed_oss": ("seed_oss",),
    "smollm": ("smollm3",),
    "solar_open": ("solar_open",),
    "stablelm": ("stablelm",),
    "starcoder2": ("starcoder2",),
    "step": ("step3p5",),
    "step_vision": ("step3p7",),
    "t5": ("longt5", "mt5", "t5", "umt5"),
    "vision_language": ("gemma3", "llava", "llava_next", "mistral3", "paligemma", "qwen2_5_vl", "qwen2_vl"),
    "vit": ("vit",),
    "voxtral": ("voxtral", "voxtral_realtime"),
    "zamba2": ("zamba2",),
}
"""The names of the families in each file; to add one, write its file and name it here."""
_FILE_OF: Final = {name: file for file, names in FAMILY_FILES.items() for name in names}


@cache
def load_family(name: str) -> Family | None:
    """Load the family of a `model_type`; None if there is none.

    >>> load_family("llama").name
    'llama'
    """
    file = _FILE_OF.get(name)
    if file is None:
        return None
    public = (each for key, each in vars(import_module(f"{__name__}.{file}")).items() if not key.startswith("_"))
    return next(each for each in public if isinstance(each, Family) and each.name == name)


@cache
def load_families() -> tuple[Family, ...]:
    """Load every family, by name."""
    return tuple(family for name in sorted(_FILE_OF) if (family := load_family(name)) is not None)
