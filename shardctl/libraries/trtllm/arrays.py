"""Describes the arrays of TensorRT-LLM: what each `rankN.safetensors` holds of a Llama and of what is built like one.

Names, cuts and orders are those of NVIDIA/TensorRT-LLM, `tensorrt_llm/models/llama/convert.py`, `qwen/convert.py`,
`deepseek_v1/convert.py` and `nemotron_nas/convert.py`, and of NVIDIA's exporter in Megatron-LM core 0.16,
`megatron/core/export/trtllm`: the query, key and value rows of a rank one behind another, ``mlp.fc`` the gate and
``mlp.gate`` the up projection, experts stacked with up before gate, layers counted anew on every stage. Ranks and
stages are those of `tensorrt_llm/mapping.py` (`Mapping.pp_layers`: even ones).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError, SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.arrays.composite import SchemaEntry, join_arrays, round_up_to_multiple, stack_arrays
from shardctl.libraries.arrays.schema import ModelParts, Schema, SchemaRank
from shardctl.tensors.pieces import split_layers_evenly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.libraries.arrays.composite import CompositeArray
    from shardctl.models import Model
    from shardctl.tensors.naming_scheme import NamingScheme

NAME: Final = "trtllm"
TITLE: Final = "TensorRT-LLM"
PARALLEL_EMBEDDING: Final = "parallel_embedding"
"""The fact that says whether each tp rank has a part of the embedding; else all have the whole of it."""
EMBEDDING_DIM: Final = "embedding_dim"
"""The fact that says which dim of a parallel embedding is cut: 0, the vocabulary, or 1."""
VOCABULARY: Final = "vocabulary"
"""The fact that says how many rows the vocabulary had before it was padded for tp: Megatron-LM pads it itself, to a
multiple of 128 x tp. Without it, there are as many rows as tokens."""
SEARCHED: Final = "nemotron-nas"
"""The family whose layers may lack attention or the MLP, which it calls `ffn`."""
FAMILIES: Final = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "granite", "deepseek", SEARCHED}
)
"""Those whose config and arrays are known here; others of the same names have other norms or multipliers."""
_EMBEDDING_NAME: Final = "model.embed_tokens.weight"
_LM_HEAD_NAME: Final = "lm_head.weight"
_FINAL_NORM_NAME: Final = "model.norm.weight"
_PARAMETER_NAMES: Final = ("weight", "bias")
_MIXTRAL_EXPERT_NAMES: Final = ("block_sparse_moe", ("w1", "w3", "w2"))
_QWEN_EXPERT_NAMES: Final = ("mlp", ("gate_proj", "up_proj", "down_proj"))
_SHARED_EXPERT_MODULES: Final = ("shared_expert", "shared_experts")
_ROUTER_DTYPE: Final = BY_NAME["F32"]

_IRREVERSIBLE_ARCHITECTURES: Final = {
    **dict.fromkeys(
        ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
        "stores norms plus one, which is not the same number in 16 bits",
    ),
    "NemotronForCausalLM": "stores norms plus one, which is not the same number in 16 bits",
    **dict.fromkeys(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        "stores products of the projections of queries and keys, which are computed",
    ),
    "MambaForCausalLM": "stores -exp(A_log), which is computed",
    "RecurrentGemmaForCausalLM": "stores norms plus one and softplus of a parameter, which are computed",
}
"""What its converters compute, so that the weights cannot be had back from what they write."""
_UNIMPLEMENTED_ARCHITECTURES: Final = frozenset(
    {
        *("BaichuanForCausalLM", "BertForQuestionAnswering", "BertForSequenceClassification", "BertModel"),
        *("BloomForCausalLM", "ChatGLMForConditionalGeneration", "CogVLMForCausalLM", "CohereForCausalLM"),
        *("DbrxForCausalLM", "ExaoneForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM"),
        *("GPTJForCausalLM", "GPTNeoXForCausalLM", "GraniteMoeForCausalLM", "Grok1ModelForCausalLM"),
        *("InternLM2ForCausalLM", "MllamaForConditionalGeneration", "MptForCausalLM", "OPTForCausalLM"),
        *("Phi3ForCausalLM", "PhiForCausalLM", "PhiMoEForCausalLM", "Qwen2ForSequenceClassification"),
        *("Qwen2VLForConditionalGeneration", "RobertaForQuestionAnswering", "RobertaForSequenceClassification"),
        *("RobertaModel", "Starcoder2ForCausalLM", "T5ForConditionalGeneration", "WhisperForConditionalGeneration"),
        *("BartForConditionalGeneration", "MBartForConditionalGeneration"),
    }
)
"""Classes that it has, by its `MODEL_MAP` and its converter of encoders and decoders, and that nobody wrote here."""
_PYTORCH_BACKEND_HINT: Final = "use --to hf, which TensorRT-LLM's PyTorch backend loads if it has the model"


@value_class
class _TrtllmRank(SchemaRank):
    """One rank, while its arrays are named."""

    experts_ranks: tuple[int, int]
    """Over how many of them whole experts are divided, and which share is this one's."""
    inner_ranks: tuple[int, int]
    """The same inside each expert."""
    exported_rows: int
    """Rows of the vocabulary before they are padded for tp, if the files say so, else 0."""

    def heads(self, name: str, like: str) -> CompositeArray:
        """Return this rank's heads, or the one that it shares with neighbours if there are fewer heads than ranks.

        `like` is the weight that says how many rows a head has.
        """
        whole, unit = self[name], self.parts.unit(like)
        count = whole.shape[0] // unit
        if count % self.tp == 0:
            return whole.share(0, self.index, self.tp)
        if "q_proj" in name or self.tp % count:
            raise PartitionError(f"{name}: {count} heads cannot be divided over tp={self.tp}")
        first = self.index * count // self.tp
        return whole.part(0, first * unit, (first + 1) * unit)

    def tokens(self, name: str) -> CompositeArray:
        """Return an embedding or a head with as many rows as it had when it was exported."""
        whole = self[name]
        if self.exported_rows and self.exported_rows < whole.shape[0]:
            raise SourceError(
                f"config.json has vocab_size {self.exported_rows:,}, but the model has {whole.shape[0]:,} tokens",
                hint="the config, or --true-vocab, may belong to another model",
            )
        return whole.pad_rows(self.exported_rows or whole.shape[0])

    def vocabulary(self, name: str) -> CompositeArray:
        """Return this rank's rows of an embedding or a head, zeros behind the last token."""
        whole = self.tokens(name)
        return whole.pad_rows(round_up_to_multiple(whole.shape[0], self.tp)).share(0, self.index, self.tp)


def _list_entries(model: Model, dialect: NamingScheme, rank: int) -> Iterator[SchemaEntry]:
    at, mesh = dialect.mesh.coordinate(rank), dialect.mesh
    tp, index = mesh.degree("tp"), at["tp"]
    ep, etp = (mesh.ep, mesh.etp) if _has_experts(model) else (1, tp)
    if ep * etp != tp:
        raise PartitionError(
            f"{TITLE} divides experts over the ranks of tp, but ep={ep} x etp={etp} is not tp={tp}",
            hint=f"add --etp {tp // ep}" if tp % ep == 0 else f"use a divisor of {tp} for --ep",
        )
    here = _TrtllmRank(
        ModelParts(model, TITLE), tp, index, (ep, index % ep), (etp, index // ep), dialect.number(VOCABULARY)
    )
    stages = dialect.stages or split_layers_evenly(model.layers, mesh.degree("pp"))
    stage = at["pp"]
    first = sum(stages[:stage])
    if stage == 0:
        yield SchemaEntry("transformer.vocab_embedding.weight", _cut_embedding(here, dialect))
    for layer in range(first, first + stages[stage]):
        yield from _list_layer_entries(here, f"model.layers.{layer}", f"transformer.layers.{layer - first}")
    if stage == len(stages) - 1:
        yield SchemaEntry("transformer.ln_f.weight", here[_FINAL_NORM_NAME])
        # NVIDIA's exporter leaves the head out where it is tied; TensorRT-LLM's own converters do not.
        yield SchemaEntry("lm_head.weight", here.vocabulary(_LM_HEAD_NAME), optional=_LM_HEAD_NAME in model.aliases)


def _cut_embedding(here: _TrtllmRank, dialect: NamingScheme) -> CompositeArray:
    if not dialect.read_flag(PARALLEL_EMBEDDING):
        return here.tokens(_EMBEDDING_NAME)
    if dialect.number(EMBEDDING_DIM):
        return here.tokens(_EMBEDDING_NAME).share(1, here.index, here.tp)
    return here.vocabulary(_EMBEDDING_NAME)


def _list_layer_entries(here: _TrtllmRank, have: str, new: str) -> Iterator[SchemaEntry]:
    if f"{have}.self_attn.q_proj.weight" in here:
        yield from _list_attention_entries(here, have, new)
    mlp = f"{new}.{'ffn' if here.parts.model.family == SEARCHED else 'mlp'}"
    if f"{have}.post_attention_layernorm.weight" in here:
        yield SchemaEntry(f"{new}.post_layernorm.weight", here[f"{have}.post_attention_layernorm.weight"])
    if f"{have}.mlp.gate_proj.weight" in here:
        yield from here.column_layer(f"{have}.mlp.gate_proj", f"{mlp}.fc")
        yield from here.column_layer(f"{have}.mlp.up_proj", f"{mlp}.gate")
        yield from here.row_layer(f"{have}.mlp.down_proj", f"{mlp}.proj")
    elif here.parts.model.family != SEARCHED:
        yield from _list_expert_entries(here, have, mlp)


def _list_attention_entries(here: _TrtllmRank, have: str, new: str) -> Iterator[SchemaEntry]:
    attention = f"{have}.self_attn"
    yield SchemaEntry(f"{new}.input_layernorm.weight", here[f"{have}.input_layernorm.weight"])
    for kind in _PARAMETER_NAMES:
        if f"{attention}.q_proj.{kind}" in here:
            qkv = [here.heads(f"{attention}.{part}_proj.{kind}", f"{attention}.{part}_proj.weight") for part in "qkv"]
            yield SchemaEntry(f"{new}.attention.qkv.{kind}", join_arrays(qkv))
    yield from here.row_layer(f"{attention}.o_proj", f"{new}.attention.dense")
    for part in "qk":
        if f"{attention}.{part}_norm.weight" in here:
            yield SchemaEntry(f"{new}.attention.{part}_layernorm.weight", here[f"{attention}.{part}_norm.weight"])


def _list_expert_entries(here: _TrtllmRank, have: str, new: str) -> Iterator[SchemaEntry]:
    module, (gate, up, down) = (
        _MIXTRAL_EXPERT_NAMES if f"{have}.{_MIXTRAL_EXPERT_NAMES[0]}.gate.weight" in here else _QWEN_EXPERT_NAMES
    )
    router = here[f"{have}.{module}.gate.weight"]
    count, (ranks, mine), (inner, part) = router.shape[0], here.experts_ranks, here.inner_ranks
    if count % ranks:
        raise PartitionError(f"{have}.{module}: {count} experts cannot be divided over ep={ranks}")
    held = range(mine * count // ranks, (mine + 1) * count // ranks)
    names = [f"{have}.{module}.experts.{expert}" for expert in held]
    over = [join_arrays([here[f"{e}.{p}.weight"].share(0, part, inner) for p in (up, gate)]) for e in names]
    yield SchemaEntry(f"{new}.router.weight", router, dtype=_ROUTER_DTYPE)
    yield SchemaEntry(f"{new}.fc.weight", stack_arrays(over))
    yield SchemaEntry(
        f"{new}.proj.weight", stack_arrays([here[f"{e}.{down}.weight"].share(1, part, inner) for e in names])
    )
    shared = next((s for s in _SHARED_EXPERT_MODULES if f"{have}.mlp.{s}.gate_proj.weight" in here), None)
    if shared is not None:
        shared = f"{have}.mlp.{shared}"
        halves = [here.rows(f"{shared}.{name}.weight") for name in ("up_proj", "gate_proj")]
        yield SchemaEntry(f"{new}.shared_expert.fc.weight", join_arrays(halves))
        yield SchemaEntry(f"{new}.shared_expert.proj.weight", here.columns(f"{shared}.down_proj.weight"))
        if f"{have}.mlp.shared_expert_gate.weight" in here:
            yield SchemaEntry(f"{new}.shared_expert_gate.weight", here[f"{have}.mlp.shared_expert_gate.weight"])


def _has_experts(model: Model) -> bool:
    return any(
        f"model.layers.{layer}.{module}.gate.weight" in model.tensors
        for layer in range(model.layers)
        for module in ("mlp", "block_sparse_moe")
    )


def _check_model(model: Model) -> None:
    """Raise UnsupportedError for a model that is not laid out as here."""
    if model.encodings:
        raise UnsupportedError(
            f"{TITLE} stores quantized weights in formats that shardctl does not know",
            hint="convert the model's weights in bfloat16, and quantize them with NVIDIA's tools",
        )
    if model.family not in FAMILIES or not model.architecture.endswith("ForCausalLM"):
        raise _explain_missing_model(model.architecture)
    biased = next((name for name in model.tensors if name.endswith(".bias")), None)
    if biased is not None and model.family in {SEARCHED, "deepseek"}:
        raise UnsupportedError(f"{TITLE} has no place for {biased} of {model.architecture}: it has no biases there")
    if _has_experts(model):
        dense = [n for n in range(model.layers) if f"model.layers.{n}.mlp.gate_proj.weight" in model.tensors]
        if model.family == "deepseek" and dense != [0]:
            raise UnsupportedError(f"{TITLE}'s {model.architecture} has experts in every layer but the first")
        if model.family != "deepseek" and dense:
            raise UnsupportedError(f"{TITLE} has experts in every layer or in none, but layer {dense[0]} has none")


SCHEMA: Final = Schema(NAME, TITLE, _check_model, _list_entries)


def _explain_missing_model(architecture: str) -> UnsupportedError:
    """Return the error for a class whose arrays are not written."""
    named = architecture or "this model"
    if architecture in _IRREVERSIBLE_ARCHITECTURES:
        return UnsupportedError(
            f"TensorRT-LLM's checkpoint of {named} {_IRREVERSIBLE_ARCHITECTURES[architecture]}",
            hint=_PYTORCH_BACKEND_HINT,
        )
    if architecture in _UNIMPLEMENTED_ARCHITECTURES:
        return UnsupportedError(f"TensorRT-LLM's arrays of {named} are not known here", hint=_PYTORCH_BACKEND_HINT)
    return UnsupportedError(
        f"TensorRT-LLM's list of models for trtllm-build does not have {named}", hint=_PYTORCH_BACKEND_HINT
    )
