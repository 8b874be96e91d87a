"""Fits a vocabulary that Megatron-LM padded to the config: leaves the padding out, or counts it as tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.base.errors import ShardctlError, SourceError, format_first_few
from shardctl.base.value import value_class
from shardctl.models.names.binding import find_canonical_name
from shardctl.storage.bounded_text import RECORD_TEXT, parse_json, read_text
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import narrow_chunk

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.options import SourceOptions
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Chunk, Manifest, Tensor

_VOCAB_SIZE_KEY: Final = "vocab_size"
_TOKENIZER_FILE: Final = "tokenizer.json"
_SMALLEST_UNIT: Final = 64
"""Rows to a multiple of which Megatron-LM pads at least: 128 unless told otherwise, times tp."""


@value_class
class FittedVocabulary:
    """Tensors and a config with one size of the vocabulary."""

    stored: Manifest
    config: Mapping[str, Any] | None
    dropped: int = 0
    """Rows of padding that are left out."""
    remade: bool = False
    """Whether the config says another size than the file does."""


def fit_vocabulary(
    source: Source, stored: Manifest, config: Mapping[str, Any] | None, source_options: SourceOptions
) -> FittedVocabulary:
    """Fit the vocabulary of stored tensors and of the config to each other, if padding is all that differs.

    Raises SourceError, which names both sizes, if the further rows are not Megatron-LM's padding.
    """
    unchanged = FittedVocabulary(stored, config)
    if config is None or stored.dialect is not None or not isinstance(config.get(_VOCAB_SIZE_KEY), int):
        return unchanged
    size = config[_VOCAB_SIZE_KEY]
    padded = _find_padded_tensors(stored, config)
    rows = {tensor.shape[0] for tensor in padded.values()}
    if len(rows) != 1:
        return unchanged
    (found,) = rows
    states = stored.training.states if stored.training is not None else {}
    if states:  # those of the embedding have the padding, too
        return unchanged
    if source_options.keep_padding:
        line = f"vocab_size is raised from {size:,} to {found:,}, because {format_first_few(padded)} keep their padding"
        return FittedVocabulary(
            replace(stored, warnings=(*stored.warnings, line)), {**config, _VOCAB_SIZE_KEY: found}, remade=True
        )
    if source_options.true_vocab is None:
        _require_padding(source, size, found)
    line = (
        f"{found - size:,} of {found:,} rows of {format_first_few(padded)} are padding and are left out, because "
        f"config.json has {size:,} tokens; --keep-padding keeps them"
    )
    tensors = {n: _trim_rows(t, size) if n in padded else t for n, t in stored.tensors.items()}
    return FittedVocabulary(
        replace(stored, tensors=tensors, warnings=(*stored.warnings, line)), config, dropped=found - size
    )


def _find_padded_tensors(stored: Manifest, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Find embeddings and heads with more rows than the config has tokens, by stored name."""
    longer = {name: tensor for name, tensor in stored.tensors.items() if tensor.shape[:1] > (config[_VOCAB_SIZE_KEY],)}
    if not longer:
        return {}
    try:
        model = models.describe_model(models.drop_quantization_config(config))
    except ShardctlError:
        return {}
    found = {}
    for name, tensor in longer.items():
        known = model.tensors.get(find_canonical_name(model, name) or "")
        if known is None or not known.row.dims.startswith("vocab") or known.shape[0] != config[_VOCAB_SIZE_KEY]:
            continue
        if tensor.shape[1:] == known.shape[1:] and tensor.shape[0] > known.shape[0]:
            found[name] = tensor
    return found


def _require_padding(source: Source, size: int, rows: int) -> None:
    """Raise SourceError unless `rows` is what Megatron-LM pads `size` to, and no token needs a further row."""
    unit = rows & -rows  # the largest power of two that divides it
    hint = f"--true-vocab {size} leaves the further rows out, --keep-padding raises vocab_size to {rows}"
    if unit < _SMALLEST_UNIT or rows - size >= unit:
        raise SourceError(
            f"config.json has {size:,} tokens, and the files have {rows:,} rows, to which Megatron-LM does not pad",
            hint=hint,
        )
    highest = _find_highest_token(source)
    if highest is not None and highest >= size:
        raise SourceError(
            f"config.json has {size:,} tokens, and the files have {rows:,} rows, of which {_TOKENIZER_FILE} uses row "
            f"{highest:,}",
            hint=hint,
        )


def _find_highest_token(source: Source) -> int | None:
    """Find the highest id in a tokenizer; None if there is no tokenizer."""
    if _TOKENIZER_FILE not in source.files():
        return None
    said = parse_json(read_text(source, _TOKENIZER_FILE, RECORD_TEXT), _TOKENIZER_FILE, RECORD_TEXT)
    said = said if isinstance(said, dict) else {}
    added, model = said.get("added_tokens"), said.get("model")
    ids = [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    words = model.get("vocab") if isinstance(model, dict) else None
    ids += list(words.values()) if isinstance(words, dict) else [len(words) - 1] if isinstance(words, list) else []
    return max((number for number in ids if isinstance(number, int)), default=None)


def _trim_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return the first rows of a tensor."""
    shape = (rows, *tensor.shape[1:])
    whole = Box.whole(shape)
    chunks: list[Chunk] = []
    for chunk in tensor.chunks:
        common = chunk.box.intersect(whole)
        if common is not None:
            chunks.append(narrow_chunk(chunk, common))
    return replace(tensor, shape=shape, chunks=tuple(chunks))


def pad_as(checkpoint: OpenedCheckpoint, other: OpenedCheckpoint) -> OpenedCheckpoint:
    """Return `other` with the rows of zeros that its class adds when it saves, where `checkpoint` has them."""
    longer = {
        name
        for name, tensor in checkpoint.manifest.tensors.items()
        if (own := other.manifest.tensors.get(name)) is not None and tensor.shape[:1] > own.shape[:1]
    }
    if not longer or other.config is None or other.model is not None:
        return other
    from shardctl.models.names.hub import pad_saved_tensors

    padded = pad_saved_tensors(other.manifest, other.config)
    if any(padded.tensors[name].shape != checkpoint.manifest.tensors[name].shape for name in longer):
        return other
    return replace(other, manifest=padded)
