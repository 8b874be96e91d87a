"""Describes vLLM's sharded state: what `ShardedStateLoader` loads on each tensor-parallel rank.

They are those of the model's class before any kernel's own order, which vLLM makes after it has read them. Which ones
there are differs between its versions; a *profile* is one such set, named after the version whose set it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError, UnsupportedError
from shardctl.libraries.arrays.schema import ModelParts, Schema
from shardctl.libraries.vllm.decoders import list_decoder_entries
from shardctl.libraries.vllm.fused_qkv import list_bloom_entries, list_gpt2_entries, list_gpt_neox_entries
from shardctl.libraries.vllm.rank import SGLANG, VllmRank
from shardctl.libraries.vllm.seeing import list_gemma4_entries, list_qwen_eyes_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardctl.libraries.arrays.composite import SchemaEntry
    from shardctl.models import Model
    from shardctl.tensors.naming_scheme import NamingScheme

NAME: Final = "vllm"
TITLE: Final = "vLLM's sharded state"
PROFILE: Final = "profile"
"""The fact that says whose arrays these are, one of `PROFILES`."""
PROFILES: Final = ("0.32", "0.25", "0.11")
"""Each checked with that version of vLLM (0.32.0, 0.25.1, 0.11.2), newest first.

The first is written if nothing else is asked for."""
SHARED_LAST: Final = "shared_last"
"""The fact that says whether SGLang has the expert that all tokens share behind the others, in their arrays."""
LATENT: Final = "latent"
"""The fact that says whether latent attention is done as such; vLLM does so unless ``VLLM_MLA_DISABLE=1``."""
VOCABULARY_TYPE: Final = "vocabulary_type"
"""The fact that names the type of the embedding, for ranks that only have zeros of it."""
BIAS_TYPE: Final = "bias_type"
"""The fact that names the type of biases that are zeros on all ranks but the first."""
_NEWER_TEXT: Final = (
    *("qwen3_next", "gemma4_text", "minimax_m2", "glm4_moe", "glm4", "deepseek_v2", "seed_oss", "smollm3", "olmo3"),
    *("olmoe", "exaone4", "exaone_moe", "hunyuan_v1_dense", "arcee", "cohere", "cohere2", "nemotron", "starcoder2"),
    *("apertus", "ernie4_5", "ernie4_5_moe", "lfm2", "lfm2_moe", "solar_open", "mistral4"),
    *("qwen3_5_text", "qwen3_5_moe_text"),
)
_NEWER: Final = frozenset(
    {*_NEWER_TEXT, "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma4"}
)
"""Those that were compared with the newest profile alone."""
_SGLANGS: Final = (
    *("deepseek_v2", "deepseek_v3", "granite", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    "qwen3_moe",
)
"""Those that were compared with SGLang."""
_DROPPED: Final = (
    (("qwen3_next", "qwen3_5", "qwen3_vl", "olmoe", "ernie4_5"), ".self_attn.o_proj.bias"),
    (("deepseek",), ".mlp.down_proj.bias"),
    (("cohere",), ".self_attn.q_proj.bias"),
)
"""How families begin, and how biases end that they may have by their config, and that vLLM's classes never have."""
_TIED: Final = ("lfm2",)
"""How families begin whose head vLLM ties to the embedding, whatever the config says."""
FAMILIES: Final[Mapping[str, Callable[[VllmRank, Model], Iterator[SchemaEntry]]]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"), list_decoder_entries
    ),
    **dict.fromkeys(("granite", "olmo2", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"), list_decoder_entries),
    "deepseek_v3": list_decoder_entries,
    **dict.fromkeys(_NEWER_TEXT, list_decoder_entries),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), list_qwen_eyes_entries
    ),
    "gemma4": list_gemma4_entries,
    "gpt2": list_gpt2_entries,
    "gpt_neox": list_gpt_neox_entries,
    "bloom": list_bloom_entries,
    "falcon": list_bloom_entries,
}
"""Those whose arrays vLLM itself has shown; others of the same names may have norms or heads of another kind."""
_WHOLE: Final = ("embedding", "norm", "head")
_EVERYWHERE: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "gemma4", "gemma4_text", "cohere", "cohere2", "gpt_oss"), _WHOLE
    ),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "olmoe"), _WHOLE),
    **dict.fromkeys(("gpt2", "bloom", "falcon"), _WHOLE),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe"), ("embedding",)),
    "qwen3_next": ("embedding", "head"),
}
"""What every stage has; else the first has the embedding, and the last the last norm and the head."""
_DECAY: Final = ".A_log"
_HEADS: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def list_entries(model: Model, dialect: NamingScheme, rank: int) -> Iterator[SchemaEntry]:
    """List the arrays of one rank; see `Schema.entries`."""
    tp = dialect.mesh.degree("tp")
    if dialect.mesh.ep not in (1, tp):
        raise PartitionError(
            f"vLLM divides experts over all ranks of tp or over none, but the mesh is {dialect.mesh}",
            hint=f"use --ep {tp}, or leave --ep out",
        )
    if dialect.text(PROFILE, PROFILES[0]) == SGLANG:
        _check_sglang(model)
    elif model.family in _NEWER:
        _check_newer(model, dialect)
    if model.family == "mistral4" and tp > 1:
        raise PartitionError(
            f"vLLM {PROFILES[0]} has no class of its own for {model.architecture}, and ends in an error for tp={tp}, "
            "because its Transformers backend leaves latent attention whole",
            hint="leave --tp out, or use --pp",
        )
    place = dialect.mesh.coordinate(rank)
    stages = dialect.stages or split_into_stages(model.layers, dialect.mesh.degree("pp"))
    first = sum(stages[: place.get("pp", 0)])
    last, everywhere = place.get("pp", 0) == len(stages) - 1, _EVERYWHERE.get(model.family, ())
    here = VllmRank(
        parts=ModelParts(model, TITLE),
        tp=tp,
        index=place.get("tp", 0),
        layers=range(first, first + stages[place.get("pp", 0)]),
        begins=place.get("pp", 0) == 0 or "embedding" in everywhere,
        ends=last or "norm" in everywhere,
        asks=last or "head" in everywhere,
        whole_experts=dialect.mesh.ep > 1,
        profile=dialect.text(PROFILE, PROFILES[0]),
        latent=dialect.switch(LATENT),
        vocabulary_dtype=BY_NAME[dialect.text(VOCABULARY_TYPE, "BF16")],
        bias_dtype=BY_NAME[dialect.text(BIAS_TYPE, "BF16")],
        shared_last=dialect.switch(SHARED_LAST),
    )
    yield from FAMILIES[model.family](here, model)


def _check_newer(model: Model, dialect: NamingScheme) -> None:
    """Raise UnsupportedError for what a newer family was not compared with."""
    profile = dialect.text(PROFILE, PROFILES[0])
    if profile != PROFILES[0]:
        raise UnsupportedError(
            f"the arrays of {model.architecture} are known of vLLM {PROFILES[0]} alone, not of {profile}",
            hint=f"use --for vllm@{PROFILES[0]}, or --to hf, which every version loads",
        )


def _check_sglang(model: Model) -> None:
    """Raise UnsupportedError for a family that was not compared with SGLang."""
    if model.family not in _SGLANGS:
        raise UnsupportedError(
            f"SGLang's arrays of {model.architecture} are not known here",
            hint=f"known are {', '.join(_SGLANGS)}; SGLang loads what --to hf writes, and cuts it itself",
        )


def split_into_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has (`get_pp_indices` of distributed/utils.py).

    Those that are left over go to the stages before the last, from the back.

    >>> split_into_stages(10, 4), split_into_stages(7, 2)
    ((2, 3, 3, 2), (4, 3))
    """
    counts = [layers // stages] * stages
    for number in range(layers % stages):
        counts[-2 - number] += 1
    return tuple(counts)


def check_model(model: Model) -> None:
    """Raise UnsupportedError for a model whose arrays are not known."""
    if model.encodings:
        raise UnsupportedError(
            "vLLM reorders quantized weights for the kernel that it chooses",
            hint="serve the original files, which vLLM can quantize or read quantized",
        )
    decay = next((name for name in model.tensors if name.endswith(_DECAY)), None)
    if decay is not None and model.family not in FAMILIES:
        raise UnsupportedError(
            f"vLLM stores -exp(A_log) of {model.architecture or 'this model'}, from which {decay} does not come back "
            "bit for bit",
            hint="use --to hf, which vLLM loads and cuts by itself",
        )
    if model.family not in FAMILIES or not model.architecture.endswith(_HEADS):
        raise UnsupportedError(
            f"{TITLE} of {model.architecture or 'this model'} is not known here",
            hint=f"known are models for text of {', '.join(sorted(FAMILIES))}",
        )
    if model.family.startswith(_TIED) and "lm_head.weight" not in model.aliases:
        raise UnsupportedError(
            f"vLLM has no place for lm_head.weight: its {model.architecture} ties it to the embedding"
        )
    for families, ending in _DROPPED:
        biased = next((name for name in model.tensors if name.endswith(ending)), None)
        if biased is not None and model.family.startswith(families):
            raise UnsupportedError(
                f"vLLM has no place for {biased}: its class of {model.architecture} has no such biases"
            )


_FURTHER: Final = (
    "vLLM loads them as a drafter, a model of its own, from a directory that shardctl reshard SRC DRAFTER --only mtp "
    '--to hf writes: --speculative-config \'{"method": "mtp", "model": "DRAFTER", "num_speculative_tokens": 1, '
    '"draft_load_config": {"load_format": "safetensors"}}\''
)
_STRANGERS: Final = ", or to SGLang, whose files have the same names: convert the model that the engine was given"
SCHEMA: Final = Schema(NAME, TITLE, check_model, list_entries, _FURTHER, strangers=_STRANGERS)
