"""Finds the model of a checkpoint and binds the stored names to it: of all tensors, or of those that are selected."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl import models
from shardctl.base.errors import SourceError, UnsupportedError, UsageError, format_first_few
from shardctl.base.value import value_class
from shardctl.libraries import schemas
from shardctl.libraries.catalogue import get_schema
from shardctl.models.names.wrapping import remove_wrappers, rename_training, strip_wrappers
from shardctl.storage import read_bytes
from shardctl.tensors.record import SUBTREE
from shardctl.tensors.training import split_state_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from shardctl.checkpoint.name_selection import NameSelection
    from shardctl.models import Model
    from shardctl.options import SourceOptions
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest, Tensor
    from shardctl.tensors.record import CheckpointRecord


@value_class
class BoundCheckpoint:
    """A checkpoint under the names of its model, as far as that is known."""

    source: Source
    manifest: Manifest
    """Under the stored names where there is no model."""
    model: Model | None
    problem: UnsupportedError | None = None
    """Why there is no model although there is a config."""
    misfit: bool = False
    """Whether a model was found, and the names are not its own."""
    unselected: tuple[Tensor, ...] = ()
    """The tensors that were left out before."""


@value_class
class ModelBinder:
    """What says which model a checkpoint is of."""

    source: Source
    config: Mapping[str, Any] | None
    rules: models.RuleFile | None
    source_options: SourceOptions
    record: CheckpointRecord | None

    def bind(self, stored: Manifest, *, lacking: bool = False) -> BoundCheckpoint:
        """Bind the names to the model; `lacking` allows that tensors of it are absent.

        Names that are not those of a model that is known stay as stored, for on one device none is needed. Raises
        SourceError for a tensor that is missing or has a wrong shape.
        """
        misfit, options = False, self.source_options
        borrow, kv_heads = options.rules_from == "transformers", options.kv_heads or "error"
        try:
            if self.config is None and self.rules is None and not borrow:
                return BoundCheckpoint(self.source, stored, None)
            model = models.choose_model(self.config, stored, self.rules, kv_heads=kv_heads, borrow=borrow)
            if model is None:
                return BoundCheckpoint(self.source, stored, None)
            misfit = True
            lacking = lacking or options.complete_from is not None or (self.record is not None and self.record.partial)
            source, readable = self._reduce_ranks(stored)
            model, manifest = self._bind_names(model, source, readable, partial=lacking)
        except UnsupportedError as error:
            return BoundCheckpoint(self.source, stored, None, error, misfit)
        return BoundCheckpoint(source, manifest, model)

    def _bind_names(self, model: Model, source: Source, stored: Manifest, *, partial: bool) -> tuple[Model, Manifest]:
        """Bind the names to the model, also those that transformers converts; returns it with arrays that it needs."""
        config = self.config if stored.dialect is None and model.family else None
        try:
            manifest = schemas.bind_checkpoint(model, stored, functools.partial(read_bytes, source), partial=partial)
        except UnsupportedError:
            if config is None:
                raise
            from shardctl.models.names.hub import bind_other_names

            found = bind_other_names(model, stored, config, partial=partial)
            if found is None:
                raise
            return found
        if config is None or self.record is None:
            return model, manifest
        original = {name for tensor in self.record.tensors.values() for name in tensor.spelling}
        if not all(models.find_canonical_name(model, name) for name in original):
            from shardctl.models.names.hub import add_saved_arrays

            model = add_saved_arrays(model, original, config)
        return model, manifest

    def _reduce_ranks(self, stored: Manifest) -> tuple[Source, Manifest]:
        """Return the source and the manifest in which what every rank has a copy of is their sum or mean."""
        dialect = stored.dialect
        if dialect is None or self.config is None or get_schema(dialect.schema).reduction is None:
            return self.source, stored
        from shardctl.checkpoint.rank_reduction import reduce_rank_arrays  # which needs NumPy

        return reduce_rank_arrays(self.source, stored, self.config)


def bind_selected(binder: ModelBinder, stored: Manifest, selection: NameSelection | None) -> BoundCheckpoint:
    """Bind those tensors that are selected by their stored names if they are a whole model, else all.

    If not all tensors are a model that is known, but those that are selected are some of one, only these are bound.
    """
    chosen = selection.select_stored(stored) if selection is not None and stored.dialect is None else stored
    if len(chosen.tensors) == len(stored.tensors) or not chosen.tensors:
        return binder.bind(stored)
    unselected = tuple(tensor for name, tensor in stored.tensors.items() if name not in chosen.tensors)
    try:
        found = binder.bind(chosen)
    except SourceError:  # they are not a whole model
        found = None
    if found is not None and found.model is not None:
        return replace(found, unselected=unselected)
    everything = binder.bind(stored)
    if everything.problem is None:
        return everything
    some = binder.bind(chosen, lacking=True)
    return replace(some, unselected=unselected) if some.model is not None else everything


def take_subtree(stored: Manifest, subtree: str | None, record: CheckpointRecord | None) -> Manifest:
    """Return the tensors below a prefix, without it, and the states of these.

    What shardctl made of them has no other tensors and lacks the prefix: the other side of a comparison stays as it is.
    Raises UsageError for a prefix below which there is nothing.
    """
    if subtree is None or (record is not None and record.options.get(SUBTREE) == subtree):
        return stored
    if stored.dialect is not None:
        title = get_schema(stored.dialect.schema).title
        raise UsageError(f"--subtree is for names of modules, and these are arrays of {title}", hint="leave it out")
    stored, prefix = remove_wrappers(stored), f"{strip_wrappers(subtree.removesuffix('.'))}."
    tensors = {
        (inner := name.removeprefix(prefix)): replace(tensor, name=inner)
        for name, tensor in stored.tensors.items()
        if name.startswith(prefix)
    }
    if not tensors:
        modules = dict.fromkeys(name.partition(".")[0] for name in stored.tensors)
        raise UsageError(
            f"no tensor is below {prefix!r}",
            hint=f"shardctl inspect SRC lists the prefixes of models; there is {format_first_few(modules)}",
        )
    from shardctl.checkpoint.left_tensors import format_modules  # which no other opening needs

    left = [tensor for name, tensor in stored.tensors.items() if not name.startswith(prefix)]
    told = (f"left out, because --subtree {subtree} was given: {format_modules(left, ())}",) if left else ()
    training = stored.training
    if training is not None:
        owned = {n: t for n, t in training.states.items() if (split_state_name(n) or ("", n))[1].startswith(prefix)}
        groups = tuple(
            replace(group, parameters=tuple(name for name in group.parameters if name.startswith(prefix)))
            for group in training.groups
        )
        kept = replace(training, states=owned, groups=groups)
        training = rename_training(kept, lambda name: name.removeprefix(prefix))
    return replace(stored, tensors=tensors, training=training, warnings=(*stored.warnings, *told))
