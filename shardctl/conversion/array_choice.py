"""Chooses the arrays that hold the tensors of a conversion, and their names: those of a class, or of a trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardctl.base.errors import UsageError
from shardctl.conversion.optimizer_states import (
    build_state_fusions,
    get_states,
    name_state_arrays,
    spread_shared_states,
)
from shardctl.libraries.arrays.form import (
    add_state_places,
    choose_form,
    choose_hub_form,
    choose_trainer_form,
    join_trainer_forms,
)
from shardctl.libraries.consumers.profile import find_profile
from shardctl.models.families import load_family
from shardctl.models.names.automodel_names import AUTOMODEL, build_saved_arrays, group_parameters
from shardctl.models.names.hub import (
    HUB_NAMES,
    SAVED_AS,
    SAVED_FOR_NOBODY,
    build_hub_arrays,
    find_conversions,
    list_state_arrays,
    list_unsaved_names,
    pad_saved_tensors,
)
from shardctl.models.names.maxtext_names import MAXTEXT, build_maxtext_arrays
from shardctl.models.names.torchtitan_names import TRAINER, build_trainer_arrays, join_parameters, list_balances
from shardctl.models.tables.config import ModelConfig
from shardctl.tensors.record import SAVED_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.libraries.arrays.form import ArrayForm
    from shardctl.libraries.writer import Layout
    from shardctl.models import Model
    from shardctl.models.tables.fusion import TensorFusion
    from shardctl.options import ReshardOptions
    from shardctl.tensors.manifest import Manifest


class _TrainerArrays(NamedTuple):
    """What `--names` means for a trainer."""

    layout: str
    """The one that it reads."""
    build: Callable[[Model, Collection[str]], dict[str, TensorFusion]]
    """Builds the arrays of a model's weights, if so many tensors are there."""
    join: Callable[[Model, Mapping[str, TensorFusion]], dict[str, TensorFusion]]
    """Builds of these the arrays of its parameters, of which the optimizer has states."""


_TRAINER_ARRAYS: Final = {
    TRAINER: _TrainerArrays("dcp", build_trainer_arrays, join_parameters),
    AUTOMODEL: _TrainerArrays("dcp", build_saved_arrays, group_parameters),
    MAXTEXT: _TrainerArrays("orbax", build_maxtext_arrays, lambda _, arrays: dict(arrays)),
}
"""By what `--names` says."""
_OTHER_STATES: Final = frozenset({"accelerate", "veomni"})
"""Trainers whose arrays are those of transformers, in a state that has another name for the optimizer."""
NAMES: Final = frozenset({HUB_NAMES, "transformers", "keep", *_OTHER_STATES, *_TRAINER_ARRAYS})
"""What `--names` takes."""
HUB_LAYOUT: Final = "hf"
"""The layout that can have the names of the Hub."""
_HUB_FORMATS: Final = frozenset({"safetensors", "diffusers"})
"""Formats of files on the Hub; those of all others have the names of a class, or of a library, by no choice."""
_PICKLED_ON_HUB: Final = "pytorch_model"
"""How pickles on the Hub are called, in which a tied weight may have each of its names."""


_UNKNOWN_ELSEWHERE: Final = (
    f"save_pretrained of transformers {SAVED_AS} calls Kimi K2.5's layers language_model.model.blocks, which neither "
    "files of the Hub nor engines do; leave --names out to write the names of the Hub"
)


def _needs_class_names(checkpoint: OpenedCheckpoint) -> bool:
    """Return whether a text model that was split off can be loaded by the names of its class alone."""
    family = load_family(checkpoint.model.family) if checkpoint.part == "text" and checkpoint.model else None
    return family is not None and family.class_names_only


def decide_names(
    checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, layout: Layout, have: Manifest
) -> ReshardOptions:
    """Return the options with the names of the Hub where none were asked for and a run's files have those of a class.

    Otherwise the default stays: the names of transformers' class, or in `hf` those of the source.
    """
    config = checkpoint.config
    if reshard_options.names is not None or layout.name != HUB_LAYOUT or config is None or checkpoint.adapter:
        return reshard_options
    architecture = ModelConfig(config).architecture()
    if architecture in SAVED_FOR_NOBODY:
        return reshard_options
    if checkpoint.record is not None and checkpoint.model is None:
        said = checkpoint.record.options
        if HUB_NAMES in {said.get("names"), said.get(SAVED_NAMES)}:  # read as the names of the class
            return replace(reshard_options, names=HUB_NAMES)
    kind, files = _find_original_files(checkpoint)
    if kind in _HUB_FORMATS and reshard_options.consumer is None:  # whose names someone chose, and the class loads
        return reshard_options
    pickled = kind == "torch" and all(PurePosixPath(path).name.startswith(_PICKLED_ON_HUB) for path in files)
    known = architecture and _holds_class_names(checkpoint, config, have, keeps_ties=pickled or kind in _HUB_FORMATS)
    return replace(reshard_options, names="hub") if known else reshard_options


def choose_arrays(
    checkpoint: OpenedCheckpoint,
    reshard_options: ReshardOptions,
    layout: Layout,
    have: Manifest,
    dtypes: Mapping[str, DType],
) -> tuple[Manifest, ArrayForm]:
    """Choose the arrays that hold the tensors, and their names; those of states follow."""
    if reshard_options.names in _TRAINER_ARRAYS:
        trainer, asked = _TRAINER_ARRAYS[reshard_options.names], reshard_options.names
        if layout.name != trainer.layout or reshard_options.experts != "keep":
            raise UsageError(
                f"--names {asked} is for a model in --to {trainer.layout}, whose experts it stacks",
                hint=f"add --to {trainer.layout}, and leave --experts out",
            )
        model = checkpoint.require_model(f"--names {asked}")
        have = spread_shared_states(have, model.fusions)
        weights = {name: tensor for name, tensor in have.tensors.items() if name not in get_states(have)}
        stored = trainer.build(model, weights)
        form = choose_trainer_form(replace(have, tensors=weights), stored, dtypes, asked)
        joined = trainer.join(model, stored)
        trained = choose_trainer_form(replace(have, tensors=weights), joined, dtypes, asked)
        trained = add_state_places(trained, build_state_fusions(have, joined), dtypes)
        have, named = name_state_arrays(have, trained, joined)
        return have, join_trainer_forms(form, named, list_balances(model) if asked == TRAINER else {})
    if reshard_options.names == HUB_NAMES:
        if checkpoint.config is not None and checkpoint.model is None:
            have = pad_saved_tensors(have, checkpoint.config)
        if checkpoint.config is not None and ModelConfig(checkpoint.config).architecture() in SAVED_FOR_NOBODY:
            have = replace(have, warnings=(*have.warnings, _UNKNOWN_ELSEWHERE))
        return have, _choose_hub_arrays(checkpoint, reshard_options, layout, have, dtypes)
    fusions = _select_fusions(checkpoint, reshard_options)
    arrays = choose_form(
        have,
        {**fusions, **build_state_fusions(have, fusions)},
        dtypes,
        experts=reshard_options.experts,
        spelled=reshard_options.names == "keep"
        or (reshard_options.names is None and layout.source_names and not _needs_class_names(checkpoint)),
    )
    if reshard_options.names in _OTHER_STATES:
        if layout.name != "dcp":
            raise UsageError(f"--names {reshard_options.names} is for --to dcp", hint="add --to dcp")
        arrays = replace(arrays, trainer=reshard_options.names)
    return name_state_arrays(have, arrays, fusions)


def _select_fusions(checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions) -> Mapping[str, TensorFusion]:
    """Select the arrays that could hold several tensors; raises UsageError if --experts has none to decide about."""
    if reshard_options.experts == "keep":
        return checkpoint.model.fusions if checkpoint.model else {}
    model = checkpoint.require_model(f"--experts {reshard_options.experts}")
    if all(len(fusion.tensors) == 1 for fusion in model.fusions.values()):
        raise UsageError(
            f"--experts {reshard_options.experts} needs experts in two forms, and "
            f"{model.architecture or 'this model'} has one",
            hint="leave --experts out",
        )
    return model.fusions


def _holds_class_names(
    checkpoint: OpenedCheckpoint, config: Mapping[str, Any], have: Manifest, *, keeps_ties: bool
) -> bool:
    """Return whether tensors have names or arrays of a class's state dict that the class does not save.

    With `keeps_ties`, a tied weight may have each of its names.
    """
    model = checkpoint.model
    stored = {name: tensor.spelling or (name, *tensor.ties) for name, tensor in have.tensors.items()}
    if not keeps_ties and any(len(names) > 1 for names in stored.values()):
        return True
    conversions = find_conversions(ModelConfig(config).architecture(), config)
    arrays = {array for names in stored.values() for array in names}
    if model is None or not model.family:
        return not conversions.reads_as_saved(arrays)
    state = list_state_arrays(model, have.tensors.values(), config)
    return conversions.changes_any(array.name for array in state if array.name in arrays)


def _find_original_files(checkpoint: OpenedCheckpoint) -> tuple[str, Collection[str]]:
    """Find the format and the files of the original that a record names, else of the source."""
    if checkpoint.record is None:
        return checkpoint.stored.format, checkpoint.stored.files
    source = checkpoint.record.source
    return source.get("format", ""), source.get("files", ())


def _choose_hub_arrays(
    checkpoint: OpenedCheckpoint,
    reshard_options: ReshardOptions,
    layout: Layout,
    have: Manifest,
    dtypes: Mapping[str, DType],
) -> ArrayForm:
    """Choose the arrays that `save_pretrained` writes."""
    if layout.name != HUB_LAYOUT:
        raise UsageError("--names hub is for --to hf", hint="add --to hf")
    if checkpoint.config is None:
        raise UsageError(
            "--names hub needs the config of the model, which says what its class saves", hint="add --config PATH"
        )
    fusions = _select_fusions(checkpoint, reshard_options)
    consumer = find_profile(reshard_options.consumer) if reshard_options.consumer is not None else None
    arrays = build_hub_arrays(
        checkpoint.model,
        have.tensors.values(),
        checkpoint.config,
        unstack=reshard_options.experts != "fused",
        as_on_hub=consumer is not None and not consumer.state_names,
    )
    if reshard_options.experts == "split":
        stacks = {fusion.tensors for fusion in fusions.values() if len(fusion.tensors) > 1}
        arrays = [array for array in arrays if array.tensors not in stacks]
    unsaved = list_unsaved_names(ModelConfig(checkpoint.config).architecture(), checkpoint.config)
    return choose_hub_form(have, arrays, unsaved, dtypes)
