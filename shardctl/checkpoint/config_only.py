"""Describes a model without weights: its tensors, as its `config.json` alone implies them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardctl import models
from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UnsupportedError
from shardctl.base.extras import format_install_command
from shardctl.checkpoint.config_files import CONFIG
from shardctl.libraries.catalogue import FORMATS
from shardctl.libraries.files.file_names import INDEX_SUFFIX, WEIGHT_SUFFIXES
from shardctl.libraries.files.impostors import FOREIGN, list_unfinished_downloads
from shardctl.libraries.reader import find_given_file
from shardctl.models.names.hub.conversion_table import find_class_name, knows_class
from shardctl.tensors.manifest import Manifest, Tensor
from shardctl.tensors.record import RECORD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models import KvHeads, Model, RuleFile
    from shardctl.storage import Source

FORMAT: Final = "config"
"""What a manifest without weights has as its format."""
_WEIGHT_FILE_SUFFIXES: Final = (*WEIGHT_SUFFIXES, *FOREIGN)
"""Suffixes of files that hold weights, in formats that are read and in others."""
_EXPERT_STACK_NDIM: Final = 3
"""Dims of the array in which some families have one matrix of all experts."""
_MAX_CONFIG_BYTES: Final = 10_000_000
"""Bytes of a config; real ones have a few thousand, and a vocabulary has millions."""
_ORBAX_MARKER_FILES: Final = ("manifest.ocdbt", "/.zarray", "/zarr.json")
"""Files by which Orbax's arrays are known, which have a folder each, or are in a database."""

_CHILD_MODULE: Final = "shardctl.running.meta_model"
_MAX_CHILD_SECONDS: Final = 300
"""Seconds that building a class may take; importing torch and transformers takes seven of a free processor, most models
one more."""
_MAX_CHILD_MEMORY: Final = 4 << 30
"""Bytes that building a class may take; measured 0.4 GB to 0.7 GB, because the meta device holds no weights."""

UNCOUNTED_LAYERS: Final = "are not counted, because not every checkpoint has them"
"""How the warning of multi-token prediction layers ends, which a plan that counts them leaves out."""


def find_config_file(source: Source) -> str | None:
    """Find the file that could be the config of a model without weights: the source, or a file of a bare directory.

    Whether it *is* a config is for the reader to say. None where weights are, were, or are being fetched: a directory
    that shardctl wrote and that lost its files is damaged, and no description of a model.
    """
    given = find_given_file(source)
    files = source.files()
    if given is not None:
        fits = given.endswith(".json") and not given.endswith(INDEX_SUFFIX) and given != RECORD
        return given if fits and files[given].size <= _MAX_CONFIG_BYTES else None
    if CONFIG not in files or RECORD in files:
        return None
    weights = [path for path in files if path.endswith((*_WEIGHT_FILE_SUFFIXES, *_ORBAX_MARKER_FILES))]
    own = any("/" not in path for path in weights)
    if own or (weights and any(format_.detect(source) for format_ in FORMATS)):  # trainers keep them in folders
        return None
    return None if any(list_unfinished_downloads(source, suffix) for suffix in _WEIGHT_FILE_SUFFIXES) else CONFIG


def is_model_config(config: Mapping[str, object]) -> bool:
    """Return whether a JSON object is a model's config, as far as its keys tell."""
    return bool(config.get("architectures") or config.get("model_type"))


def build_model_from_config(
    source: Source, config: Mapping[str, object], rules: RuleFile | None = None, *, kv_heads: KvHeads = "error"
) -> tuple[Model, Manifest]:
    """Build the model of a config, and a manifest of its tensors that are stored nowhere.

    `rules` say instead how tensors are cut. Tensors have the types that the config declares, and the arrays of
    quantized weights those that their method usually has. What only some checkpoints hold (buffers, layers that predict
    further tokens) is not counted; of such layers a warning says so, because they are large.
    Raises UnsupportedError for an architecture that is not known.
    """
    try:
        model = models.describe_model(config, kv_heads=kv_heads)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error.message}, and {source.name} has no weights from which its tensors could be derived",
            hint="without weights, only a model that shardctl knows can be planned; docs/models.md lists them",
        ) from error
    manifest = Manifest(FORMAT, {t.name: Tensor(t.name, t.dtype, t.shape, (), t.ties) for t in model.own()}, {})
    if rules is not None:
        model = rules.over(model, manifest)
    return model, replace(
        manifest,
        warnings=(
            *model.warnings,
            *_note_absent_files(source),
            *_note_untyped(config),
            *_note_assumed(config),
            *_note_stacks(model),
            *_note_uncounted(model),
        ),
    )


def build_manifest_from_class(source: Source, config: Mapping[str, object]) -> Manifest:
    """Build a manifest of the tensors that transformers' class makes of a config that no table knows.

    The class is built on the meta device, in a process of its own with limits on time and memory; code of the Hub is
    never run. Raises UnsupportedError if it cannot be built.
    """
    from shardctl.base.limited_child import run_limited_child

    read = models.ModelConfig(config)
    architecture = read.architecture()
    title = architecture or read.text("model_type", "") or "a model without a name"
    kind = find_class_name(architecture, config) if knows_class(architecture, config) else architecture
    missing = next((name for name in ("torch", "transformers") if find_spec(name) is None), None)
    found: Mapping[str, Any] | str
    if missing is not None:
        found, hint = f"{missing} is not installed", format_install_command("verify")
    elif models.find_quantization_config(config) is not None:
        found, hint = "its weights are quantized in a way that only files show", "plan a directory with the weights"
    else:
        request = {"class": kind, "config": dict(config), "dtype": read.dtype().torch}
        found = run_limited_child(
            _CHILD_MODULE,
            json.dumps(request),
            memory=_MAX_CHILD_MEMORY,
            seconds=_MAX_CHILD_SECONDS,
            task=f"building {kind}",
        )
        hint = "plan a directory with the weights, whose headers say as much"
    problem = found if isinstance(found, str) else found.get("problem")
    if isinstance(found, str) or problem is not None:
        raise UnsupportedError(f"no table knows {title}, and transformers cannot describe it: {problem}", hint=hint)
    tensors = {
        name: Tensor(name, BY_NAME[dtype], tuple(shape), (), tuple(ties))
        for name, dtype, shape, ties in found["tensors"]
    }
    other = f" with {kind}, the class for its model type" if kind != architecture else ""
    note = (
        f"no table knows {title}: its {len(tensors):,} tensors are those that transformers {found['transformers']} "
        f"makes of the config{other}, on the meta device; it cannot tell which further tensors the files on the Hub "
        "have, such as multi-token prediction layers"
    )
    warnings = (note, *_note_absent_files(source), *_note_untyped(config))
    return models.order_ties(Manifest(FORMAT, tensors, {}, warnings=warnings))


def _note_absent_files(source: Source) -> list[str]:
    indexes = sorted(path for path in source.files() if "/" not in path and path.endswith(INDEX_SUFFIX))
    return [f"none of the files that {index} names exists; only {CONFIG} describes the model" for index in indexes]


def _note_untyped(config: Mapping[str, object]) -> list[str]:
    """Return a warning where nothing says how many bytes an element has."""
    read = models.ModelConfig(config)
    if read.declared() is not None:
        return []
    return [f"{CONFIG} names no dtype; {read.dtype().name} is assumed unless --dtype gives another"]


def _note_assumed(config: Mapping[str, object]) -> list[str]:
    """Return a warning about sizes that the config leaves to its class."""
    assumed = models.list_assumed_values(config)
    said = ", ".join(f"{key} = {value}" for key, value in assumed.items() if not isinstance(value, dict))
    return [f"{CONFIG} lacks some keys; {said} is assumed, as by its class in transformers"] if said else []


def _note_stacks(model: Model) -> list[str]:
    """Return a warning about experts that are stacked in one array, which the methods to quantize do not speak of."""
    if not model.encodings:
        return []
    size = sum(prod(t.shape) for t in model.own() if len(t.shape) == _EXPERT_STACK_NDIM and t.spec.of_expert)
    return [f"the experts, {size:,} elements in stacks, are counted as if they were not quantized"] if size else []


def _note_uncounted(model: Model) -> list[str]:
    """Return a warning about layers that predict further tokens, which no state dict of transformers has."""
    extra = [Tensor(t.name, t.dtype, t.shape, ()) for t in model.tensors.values() if t.row.optional]
    if not extra:
        return []
    size = sum(t.size for t in extra)
    return [(f"{len(extra):,} tensors that predict further tokens, {size:,} elements, {UNCOUNTED_LAYERS}")]
