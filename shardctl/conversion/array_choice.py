"""Chooses the arrays that hold the tensors of a conversion, and their names: those of a class, or of a trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.conversion.optimizer_states import (
    build_state_fusions,
    get_states,
    name_state_arrays,
    spread_shared_states,
)
from shardctl.errors import UsageError
from shardctl.libraries.arrays.form import add_state_places, choose_form, choose_trainer_form, join_trainer_forms
from shardctl.models.automodel_names import AUTOMODEL, build_saved_arrays, group_parameters
from shardctl.models.families import load_family
from shardctl.models.maxtext_names import MAXTEXT, build_maxtext_arrays
from shardctl.models.torchtitan_names import TRAINER, build_trainer_arrays, join_parameters, list_balances

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.dtype import DType
    from shardctl.libraries.arrays.form import ArrayForm
    from shardctl.libraries.writer import Layout
    from shardctl.manifest import Manifest
    from shardctl.models import Model
    from shardctl.models.fusion import TensorFusion
    from shardctl.options import ReshardOptions


class _TrainerArrays(NamedTuple):
    """What `--names` means for a trainer."""

    layout: str
    """The one that it reads."""
    build: Callable[[Model, Collection[str]], dict[str, TensorFusion]]
    """Builds the arrays of a model's weights, if so many tensors are there."""
    join: Callable[[Model, Mapping[str, TensorFusion]], dict[str, TensorFusion]]
    """Builds of these the arrays of its parameters, of which the optimizer has states."""


_TRAINERS: Final = {
    TRAINER: _TrainerArrays("dcp", build_trainer_arrays, join_parameters),
    AUTOMODEL: _TrainerArrays("dcp", build_saved_arrays, group_parameters),
    MAXTEXT: _TrainerArrays("orbax", build_maxtext_arrays, lambda _, arrays: dict(arrays)),
}
"""By what `--names` says."""
_OTHER_STATES: Final = frozenset({"accelerate", "veomni"})
"""Trainers whose arrays are those of transformers, in a state that has another name for the optimizer."""
NAMES: Final = frozenset({"transformers", "keep", *_OTHER_STATES, *_TRAINERS})
"""What `--names` takes."""


def _needs_class_names(checkpoint: OpenedCheckpoint) -> bool:
    """Return whether a text model that was split off can be loaded by the names of its class alone."""
    family = load_family(checkpoint.model.family) if checkpoint.part == "text" and checkpoint.model else None
    return family is not None and family.class_names_only


def choose_arrays(
    checkpoint: OpenedCheckpoint,
    reshard_options: ReshardOptions,
    layout: Layout,
    have: Manifest,
    dtypes: Mapping[str, DType],
) -> tuple[Manifest, ArrayForm]:
    """Choose the arrays that hold the tensors, and their names; those of states follow."""
    if reshard_options.names in _TRAINERS:
        trainer, asked = _TRAINERS[reshard_options.names], reshard_options.names
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
    fusions = _select_fusions(checkpoint, reshard_options)
    arrays = choose_form(
        have,
        {**fusions, **build_state_fusions(have, fusions)},
        dtypes,
        experts=reshard_options.experts,
        spelled=reshard_options.names == "keep" or (layout.source_names and not _needs_class_names(checkpoint)),
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
