"""Describes the model families, one per file, which contains everything that is said of it."""

from typing import Final

from shardctl.models.families.afmoe import AFMOE
from shardctl.models.families.apertus import APERTUS
from shardctl.models.families.arcee import ARCEE
from shardctl.models.families.bamba import BAMBA, FALCON_H1, GRANITE_MOE_HYBRID
from shardctl.models.families.bart import BART, M2M_100, MBART, PEGASUS, WHISPER
from shardctl.models.families.bert import BERT
from shardctl.models.families.bloom import BLOOM
from shardctl.models.families.clip import CLIP, CLIP_TEXT, CLIP_VISION, SIGLIP
from shardctl.models.families.cohere import COHERE, COHERE2
from shardctl.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, GLM4_MOE_LITE
from shardctl.models.families.deepseek_sparse import DEEPSEEK_V32, GLM_MOE_DSA
from shardctl.models.families.deepseek_v4 import DEEPSEEK_V4
from shardctl.models.families.distilbert import DISTILBERT
from shardctl.models.families.electra import ELECTRA
from shardctl.models.families.ernie import ERNIE4_5
from shardctl.models.families.ernie_moe import ERNIE4_5_MOE
from shardctl.models.families.exaone import EXAONE4, EXAONE_MOE
from shardctl.models.families.falcon import FALCON
from shardctl.models.families.gemma import GEMMA, GEMMA2, GEMMA3_TEXT, VAULTGEMMA
from shardctl.models.families.gemma4 import GEMMA4, GEMMA4_TEXT
from shardctl.models.families.glm import GLM, GLM4
from shardctl.models.families.gpt2 import GPT2
from shardctl.models.families.gpt_bigcode import GPT_BIGCODE
from shardctl.models.families.gpt_neo import GPT_NEO
from shardctl.models.families.gpt_neox import GPT_NEOX
from shardctl.models.families.gpt_oss import GPT_OSS
from shardctl.models.families.gptj import GPTJ
from shardctl.models.families.granite import GRANITE, HYPERCLOVAX
from shardctl.models.families.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from shardctl.models.families.hunyuan import HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE, HY_V3
from shardctl.models.families.hunyuan_v4 import HY_V4
from shardctl.models.families.jamba import JAMBA
from shardctl.models.families.kimi import KIMI_K3, KIMI_K25
from shardctl.models.families.kimi_linear import KIMI_LINEAR
from shardctl.models.families.lfm2 import LFM2, LFM2_MOE
from shardctl.models.families.llama import CWM, HELIUM, LLAMA
from shardctl.models.families.llama4 import LLAMA4, LLAMA4_TEXT
from shardctl.models.families.mamba import FALCON_MAMBA, MAMBA, MAMBA2
from shardctl.models.families.mimo import MIMO, MIMO_V2_FLASH
from shardctl.models.families.minimax import MINIMAX_M2
from shardctl.models.families.minimax_m3 import MINIMAX_M3, MINIMAX_M3_TEXT
from shardctl.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from shardctl.models.families.mistral4 import MISTRAL4
from shardctl.models.families.mixtral import MIXTRAL, PHIMOE
from shardctl.models.families.mpt import MPT
from shardctl.models.families.nemotron import NEMOTRON
from shardctl.models.families.nemotron_h import NEMOTRON_H
from shardctl.models.families.olmo import OLMO, OLMO2, OLMO3
from shardctl.models.families.opt import OPT
from shardctl.models.families.persimmon import PERSIMMON
from shardctl.models.families.phi import PHI, PHI3
from shardctl.models.families.qwen import QWEN2, QWEN3
from shardctl.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from shardctl.models.families.qwen3_next import QWEN3_NEXT
from shardctl.models.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from shardctl.models.families.qwen_moe import FLEX_OLMO, OLMOE, QWEN2_MOE, QWEN3_MOE
from shardctl.models.families.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA
from shardctl.models.families.seed_oss import SEED_OSS
from shardctl.models.families.smollm import SMOLLM3
from shardctl.models.families.solar_open import SOLAR_OPEN
from shardctl.models.families.stablelm import STABLELM
from shardctl.models.families.starcoder2 import STARCODER2
from shardctl.models.families.t5 import MT5, T5, UMT5
from shardctl.models.families.vision_language import (
    GEMMA3,
    LLAVA,
    LLAVA_NEXT,
    MISTRAL3,
    PALIGEMMA,
    QWEN2_5_VL,
    QWEN2_VL,
)
from shardctl.models.families.vit import VIT
from shardctl.models.family import Family

FAMILIES: Final[tuple[Family, ...]] = (
    AFMOE,
    APERTUS,
    ARCEE,
    BAMBA,
    BART,
    BERT,
    BLOOM,
    CAMEMBERT,
    CLIP,
    CLIP_TEXT,
    CLIP_VISION,
    COHERE,
    COHERE2,
    CWM,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    DISTILBERT,
    ELECTRA,
    ERNIE4_5,
    ERNIE4_5_MOE,
    EXAONE4,
    EXAONE_MOE,
    FALCON,
    FALCON_H1,
    FALCON_MAMBA,
    FLEX_OLMO,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3_TEXT,
    GEMMA4,
    GEMMA4_TEXT,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    GPT2,
    GPTJ,
    GPT_BIGCODE,
    GPT_NEO,
    GPT_NEOX,
    GPT_OSS,
    GRANITE,
    GRANITE_MOE,
    GRANITE_MOE_HYBRID,
    GRANITE_MOE_SHARED,
    HELIUM,
    HYPERCLOVAX,
    HUNYUAN_V1_DENSE,
    HUNYUAN_V1_MOE,
    HY_V3,
    HY_V4,
    JAMBA,
    KIMI_K25,
    KIMI_K3,
    KIMI_LINEAR,
    LFM2,
    LFM2_MOE,
    LLAMA,
    LLAMA4,
    LLAMA4_TEXT,
    LLAVA,
    LLAVA_NEXT,
    M2M_100,
    MAMBA,
    MAMBA2,
    MBART,
    MIMO,
    MIMO_V2_FLASH,
    MINIMAX_M2,
    MINIMAX_M3,
    MINIMAX_M3_TEXT,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MISTRAL3,
    MISTRAL4,
    MIXTRAL,
    MPT,
    MT5,
    NEMOTRON,
    NEMOTRON_H,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    OPT,
    PALIGEMMA,
    PEGASUS,
    PERSIMMON,
    PHI,
    PHI3,
    PHIMOE,
    QWEN2,
    QWEN2_5_VL,
    QWEN2_MOE,
    QWEN2_VL,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_VL,
    QWEN3_VL_MOE,
    ROBERTA,
    SEED_OSS,
    SIGLIP,
    SMOLLM3,
    SOLAR_OPEN,
    STABLELM,
    STARCODER2,
    T5,
    UMT5,
    VAULTGEMMA,
    VIT,
    WHISPER,
    XLM_ROBERTA,
)
"""Every family; to add one, write its file and name it here."""
