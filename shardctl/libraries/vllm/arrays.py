"""Describes vLLM's sharded state: what `ShardedStateLoader` loads on each tensor-parallel rank.

They are those of the model's class before any kernel's own order, which vLLM makes after it has read them. Which ones
there are differs between its versions; a *profile* is one such set, named after the version whose set it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError, UnsupportedError
from shardctl.libraries.arrays.composite import SchemaEntry, join_arrays
from shardctl.libraries.arrays.schema import ModelParts, Schema
from shardctl.libraries.vllm.decoders import list_decoder_entries
from shardctl.libraries.vllm.rank import SGLANG, HeadRun, QkvRows, VllmRank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardctl.models import Model
    from shardctl.tensors.naming_scheme import NamingScheme

_PARAMETER_NAMES: Final = ("weight", "bias")
_LM_HEAD_NAME: Final = "lm_head.weight"

_LANGUAGE_MODEL_PREFIX: Final = "model.language_model"
_VISION_ENCODER_PREFIX: Final = "model.visual."
_COLUMN_PARALLEL_SUFFIXES: Final = tuple(
    f"{name}.{kind}" for name in (".linear_fc1", ".mlp.fc1", ".mlp.0") for kind in ("weight", "bias")
)
_ROW_PARALLEL_SUFFIXES: Final = tuple(
    f"{name}.weight" for name in (".linear_fc2", ".mlp.fc2", ".mlp.2", ".mlp.down_proj", ".attn.proj")
)
_GATE, _UP = ".mlp.gate_proj.", ".mlp.up_proj."


def _list_qwen_eyes_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List Qwen2-VL, Qwen3-VL and Qwen3.5, whose vision model is cut by heads and by columns."""
    yield from _list_text(here, model)
    for tensor in model.own():
        if not tensor.name.startswith(_VISION_ENCODER_PREFIX):
            continue
        name, content = tensor.name, here[tensor.name]
        if _UP in name:
            continue
        if _GATE in name:
            content = join_arrays([here.rows(name), here.rows(name.replace(_GATE, _UP))])
            name = name.replace(_GATE, ".mlp.gate_up_proj.")
        elif ".attn.qkv." in name and model.family == "qwen2_vl":  # whose ranks gather all rows before they part them
            content = here.rows(name)
        elif ".attn.qkv." in name:
            content = join_arrays([part.share(0, here.index, here.tp) for part in content.shares(0, 3)])
        elif name.endswith(_COLUMN_PARALLEL_SUFFIXES):
            content = here.rows(name)
        elif name.endswith(_ROW_PARALLEL_SUFFIXES):
            content = here.columns(name)
        yield SchemaEntry(name.removeprefix("model."), content)


def _list_gemma4_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List Gemma 4, whose towers are transformers' modules, whole on every rank."""
    yield from _list_text(here, model)
    for tensor in model.own():
        if not tensor.name.startswith((_LANGUAGE_MODEL_PREFIX, "lm_head.")):
            yield SchemaEntry(tensor.name.removeprefix("model."), here[tensor.name])


def _list_text(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    for entry in list_decoder_entries(replace(here, parts=replace(here.parts, inner=_LANGUAGE_MODEL_PREFIX)), model):
        yield replace(entry, name=f"language_model.{entry.name}")


def _list_gpt2_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List GPT-2, whose weights lie transposed in the file."""
    if _LM_HEAD_NAME not in model.aliases:
        yield here.vocabulary("transformer.wte.weight")
    yield here.vocabulary(_LM_HEAD_NAME)
    yield from here.same("transformer.wpe.weight", *(f"transformer.ln_f.{kind}" for kind in _PARAMETER_NAMES))
    for number in here.layers:
        layer = f"transformer.h.{number}"
        yield from here.same(*(f"{layer}.ln_{norm}.{kind}" for norm in (1, 2) for kind in _PARAMETER_NAMES))
        qkv = f"{layer}.attn.c_attn"
        weights = ((part.transposed, unit) for part, unit in here.sections(f"{qkv}.weight", 1))
        yield here.attention(f"{qkv}.weight", QkvRows(*(HeadRun((part,), unit) for part, unit in weights)))
        biases = here.sections(f"{qkv}.bias")
        yield here.attention(f"{qkv}.bias", QkvRows(*(HeadRun((part,), unit) for part, unit in biases)))
        yield from here.scales(f"{layer}.attn.attn")
        wide = here[f"{layer}.mlp.c_fc.weight"].transposed
        yield SchemaEntry(f"{layer}.mlp.c_fc.weight", wide.share(0, here.index, here.tp))
        yield SchemaEntry(f"{layer}.mlp.c_fc.bias", here.rows(f"{layer}.mlp.c_fc.bias"))
        for name in (f"{layer}.attn.c_proj", f"{layer}.mlp.c_proj"):
            yield SchemaEntry(f"{name}.weight", here[f"{name}.weight"].transposed.share(1, here.index, here.tp))
            yield from here.same(f"{name}.bias")


def _list_gpt_neox_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List GPT-NeoX and Pythia; since 0.32 as the class of transformers has them, each head's q, k and v together."""
    new, head = ("model", _LM_HEAD_NAME) if here.latest else ("gpt_neox", "embed_out.weight")
    if here.begins and (_LM_HEAD_NAME not in model.aliases or not here.asks):
        yield here.vocabulary("gpt_neox.embed_in.weight", f"{new}.embed_in.weight")
    if here.ends:
        yield here.vocabulary(_LM_HEAD_NAME if _LM_HEAD_NAME in here else "embed_out.weight", head)
        for kind in _PARAMETER_NAMES:
            name = f"final_layer_norm.{kind}"
            yield SchemaEntry(f"{new}.{name}", here[f"gpt_neox.{name}"])
    for number in here.layers:
        have, layer = f"gpt_neox.layers.{number}", f"{new}.layers.{number}"
        for entry in _list_layer(here, have, f"{have}.attention", in_order=not here.latest):
            yield replace(entry, name=entry.name.replace(have, layer, 1))


def _list_bloom_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List BLOOM and Falcon."""
    if _LM_HEAD_NAME not in model.aliases:
        yield here.vocabulary("transformer.word_embeddings.weight")
    yield here.vocabulary(_LM_HEAD_NAME)
    yield from here.same(*(f"transformer.word_embeddings_layernorm.{kind}" for kind in _PARAMETER_NAMES))
    yield from here.same(*(f"transformer.ln_f.{kind}" for kind in _PARAMETER_NAMES))
    for number in here.layers:
        layer = f"transformer.h.{number}"
        yield from _list_layer(here, layer, f"{layer}.self_attention")


def _list_layer(here: VllmRank, layer: str, attention: str, *, in_order: bool = True) -> Iterator[SchemaEntry]:
    """List a layer; `in_order` has queries, then keys, then values, else they take turns as in the file."""
    for norm in ("input_layernorm", "post_attention_layernorm", "ln_attn", "ln_mlp"):
        yield from here.same(*(f"{layer}.{norm}.{kind}" for kind in _PARAMETER_NAMES))
    for kind in _PARAMETER_NAMES:
        name = f"{attention}.query_key_value.{kind}"
        if name in here:
            whole = SchemaEntry(name, here.rows(name))
            yield here.attention(name, _build_heads(here, name, attention)) if in_order else whole
    yield from here.scales(f"{attention}.attn")
    yield from here.row_layer(f"{attention}.dense")
    yield from here.column_layer(f"{layer}.mlp.dense_h_to_4h")
    yield from here.row_layer(f"{layer}.mlp.dense_4h_to_h")


def _build_heads(here: VllmRank, name: str, attention: str) -> QkvRows:
    """Build the heads of a fused array: sections of queries, keys and values, or groups with one key and value each.

    In the first, `Dim` says how many rows a head has; in the second, a group has two heads more than it has queries.
    """
    parts = list(here.sections(name))
    if len(parts) > 1:
        return QkvRows(*(HeadRun((part,), unit) for part, unit in parts))
    (whole, group), queries = parts[0], here.parts.unit(f"{attention}.dense.weight", 1)
    head = (group - queries) // 2
    groups = whole.shares(0, whole.shape[0] // group)

    def rows(start: int, stop: int) -> HeadRun:
        return HeadRun(tuple(each.part(0, start, stop) for each in groups), head)

    return QkvRows(rows(0, queries), rows(queries, queries + head), rows(queries + head, group))


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
_NEWEST_PROFILE_FAMILIES: Final = frozenset(
    {*_NEWER_TEXT, "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma4"}
)
"""Those that were compared with the newest profile alone."""
_SGLANG_FAMILIES: Final = (
    *("deepseek_v2", "deepseek_v3", "granite", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    "qwen3_moe",
)
"""Those that were compared with SGLang."""
_DROPPED_BIAS_SUFFIXES: Final = (
    (("qwen3_next", "qwen3_5", "qwen3_vl", "olmoe", "ernie4_5"), ".self_attn.o_proj.bias"),
    (("deepseek",), ".mlp.down_proj.bias"),
    (("cohere",), ".self_attn.q_proj.bias"),
)
"""How families begin, and how biases end that they may have by their config, and that vLLM's classes never have."""
_TIED_HEAD_FAMILY_PREFIXES: Final = ("lfm2",)
"""How families begin whose head vLLM ties to the embedding, whatever the config says."""
FAMILIES: Final[Mapping[str, Callable[[VllmRank, Model], Iterator[SchemaEntry]]]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"), list_decoder_entries
    ),
    **dict.fromkeys(("granite", "olmo2", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"), list_decoder_entries),
    "deepseek_v3": list_decoder_entries,
    **dict.fromkeys(_NEWER_TEXT, list_decoder_entries),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _list_qwen_eyes_entries
    ),
    "gemma4": _list_gemma4_entries,
    "gpt2": _list_gpt2_entries,
    "gpt_neox": _list_gpt_neox_entries,
    "bloom": _list_bloom_entries,
    "falcon": _list_bloom_entries,
}
"""Those whose arrays vLLM itself has shown; others of the same names may have norms or heads of another kind."""
_NON_LAYER_MODULES: Final = ("embedding", "norm", "head")
_ALL_STAGE_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "gemma4", "gemma4_text", "cohere", "cohere2", "gpt_oss"), _NON_LAYER_MODULES
    ),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "olmoe"), _NON_LAYER_MODULES),
    **dict.fromkeys(("gpt2", "bloom", "falcon"), _NON_LAYER_MODULES),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe"), ("embedding",)),
    "qwen3_next": ("embedding", "head"),
}
"""What every stage has; else the first has the embedding, and the last the last norm and the head."""
_DECAY_SUFFIX: Final = ".A_log"
_ARCHITECTURE_SUFFIXES: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


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
    elif model.family in _NEWEST_PROFILE_FAMILIES:
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
    last, everywhere = place.get("pp", 0) == len(stages) - 1, _ALL_STAGE_MODULES.get(model.family, ())
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
        latent=dialect.read_flag(LATENT),
        vocabulary_dtype=BY_NAME[dialect.text(VOCABULARY_TYPE, "BF16")],
        bias_dtype=BY_NAME[dialect.text(BIAS_TYPE, "BF16")],
        shared_last=dialect.read_flag(SHARED_LAST),
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
    if model.family not in _SGLANG_FAMILIES:
        raise UnsupportedError(
            f"SGLang's arrays of {model.architecture} are not known here",
            hint=f"known are {', '.join(_SGLANG_FAMILIES)}; SGLang loads what --to hf writes, and cuts it itself",
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
    decay = next((name for name in model.tensors if name.endswith(_DECAY_SUFFIX)), None)
    if decay is not None and model.family not in FAMILIES:
        raise UnsupportedError(
            f"vLLM stores -exp(A_log) of {model.architecture or 'this model'}, from which {decay} does not come back "
            "bit for bit",
            hint="use --to hf, which vLLM loads and cuts by itself",
        )
    if model.family not in FAMILIES or not model.architecture.endswith(_ARCHITECTURE_SUFFIXES):
        raise UnsupportedError(
            f"{TITLE} of {model.architecture or 'this model'} is not known here",
            hint=f"known are models for text of {', '.join(sorted(FAMILIES))}",
        )
    if model.family.startswith(_TIED_HEAD_FAMILY_PREFIXES) and "lm_head.weight" not in model.aliases:
        raise UnsupportedError(
            f"vLLM has no place for lm_head.weight: its {model.architecture} ties it to the embedding"
        )
    for families, ending in _DROPPED_BIAS_SUFFIXES:
        biased = next((name for name in model.tensors if name.endswith(ending)), None)
        if biased is not None and model.family.startswith(families):
            raise UnsupportedError(
                f"vLLM has no place for {biased}: its class of {model.architecture} has no such biases"
            )


_DRAFT_MODEL_HINT: Final = (
    "vLLM loads them as a drafter, a model of its own, from a directory that shardctl reshard SRC DRAFTER --only mtp "
    '--to hf writes: --speculative-config \'{"method": "mtp", "model": "DRAFTER", "num_speculative_tokens": 1, '
    '"draft_load_config": {"load_format": "safetensors"}}\''
)
_SGLANG_FILES_HINT: Final = (
    ", or to SGLang, whose files have the same names: convert the model that the engine was given"
)
SCHEMA: Final = Schema(NAME, TITLE, check_model, list_entries, _DRAFT_MODEL_HINT, strangers=_SGLANG_FILES_HINT)
