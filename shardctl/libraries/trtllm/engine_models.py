"""Says of a model why TensorRT-LLM's checkpoints of it are not written: what they would need, or that it has none."""

from __future__ import annotations

from typing import Final

from shardctl.base.errors import UnsupportedError

_COMPUTED: Final = {
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
_UNWRITTEN: Final = frozenset(
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
_HINT: Final = "use --to hf, which TensorRT-LLM's PyTorch backend loads if it has the model"


def explain_missing_model(architecture: str) -> UnsupportedError:
    """Return the error for a class whose arrays are not written."""
    named = architecture or "this model"
    if architecture in _COMPUTED:
        return UnsupportedError(f"TensorRT-LLM's checkpoint of {named} {_COMPUTED[architecture]}", hint=_HINT)
    if architecture in _UNWRITTEN:
        return UnsupportedError(f"TensorRT-LLM's arrays of {named} are not known here", hint=_HINT)
    return UnsupportedError(f"TensorRT-LLM's list of models for trtllm-build does not have {named}", hint=_HINT)
