"""Gives a base the vocabulary and the head of an adapter that has whole embeddings, before the adapter is merged.

PEFT saves the embeddings of a model whose vocabulary was resized, and of one whose embedding or head was trained whole
(utils/save_and_load.py, `get_peft_model_state_dict`); the base that it was made of has fewer rows, or one tensor for
both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardctl import models
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.files.impostors import NEW_EMBEDDINGS
from shardctl.libraries.peft.adapter import INPUT_ROWS, OUTPUT_ROWS
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.text_config import merge_text_config
from shardctl.storage import read_bytes
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, ConstantFill, Region, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.libraries.peft.adapter import Adapter, NewRows

_VOCAB_SIZE_KEY: Final = "vocab_size"
_TIED_EMBEDDINGS_KEY: Final = "tie_word_embeddings"


def fit_base(checkpoint: OpenedCheckpoint, adapter: Adapter) -> tuple[OpenedCheckpoint, Mapping[str, Tensor]]:
    """Return the base with the adapter's vocabulary, and what the adapter has whole by canonical name.

    Tensors of the base that the adapter replaces in another shape have no elements yet. Raises SourceError for a
    vocabulary of which the adapter has one table and not the other, UnsupportedError for a model without a table.
    """
    model, config = checkpoint.model, checkpoint.config
    whole = adapter.tensors.replaced
    if model is None or config is None:
        if adapter.new_rows is not None:
            raise UnsupportedError(f"the rows in {NEW_EMBEDDINGS} need a model that shardctl knows")
        return checkpoint, whole
    names = {name: models.find_weight_name(model, name) for name in whole}
    shared = [name for name in names if names[name] in model.tensors and model.tensors[names[name]].ties]
    changes: dict[str, Any] = {}
    if _is_untied(adapter, shared):
        changes[_TIED_EMBEDDINGS_KEY] = False
    rows = {
        tensor.shape[0]
        for name, tensor in whole.items()
        if names[name] in model.tensors and _is_resized(model.tensors[names[name]].shape, tensor.shape)
    }
    if len(rows) > 1:
        raise SourceError(f"the adapter has vocabularies of {' and '.join(map(str, sorted(rows)))} rows")
    if adapter.new_rows is not None:
        if rows:
            raise UnsupportedError(
                f"the adapter has rows of further tokens in {NEW_EMBEDDINGS}, and whole embeddings as well",
                hint="move the one away that is not meant",
            )
        rows = {_count_tokens(config) + next(iter(adapter.new_rows.tables.values())).shape[0]}
    if rows:
        changes[_VOCAB_SIZE_KEY] = rows.pop()
    if not changes:
        return checkpoint, {names[name]: tensor for name, tensor in _order_shared(whole, shared, model)}
    fitted = _change_config(checkpoint, config, changes)
    assert fitted.model is not None  # noqa: S101 - described anew
    return fitted, {
        models.find_weight_name(fitted.model, name): tensor
        for name, tensor in _order_shared(whole, shared if _TIED_EMBEDDINGS_KEY not in changes else [], model)
    }


def find_base_name(base: OpenedCheckpoint, name: str) -> str:
    """Find the name that a base has for a tensor of the model that was made of it."""
    assert base.model is not None  # noqa: S101 - fitted before
    return name if name in base.manifest.tensors else base.model.aliases.get(name, name)


def find_tables(base: OpenedCheckpoint, fitted: OpenedCheckpoint, rows: NewRows) -> dict[str, Tensor]:
    """Find the tables of tokens to which rows are appended, by canonical name, and the rows of each.

    The tables are the tensors of the `fitted` model that are longer than the `base`'s. Raises SourceError if one of
    them has no rows, or rows of another width; UnsupportedError for a model without tables, and for other rows of a
    head that the embedding is, too.
    """
    if fitted.model is None or base.model is None:
        raise UnsupportedError(f"the rows in {NEW_EMBEDDINGS} need a model that shardctl knows")
    longer = {
        name: tensor
        for name, tensor in fitted.model.tensors.items()
        if name in fitted.manifest.tensors
        and _is_resized(base.manifest.tensors[find_base_name(base, name)].shape, tensor.shape)
    }
    found: dict[str, Tensor] = {}
    for name, tensor in longer.items():
        key = OUTPUT_ROWS if tensor.row.tie and not tensor.ties else INPUT_ROWS
        own = rows.tables.get(key)
        if own is None:
            raise SourceError(f"{NEW_EMBEDDINGS} has no {key} for {name}", hint="the file may be incomplete")
        if own.shape[1:] != tensor.shape[1:]:
            raise SourceError(
                f"{key} of {NEW_EMBEDDINGS} is {list(own.shape)}, but {name} has rows of {tensor.shape[-1]}",
                hint="it may belong to another model",
            )
        found[name] = own
    if {id(own) for own in found.values()} != {id(own) for own in rows.tables.values()} and not _are_equal(rows):
        raise UnsupportedError(
            f"the base has one tensor for the embedding and the head, and {NEW_EMBEDDINGS} has other rows for each",
            hint="give a base with tie_word_embeddings false, which has both",
        )
    return found


def _are_equal(rows: NewRows) -> bool:
    """Return whether the rows of the embedding and of the head are the same bytes."""
    data = []
    for tensor in rows.tables.values():
        (chunk,) = tensor.chunks
        assert isinstance(chunk.where, Region)  # noqa: S101 - a tensor of safetensors
        data.append((tensor.dtype, read_bytes(rows.source, chunk.where.file, chunk.where.offset, tensor.nbytes)))
    return len(data) == 1 or data[0] == data[1]


def _count_tokens(config: Mapping[str, Any]) -> int:
    return ModelConfig(merge_text_config(config)).size(_VOCAB_SIZE_KEY)


def _order_shared(whole: Mapping[str, Tensor], shared: list[str], model: models.Model) -> list[tuple[str, Tensor]]:
    """List whole tensors; of two for one tied weight, the first name's comes last and counts."""
    return sorted(whole.items(), key=lambda item: item[0] in shared and item[0] in model.tensors)


def _is_untied(adapter: Adapter, shared: list[str]) -> bool:
    """Return whether an embedding and a head that the base shares are each its own after training.

    A model that only has more rows is saved with both, and they are the same.
    """
    saved = adapter.settings.modules.saved
    return not adapter.settings.tied and any(saved.find_entry(name.rpartition(".")[0]) is not None for name in shared)


def _is_resized(base: tuple[int, ...], own: tuple[int, ...]) -> bool:
    return base != own and base[1:] == own[1:]


def _change_config(
    checkpoint: OpenedCheckpoint, config: Mapping[str, Any], changes: Mapping[str, Any]
) -> OpenedCheckpoint:
    """Return a checkpoint with another vocabulary, or without a tie, whose tensors have the shapes that follow."""
    for key in changes:
        inner = config.get("text_config")
        if isinstance(inner, dict) and (key in inner or key not in config):
            config = {**config, "text_config": {**inner, key: changes[key]}}
        if key in config or not isinstance(inner, dict):
            config = {**config, key: changes[key]}
    old = checkpoint.model
    assert old is not None  # noqa: S101 - asked before
    shared = any(
        part.shared for t in old.tensors.values() for cuts in t.spec.cuts for cut in cuts for part in cut.sections
    )
    model = models.choose_model(config, checkpoint.manifest, kv_heads="replicate" if shared else "error")
    if model is None:
        raise UnsupportedError("a model without a table can have no other vocabulary")
    tensors = {}
    have = checkpoint.manifest.tensors
    for name, described in model.tensors.items():
        first = have.get(name) or have.get(old.aliases.get(name, ""))
        if first is None:
            continue
        tensor = replace(first, name=name, ties=described.ties)
        if first.name != name:
            tensor = replace(tensor, spelling=())
        if tensor.shape != described.shape and not described.free:
            chunk = Chunk(Box.whole(described.shape), first.dtype, ConstantFill(bytes(first.dtype.unit_bytes)), name)
            tensor = replace(tensor, shape=described.shape, chunks=(chunk,))
        tensors[name] = tensor
    return replace(
        checkpoint,
        manifest=replace(checkpoint.manifest, tensors=tensors),
        model=model,
        config=config,
        remade_config=True,
    )
