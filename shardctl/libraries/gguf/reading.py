"""Describes what a GGUF file holds: its tensors, and what of a config follows from its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.libraries.reader import find_given_file
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from shardctl.libraries.gguf.header import GgufHeader
    from shardctl.storage import Source

NAME: Final = "gguf"
SUFFIX: Final = ".gguf"
_MODEL_CLASSES_BY_ARCHITECTURE: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""By `general.architecture`, the class of transformers whose layers they are."""
_CONFIG_KEYS_BY_SETTING: Final = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_EMBEDDING_NAME: Final = "token_embd.weight"
_EXPERT_COUNT_KEY: Final = "num_experts"
_DEFAULT_CACHE_DTYPE: Final = "float16"
"""What llama.cpp keeps keys and values in, unless it is told otherwise."""


def find_gguf_file(source: Source) -> str | None:
    """Find the file's path, if the source was given as one GGUF file."""
    given = find_given_file(source)
    return given if given is not None and given.lower().endswith(SUFFIX) else None


def describe_gguf(source: Source, path: str) -> tuple[Manifest, dict[str, Any] | None]:
    """Describe the tensors of a file, and the config that follows from its settings; None if that is not known.

    Raises as `read_header`.
    """
    from shardctl.libraries.gguf.header import read_header  # few sources are such files

    header = read_header(source, path)
    tensors = {}
    for each in header.tensors:
        where = Region(path, each.offset, compute_dense_strides(each.dtype, each.shape))
        chunk = Chunk(Box.whole(each.shape), each.dtype, where, each.name)
        tensors[each.name] = Tensor(each.name, each.dtype, each.shape, (chunk,))
    files = {path: CheckpointFile(path, source.files()[path].size)}
    return Manifest(NAME, tensors, files, warnings=tuple(_list_warnings(header))), _build_config(header)


def _list_warnings(header: GgufHeader) -> list[str]:
    parts = header.settings.get("split.count", 1)
    if not isinstance(parts, int) or parts <= 1:
        return []
    return [f"this is one of {parts} files of a model: the tensors of the others are not counted"]


def _build_config(header: GgufHeader) -> dict[str, Any] | None:
    settings, kind = header.settings, header.settings.get("general.architecture")
    if kind not in _MODEL_CLASSES_BY_ARCHITECTURE:
        return None
    values = {
        new: settings[f"{kind}.{old}"] for old, new in _CONFIG_KEYS_BY_SETTING.items() if f"{kind}.{old}" in settings
    }
    rows = next((tensor.shape[0] for tensor in header.tensors if tensor.name == _EMBEDDING_NAME), None)
    if rows is None or not all(isinstance(value, int) for value in values.values()):
        return None
    if kind == "llama" and values.get(_EXPERT_COUNT_KEY):
        return None
    if not values.get(_EXPERT_COUNT_KEY):
        values = {key: value for key, value in values.items() if "expert" not in key and not key.startswith("moe")}
    return {
        "architectures": [_MODEL_CLASSES_BY_ARCHITECTURE[str(kind)]],
        **values,
        "vocab_size": rows,
        "dtype": _DEFAULT_CACHE_DTYPE,
    }
