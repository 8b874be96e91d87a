"""Opens a checkpoint: finds its format, its model, and the canonical name of each tensor.

>>> from pathlib import Path
>>> from tempfile import TemporaryDirectory
>>> header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
>>> with TemporaryDirectory() as folder:
...     _ = Path(folder, "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
...     with open_checkpoint(folder) as checkpoint:
...         print(checkpoint.manifest.format, list(checkpoint.manifest.tensors))
safetensors ['w']
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

from shardctl import models
from shardctl.base.errors import MissingTensorsError, SourceError, UnsupportedError, UsageError, format_first_few
from shardctl.base.garbage_collection import pause_garbage_collection
from shardctl.checkpoint.config_files import CONFIG, ConfigReading, holds_config, read_config
from shardctl.checkpoint.described_source import describe_source, prepare_derivation, refuse_warnings
from shardctl.checkpoint.model_binding import ModelBinder, bind_selected, take_subtree
from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
from shardctl.checkpoint.pipeline_parts import check_pipeline_source, is_pipeline
from shardctl.libraries import registry as formats
from shardctl.libraries.arrays.adapter_arrays import is_adapter_alone
from shardctl.libraries.catalogue import get_schema
from shardctl.libraries.files.choice import list_unread_shards
from shardctl.libraries.files.extra_tensors import read_extra_file
from shardctl.libraries.files.impostors import ADAPTER_CONFIG, ADAPTERS, holds_adapter, warn_of_adapter
from shardctl.libraries.reader import find_given_file
from shardctl.models.names.torchtitan_names import leave_joined_states
from shardctl.models.names.wrapping import remove_wrappers
from shardctl.options import SourceOptions
from shardctl.storage.addresses import open_source
from shardctl.storage.bounded_text import RECORD_TEXT, read_text
from shardctl.storage.entry_limit import limit_entries
from shardctl.storage.excluded_names import exclude_names
from shardctl.tensors.manifest import Tensor, first_byte
from shardctl.tensors.record import RECORD, UNTIED, CheckpointRecord, parse_record
from shardctl.tensors.training import SETTINGS, separate_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from shardctl.checkpoint.name_selection import NameSelection
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest


_LOADED_WITH_ADAPTER: Final = frozenset({"safetensors", "torch"})
"""Formats that transformers loads, with an adapter that lies next to them."""
_FORMATS_WITH_TIES: Final = frozenset({"safetensors", "torch"})
"""Formats of the Hub: what a file has under two names there is two weights, or known as one storage."""
_TIED_EMBEDDINGS_KEY: Final = "tie_word_embeddings"

__all__ = ["OpenedCheckpoint", "in_file_order", "open_checkpoint"]


@contextmanager
def open_checkpoint(
    path: str | Path,
    source_options: SourceOptions | None = None,
    *,
    before: Callable[[Source, CheckpointRecord], None] | None = None,
    count: Callable[[int], None] | None = None,
    selection: NameSelection | None = None,
) -> Iterator[OpenedCheckpoint]:
    """Open a checkpoint for the length of a `with` block; reads headers and small JSON files only.

    `before` is called with the record, if there is one, before any header is read, and `count` with the number of
    tensors so far, before anything is made of a header: what they raise is raised here. If the tensors that `selection`
    takes by their stored names are a whole model, the others are left out; one that cannot be read is passed over, with
    a warning, if it is excluded. The caller selects among canonical names.
    """
    source, source_options = open_source(path), source_options or SourceOptions()
    applied = ""
    if source_options.apply:
        from shardctl.checkpoint.delta_source import apply_deltas

        source = patched = apply_deltas(source, source_options.apply)
        applied = patched.describe()
    if count is not None:
        limit_entries(source, count)
    if selection is not None:
        exclude_names(source, selection.exclude)
    with ExitStack() as stack:
        stack.callback(source.close)
        checkpoint = _read_checkpoint(source, source_options, before, selection)
        checkpoint = replace(checkpoint, applied=applied) if applied else checkpoint
        if source_options.complete_from is not None:
            from shardctl.checkpoint.completing import add_auxiliary_files, complete_checkpoint, holds_files_only

            base = open_source(source_options.complete_from)
            stack.callback(base.close)
            if holds_files_only(base):
                checkpoint = add_auxiliary_files(checkpoint, base)
                stack.enter_context(checkpoint.resources)
                yield checkpoint
                return
            others = replace(source_options, complete_from=None, config=None, subtree=None, apply=())
            checkpoint = complete_checkpoint(checkpoint, _read_checkpoint(base, others))
        stack.enter_context(checkpoint.resources)
        yield checkpoint


def in_file_order(pairs: list[tuple[Tensor, Tensor]], first: OpenedCheckpoint, second: OpenedCheckpoint) -> None:
    """Sort tensors of two checkpoints as the files have them of the one that is hashed while it is read, if one is."""
    side = 1 if second.source.promised and not first.source.promised else 0
    pairs.sort(key=lambda pair: first_byte(pair[side]))


def _read_record(source: Source) -> CheckpointRecord | None:
    if find_given_file(source) == RECORD:
        raise SourceError(f"{source.name} is the record of a checkpoint", hint="give the directory that it lies in")
    return parse_record(read_text(source, RECORD, RECORD_TEXT)) if RECORD in source.files() else None


def _scan_container(source: Source, source_options: SourceOptions) -> Manifest:
    """Return what the container holds, states apart, with warnings of what may go wrong with reading it."""
    if source_options.described:
        source.set_headers_only()
    stored = formats.scan_checkpoint(
        source,
        override=source_options.container,
        weights=source_options.weights,
        prefer_index=source_options.prefer_index,
        etp=source_options.source_etp,
    )
    stored, cautions = read_extra_file(source, stored), source.cautions()
    if stored.format in _LOADED_WITH_ADAPTER and stored.files.keys().isdisjoint(ADAPTERS):
        cautions = (*cautions, *warn_of_adapter(source))
    stored = replace(stored, warnings=(*stored.warnings, *cautions)) if cautions else stored
    if stored.training is not None:
        return stored
    return separate_states(stored, read_text(source, SETTINGS, RECORD_TEXT) if SETTINGS in source.files() else None)


@pause_garbage_collection()
def _read_checkpoint(
    source: Source,
    source_options: SourceOptions,
    before: Callable[[Source, CheckpointRecord], None] | None = None,
    selection: NameSelection | None = None,
) -> OpenedCheckpoint:
    record = _read_record(source)
    if before is not None and record is not None:
        before(source, record)
    described = describe_source(source, source_options)
    if described is not None:
        return described
    stored = _scan_container(source, source_options)
    adapter = _open_adapter(source, stored, record, source_options)
    if adapter is not None:
        return adapter
    check_pipeline_source(stored, source_options)
    found = ConfigReading(None) if is_pipeline(stored) else read_config(source, source_options.config)
    config, stored = found.values, replace(stored, warnings=(*stored.warnings, *found.warnings))
    own = stored.own_config
    if own is not None and (config is None or (own.replaces and source_options.config is None)):
        config = own.values
        stored = replace(stored, warnings=(*stored.warnings, *own.warnings))
    stored = take_subtree(stored, source_options.subtree, record)
    said, config = config, _set_vocabulary(config, stored, source_options)
    dropped, remade = 0, stored.dialect is None and config is not said
    if source_options.config is not None and not is_pipeline(stored) and CONFIG in source.files():
        remade = remade or not holds_config(source, config)
    if source_options.unpadded and record is None:
        from shardctl.checkpoint.padded_vocabulary import fit_vocabulary

        fitted = fit_vocabulary(source, stored, config, source_options)
        stored, config, dropped, remade = fitted.stored, fitted.config, fitted.dropped, remade or fitted.remade
    untied = config is not None and (source_options.untied if record is None else UNTIED in record.options)
    if config is not None and untied:
        config, remade = _untie_head(config), remade or record is None
    checkpoint = _bind_checkpoint(source_options, record, selection, source, stored, config)
    if dropped or remade:
        return replace(checkpoint, dropped_rows=dropped, remade_config=remade, untied=untied)
    return checkpoint


def _bind_checkpoint(
    source_options: SourceOptions,
    record: CheckpointRecord | None,
    selection: NameSelection | None,
    source: Source,
    stored: Manifest,
    config: Mapping[str, Any] | None,
) -> OpenedCheckpoint:
    """Bind what a container holds to the model of a config."""
    stored, rules = _apply_rule_names(stored, source_options, record)
    binder = ModelBinder(source, config, rules, source_options, record)
    try:
        bound = bind_selected(binder, remove_wrappers(stored), selection)
    except MissingTensorsError as error:
        unread = list_unread_shards(source, stored.files)
        if not unread:
            raise
        raise MissingTensorsError(
            f"{error.message}; {format_first_few(unread)}, which the index does not name, may hold them",
            hint="the index is incomplete: move it away, and every file is read by its header",
        ) from error
    source, manifest, model, problem = bound.source, bound.manifest, bound.model, bound.problem
    quantization = None
    if model is None:
        from shardctl.models.quantization import stored_formats

        quantization = stored_formats.find_stored_quantization(stored, config)
        if quantization is not None:
            problem = stored_formats.explain_stored_quantization(quantization)
        models.refuse_flat_parameters(manifest)
        _refuse_unbound(manifest, problem, source_options)
        manifest = _read_saved_arrays(manifest, record, config)
        manifest = models.order_ties(_merge_known_ties(config, leave_joined_states(manifest)))
    if record:
        manifest = _apply_record(manifest, record, model)
    unknown = model is None and not bound.misfit and manifest.dialect is None
    untabled = cache(partial(models.build_untabled_model, config, manifest)) if unknown else None
    refuse_warnings(manifest, source_options)
    return OpenedCheckpoint(
        source,
        stored,
        manifest,
        model,
        problem,
        config,
        record,
        untabled=untabled,
        derived=prepare_derivation(config, untabled, source_options),
        allow_unverified=source_options.allow_unverified,
        unselected=bound.unselected,
        subtree=source_options.subtree or "",
        ruled=rules is not None or source_options.rules_from == "transformers",
        stored_quantization=quantization,
        rebind=partial(_bind_checkpoint, source_options, record, selection) if quantization is not None else None,
    )


def _read_saved_arrays(stored: Manifest, record: CheckpointRecord | None, config: Mapping[str, Any] | None) -> Manifest:
    """Return `stored` with the tensors that a record has in place of the arrays that were saved for the Hub."""
    if record is None or config is None or record.options.get("names") != "hub":
        return stored
    from shardctl.models.names.hub import take_saved_arrays_apart

    return take_saved_arrays_apart(
        stored, [Tensor(name, t.dtype, t.shape, (), t.ties) for name, t in record.tensors.items()], config
    )


def _merge_known_ties(config: Mapping[str, Any] | None, stored: Manifest) -> Manifest:
    """Return `stored` with the weights that a class ties as one, where the container stores each name by itself.

    Names that an earlier version of the class had are those of today.
    """
    if config is None or stored.format in _FORMATS_WITH_TIES:
        return stored
    from shardctl.models.names.hub import merge_tied_tensors, read_older_names

    return merge_tied_tensors(config, read_older_names(stored, config))


def _open_adapter(
    source: Source, stored: Manifest, record: CheckpointRecord | None, source_options: SourceOptions
) -> OpenedCheckpoint | None:
    """Open an adapter by itself, as PEFT or Megatron-Bridge stores it; None for anything else."""
    if is_adapter_alone(stored):  # then nothing is PEFT's
        from shardctl.checkpoint.adapters.bridge_adapter import open_bridge_adapter

        return open_bridge_adapter(source, stored, source_options)
    named = not stored.files.keys().isdisjoint(ADAPTERS)
    if ADAPTER_CONFIG not in source.files() or not (named or holds_adapter(stored.tensors)):
        return None
    from shardctl.checkpoint.adapters.adapter_checkpoint import open_adapter_checkpoint

    adapter = open_adapter_checkpoint(source, stored, record, source_options)
    return adapter if record is None else replace(adapter, manifest=_apply_record(adapter.manifest, record, None))


def _apply_rule_names(
    stored: Manifest, source_options: SourceOptions, record: CheckpointRecord | None
) -> tuple[Manifest, models.RuleFile | None]:
    """Return what is stored under the names that a rule file gives, and the file, if it also says how tensors are cut.

    What shardctl made with that file has those names already: the other side of a comparison.
    """
    rules = models.load_rules(source_options.rules) if source_options.rules else None
    if rules is None or rules.names is None:
        return stored, rules
    expressions = [line.build_expression() for line in rules.names.lines]
    made = record is not None and not any(each.fullmatch(name) for name in stored.tensors for each in expressions)
    return stored if made else rules.names.apply_names(stored), rules if rules.cuts else None


def _untie_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model whose head is a weight of its own; submodels that mention the tie say the same."""
    inner = {
        key: {**value, _TIED_EMBEDDINGS_KEY: False}
        for key, value in config.items()
        if isinstance(value, dict) and _TIED_EMBEDDINGS_KEY in value
    }
    return {**config, **inner, _TIED_EMBEDDINGS_KEY: False}


def _set_vocabulary(
    config: Mapping[str, Any] | None, stored: Manifest, source_options: SourceOptions
) -> Mapping[str, Any] | None:
    """Return the config, with `--true-vocab`.

    Raises UsageError where that means nothing, SourceError where it is needed.
    """
    if source_options.true_vocab is not None:
        if stored.dialect is None and config is not None and config.get("vocab_size") == source_options.true_vocab:
            return config  # the other side of a comparison
        if stored.dialect is not None and config is None:
            raise UsageError(
                "--true-vocab changes the model's config, and these files say too little to make one of",
                hint="give the config of the model with --config PATH; it has the vocabulary's size",
            )
        if config is None or (stored.dialect is None and not source_options.unpadded):
            raise UsageError(
                "--true-vocab is for checkpoints that only say how many rows the vocabulary was padded to",
                hint="leave it out",
            )
        return {**config, "vocab_size": source_options.true_vocab}
    if stored.dialect is not None and config is not None and config.get("vocab_size", 0) is None:
        if source_options.unbound:
            return None
        raise SourceError(
            "the files do not say how many tokens the vocabulary has, only to how many rows it was padded",
            hint="give the number with --true-vocab N, or the model's config with --config PATH",
        )
    return config


def _refuse_unbound(manifest: Manifest, problem: UnsupportedError | None, source_options: SourceOptions) -> None:
    """Raise if arrays of another library's making would be taken for tensors of a model."""
    if manifest.dialect is None or source_options.unbound:
        return
    if problem is not None:
        raise problem
    title = get_schema(manifest.dialect.schema).title
    raise SourceError(
        f"without a config, nothing says which model's tensors are in these arrays of {title}",
        hint="give the model's config.json of transformers with --config PATH",
    )


def _apply_record(manifest: Manifest, record: CheckpointRecord, model: models.Model | None) -> Manifest:
    """Return the manifest with what only the record remembers: which arrays are one tensor, and their original names.

    Raises SourceError for a record that calls a tensor of the model by a name that the model does not have.
    """
    names = _map_single_tensors(record)
    if model is None:  # a model merges its ties; without one, the record alone knows that arrays are one tensor
        names |= {tie: name for name, tensor in record.tensors.items() for tie in tensor.ties}
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in manifest.tensors.items():
        known = name in record.tensors
        if not known and model is not None and name in model.tensors and names.get(name, name) not in model.tensors:
            raise SourceError(
                f"{RECORD} calls {name} {names[name]!r:.200}, but the model has no tensor of that name",
                hint=f"remove {RECORD} to read the files without it; its digests are lost then",
            )
        groups.setdefault(name if known else names.get(name, name), []).append(tensor)
    tensors = {}
    for name, group in groups.items():
        merged = replace(group[0], name=name, chunks=tuple(chunk for tensor in group for chunk in tensor.chunks))
        if name in record.tensors:
            recorded = record.tensors[name]
            merged = replace(merged, ties=recorded.ties, spelling=recorded.spelling)
        tensors[name] = merged
    return replace(manifest, tensors=tensors)


def _map_single_tensors(record: CheckpointRecord) -> dict[str, str]:
    """Map the name of each stored array to the one tensor that it holds, if it holds one."""
    held: dict[str, set[str]] = {}
    for name, tensor in record.tensors.items():
        for stored in tensor.stored:
            held.setdefault(stored.name, set()).add(name)
    return {array: next(iter(tensors)) for array, tensors in held.items() if len(tensors) == 1}
