"""Brings a stored checkpoint under a model's canonical names, whoever wrote it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.models.names import binding
from shardctl.models.names.autoep_names import bind_autoep_names
from shardctl.models.names.flat_parameters import split_flat_parameters
from shardctl.models.names.maxtext_names import bind_maxtext_names
from shardctl.models.names.meta_names import bind_meta_names
from shardctl.models.names.torchtitan_names import bind_trainer_names
from shardctl.models.names.trained import bind_training
from shardctl.models.names.wrapping import knows_all_names, list_bare_prefixes, read_class_names, remove_prefix

if TYPE_CHECKING:
    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Manifest


def bind_manifest(model: Model, stored: Manifest, *, partial: bool = False) -> Manifest:
    """Return the same checkpoint under canonical names, in model order, with ties merged and fused arrays taken apart.

    Flat parameters of FSDP1 are taken apart, wrappers that a trainer put into the names are left out, Meta's names
    and order of rows, torchtitan's and MaxText's arrays, AutoEP's arrays of experts and other trainers' names are
    translated, and optimizer states follow their parameters. Once the class has found all of its tensors, others become
    extra ones.

    Raises:
        SourceError: a tensor is missing (unless `partial` says that some are) or has a wrong shape.
        UnsupportedError: a tensor is not known, or two parts of the checkpoint are the model equally well.
    """
    found = _note_extra_tensors(model, stored, _read_names(model, split_flat_parameters(model, stored)))
    if model.transposed:
        from shardctl.models.names.trainer_names import orient_matrices

        found = orient_matrices(model, found)
    bound = binding.bind_names(model, found, partial=partial)
    return replace(bound, training=bind_training(model, found.training)) if found.training is not None else bound


def _read_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` under names of the model's class, current or older; what is not known stays as it is."""
    found = read_class_names(model, stored)
    if found is not stored or knows_all_names(model, stored.tensors):
        return found
    for prefix, names in list_bare_prefixes(stored.tensors):
        bare = remove_prefix(model, stored, prefix, names)
        translated = _translate_names(model, bare)
        if translated is not bare:
            return translated
    return stored


def _note_extra_tensors(model: Model, stored: Manifest, found: Manifest) -> Manifest:
    """Return `found` with a warning of the extra tensors in it that were among the weights of `stored`."""
    if len(found.extra) == len(stored.extra):
        return found
    from shardctl.models.names.extra_names import format_extra_tensors, list_reported_extra

    reported = list_reported_extra(model, [each for name, each in found.extra.items() if name not in stored.extra])
    if not reported:
        return found
    line = f"extra tensors, which {model.architecture or 'the model'} does not have: {format_extra_tensors(reported)}"
    return replace(found, warnings=(*found.warnings, line))


def _translate_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` under names of transformers, if all names are another library's; else as it is."""
    found = bind_meta_names(model, bind_trainer_names(model, stored))
    found = bind_autoep_names(model, bind_maxtext_names(model, found))
    if found is not stored:
        return found
    from shardctl.models.names.trainer_names import bind_tabled_names

    return bind_tabled_names(model, stored)
