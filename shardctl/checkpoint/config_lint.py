"""Compares what the configs beside a checkpoint say with what its headers show, and says what to do where they differ.

What a known family's table holds is compared when names are bound to it, and is an error there: shapes, layers,
experts and the vocabulary. Here is what no table can know, and the same counts for models without a table.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError
from shardctl.libraries.peft.whole_model import list_live_adapters
from shardctl.models import find_quantization_config
from shardctl.models.tables.layer_names import count_layers
from shardctl.models.tables.predicting import LAYER_KEYS, PREDICTING_KEYS, get_count, list_predicting_names
from shardctl.models.tables.text_config import merge_text_config
from shardctl.storage.bounded_text import CONFIG_TEXT, RECORD_TEXT, parse_json, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.storage.bounded_text import TextLimits
    from shardctl.tensors.manifest import Tensor

_EXPERT_NAME: Final = re.compile(r"\.experts\.(\d+)\.")
_EXPERT_COUNT_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EMBEDDING_WEIGHT_PATTERN: Final = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight$"
)
_LM_HEAD_WEIGHT_PATTERN: Final = re.compile(r"(^|\.)(lm_head|embed_out|output|unembed)\.weight$")
_TIED_EMBEDDINGS_KEY: Final = "tie_word_embeddings"
_QUANTIZED_DTYPE_PREFIXES: Final = ("F8_", "I8", "U8", "I16", "U16", "I32", "U32", "F4", "F6")
_TOKEN_ID_KEYS: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_GENERATION_CONFIG_FILE: Final = "generation_config.json"
_TOKENIZER_FILE: Final = "tokenizer.json"


def lint_config(checkpoint: OpenedCheckpoint) -> Iterator[str]:
    """Say what `config.json` and `generation_config.json` claim and headers contradict; reads no weights."""
    yield from _lint_adapters(checkpoint)
    if checkpoint.config is None or checkpoint.hypothetical:
        return
    config = merge_text_config(checkpoint.config)
    filtered = checkpoint.record is not None and checkpoint.record.filtered
    if not filtered:
        yield from _lint_predicting_layers(checkpoint, config)
        if checkpoint.model is None or not checkpoint.model.family:
            yield from _lint_counts(checkpoint, config)
            yield from _lint_tie(checkpoint, config)
    yield from _lint_rotary_base(config)
    yield from _lint_quantization(checkpoint)
    yield from _lint_generation(checkpoint, config)


def _lint_adapters(checkpoint: OpenedCheckpoint) -> Iterator[str]:
    """Say that adapters were saved together with their base, whose names are not a model's then."""
    live = list_live_adapters(checkpoint.stored.tensors)
    if live:
        some = f"the adapter {live[0]}" if len(live) == 1 else f"the adapters {', '.join(live)}"
        yield f"{some} of PEFT and the base are saved as one model; reshard --only adapter splits an adapter off"


def lint_tokenizer(checkpoint: OpenedCheckpoint) -> Iterator[str]:
    """Name a token of `tokenizer.json` for which the vocabulary has no row; parses the file, which may have many MB."""
    if checkpoint.config is None or _TOKENIZER_FILE not in checkpoint.source.files():
        return
    rows = get_count(merge_text_config(checkpoint.config), ("vocab_size",))
    if rows is None:
        return
    tokenizer, problem = _read_table(checkpoint, _TOKENIZER_FILE, RECORD_TEXT)
    yield from problem
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    ids = [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    words = model.get("vocab") if isinstance(model, dict) else None
    ids += list(words.values()) if isinstance(words, dict) else [len(words) - 1] if isinstance(words, list) else []
    highest = max((n for n in ids if isinstance(n, int)), default=0)
    if highest >= rows:
        yield (
            f"{_TOKENIZER_FILE} has token {highest}, but the vocabulary has only {rows} rows; it may "
            "belong to another model, or the embedding was not resized"
        )


def _read_table(
    checkpoint: OpenedCheckpoint, path: str, limits: TextLimits = CONFIG_TEXT
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Read a file of JSON; gives an empty table, and why, if it is none or is too large."""
    try:
        content = parse_json(read_text(checkpoint.source, path, limits), path, limits)
    except SourceError as error:
        return {}, (error.message,)
    return (content, ()) if isinstance(content, dict) else ({}, (f"{path} is not a JSON object",))


def _lint_predicting_layers(checkpoint: OpenedCheckpoint, config: Mapping[str, Any]) -> Iterator[str]:
    key = next((key for key in PREDICTING_KEYS if config.get(key)), None)
    layers = get_count(config, LAYER_KEYS)
    if key is None or layers is None:
        return
    if list_predicting_names(config, checkpoint.manifest.tensors):
        return
    yield (
        f"config.json declares layers that predict further tokens ({key} {config[key]}), but no file holds them; "
        f"engines that speculate with them will fail; set {key} to 0, or take the layers from the original checkpoint "
        "with --complete-from"
    )


def _lint_counts(checkpoint: OpenedCheckpoint, config: Mapping[str, Any]) -> Iterator[str]:
    """Compare layers, experts and rows of the vocabulary of a model that no table describes."""
    tensors = checkpoint.manifest.tensors
    places = count_layers({name: tensor.shape for name, tensor in tensors.items()})
    declared = get_count(config, LAYER_KEYS)
    if places.towers and declared is not None:
        sizes = [0] * places.layers
        for name, layer in places.inside.items():
            sizes[layer] += tensors[name].size
        largest = max(places.towers, key=lambda tower: sum(sizes[tower.first : tower.last + 1]))
        held, others = largest.numbers[-1] + 1, {tower.numbers[-1] + 1 for tower in places.towers}
        parts = [part for part in (checkpoint.config or {}).values() if isinstance(part, dict)]
        # The largest may be another than the text model that is asked for (Musicgen), with a config of its own.
        elsewhere = declared in others and held in {get_count(part, LAYER_KEYS) for part in parts}
        if not elsewhere and not declared <= held <= declared + (get_count(config, PREDICTING_KEYS) or 0):
            yield (
                f"config.json declares {declared} layers, but the files hold {held} of "
                f"{largest.patterns[0].removesuffix('.*')}"
            )
    experts = max((int(found[1]) + 1 for found in map(_EXPERT_NAME.search, tensors) if found), default=0)
    declared = get_count(config, _EXPERT_COUNT_KEYS)
    if experts and declared is not None and experts != declared:
        yield f"config.json declares {declared} experts, but the files hold {experts}"
    rows = get_count(config, ("vocab_size",))
    for name, tensor in tensors.items():
        if rows is not None and _EMBEDDING_WEIGHT_PATTERN.search(name) and tensor.shape and tensor.shape[0] < rows:
            yield f"config.json declares a vocabulary of {rows}, but {name} has {tensor.shape[0]} rows"


def _find_tie(checkpoint: OpenedCheckpoint) -> tuple[Tensor, Tensor] | None:
    """Find the embedding and the head, where both are stored and are two tensors."""
    tensors = checkpoint.manifest.tensors
    embeddings = [tensor for name, tensor in tensors.items() if _EMBEDDING_WEIGHT_PATTERN.search(name)]
    heads = [tensor for name, tensor in tensors.items() if _LM_HEAD_WEIGHT_PATTERN.search(name)]
    return (embeddings[0], heads[0]) if len(embeddings) == len(heads) == 1 else None


def _lint_tie(checkpoint: OpenedCheckpoint, config: Mapping[str, Any]) -> Iterator[str]:
    """Say that a head cannot be the embedding, because it has another shape."""
    found = _find_tie(checkpoint)
    if found is not None and config.get(_TIED_EMBEDDINGS_KEY) is True and found[0].shape != found[1].shape:
        embedding, head = found
        yield (
            f"config.json says {_TIED_EMBEDDINGS_KEY}, but {head.name} has the shape {list(head.shape)} and"
            f" {embedding.name} {list(embedding.shape)}; set it to false"
        )


def lint_tie(checkpoint: OpenedCheckpoint, digests: Mapping[str, str]) -> Iterator[str]:
    """Say that a head that is stored by itself is not the embedding, although `config.json` says so."""
    found = _find_tie(checkpoint)
    if checkpoint.config is None or found is None:
        return
    (embedding, head), said = found, merge_text_config(checkpoint.config).get(_TIED_EMBEDDINGS_KEY)
    if embedding.shape != head.shape or embedding.dtype is not head.dtype:
        return
    if said is True and digests[embedding.name] != digests[head.name]:
        yield (
            f"config.json says {_TIED_EMBEDDINGS_KEY}, but {head.name} differs from {embedding.name}, and transformers"
            " would leave it out; set it to false"
        )


def _lint_rotary_base(config: Mapping[str, Any]) -> Iterator[str]:
    """Name two bases of rotary embeddings, one of which transformers 4 reads and the other transformers 5."""
    older, parameters = config.get("rope_theta"), config.get("rope_parameters")
    newer = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    if isinstance(older, int | float) and isinstance(newer, int | float) and older != newer:
        yield (
            f"config.json has rope_theta {older:g}, which transformers 4 reads, and {newer:g} in rope_parameters, "
            "which transformers 5 and engines read; keep the one that the model was trained with"
        )


def _lint_quantization(checkpoint: OpenedCheckpoint) -> Iterator[str]:
    settings = find_quantization_config(checkpoint.config or {})
    if settings is None or checkpoint.stored_quantization is not None:
        return
    if not any(
        tensor.dtype.name.startswith(_QUANTIZED_DTYPE_PREFIXES) for tensor in checkpoint.manifest.tensors.values()
    ):
        yield (
            "config.json says that the weights are quantized, but the files hold no quantized weights; "
            "remove quantization_config from it, or give the quantized files"
        )


def _lint_generation(checkpoint: OpenedCheckpoint, config: Mapping[str, Any]) -> Iterator[str]:
    """Name special tokens outside the vocabulary."""
    rows = get_count(config, ("vocab_size",))
    if rows is None:
        return
    said: dict[str, Mapping[str, Any]] = {"config.json": config}
    if _GENERATION_CONFIG_FILE in checkpoint.source.files():
        said[_GENERATION_CONFIG_FILE], problem = _read_table(checkpoint, _GENERATION_CONFIG_FILE)
        yield from problem
    for file, values in said.items():
        for key in _TOKEN_ID_KEYS:
            ids = values.get(key) if isinstance(values.get(key), list) else [values.get(key)]
            outside = [n for n in ids or [] if isinstance(n, int) and not isinstance(n, bool) and n >= rows]
            if outside:
                yield f"{file} has {key} {outside[0]}, but the vocabulary has only {rows} rows"
