"""Brings checkpoints of trainers with names of their own under those of transformers, by the tables of names.

torchtitan, MaxText and Automodel, whose arrays stack experts, have modules of their own.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

from shardctl.models.names.torchtitan_names import pair_rows
from shardctl.models.names.trainer_arrays import bind_arrays
from shardctl.models.names.trainer_tables import TRAINERS
from shardctl.models.tables.fusion import TensorFusion, cut_rows, join_tensors, transpose_tensor

if TYPE_CHECKING:
    from shardctl.models.names.trainer_tables import TrainerArray, TrainerNames
    from shardctl.models.tables.fusion import FusionPlaces
    from shardctl.models.tables.model import Model, ModelTensor
    from shardctl.tensors.manifest import Manifest

_MATRIX_NDIM: Final = 2


def bind_tabled_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` under the names of transformers, if all names are those of one trainer's table; else as it is."""
    for trainer in TRAINERS:
        if model.family in trainer.families:
            arrays = _build_arrays(model, trainer)
            if all(n in arrays and arrays[n].declared == tensor.shape for n, tensor in stored.tensors.items()):
                return bind_arrays(stored, arrays, f"{trainer.title}'s names and arrays; read as those of transformers")
    return stored


def orient_matrices(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` with matrices as the class has them, if it has `[in, out]` and all here are `[out, in]`.

    So nanoGPT has GPT-2's, whose class in transformers has `Conv1D` (nanoGPT `model.py`, `from_pretrained`). A square
    matrix is turned with the others of its kind, which are not square.
    """
    if not model.transposed:
        return stored
    matrices = {
        name: tensor
        for name, tensor in stored.tensors.items()
        if (known := model.tensors.get(name)) is not None and _is_transposed(known)
    }
    oblong = {name: tensor for name, tensor in matrices.items() if len(set(model.tensors[name].shape)) > 1}
    if not oblong or any(tensor.shape != model.tensors[name].shape[::-1] for name, tensor in oblong.items()):
        return stored
    arrays = {name: TensorFusion(name, (name,), transpose_tensor(model.tensors[name].shape)) for name in matrices}
    return bind_arrays(stored, arrays, "matrices are [out, in], as nanoGPT has them; read as transposed")


def _is_transposed(tensor: ModelTensor) -> bool:
    """Return whether it is the weight of a `Conv1D`, and no table of embeddings."""
    return len(tensor.shape) == _MATRIX_NDIM and tensor.spec.where[0][0] == "layer" and not tensor.ties


def _build_arrays(model: Model, trainer: TrainerNames) -> dict[str, TensorFusion]:
    """Build the arrays that a trainer has of a model, by its names; of tensors that the model lacks there are none."""
    found: dict[str, TensorFusion] = {}
    for pattern, array in trainer.arrays.items():
        for layer in range(model.layers if "{layer}" in pattern else 1):
            names = [name.format(layer=layer) for name in array.tensors]
            tensors = [model.tensors.get(model.aliases.get(name, name)) for name in names]
            known = [tensor for tensor in tensors if tensor is not None]
            if len(known) == len(names):
                own, places = pattern.format(layer=layer), _place_tensors(known, array)
                parts = [tensor.name for tensor in known]
                found[own] = TensorFusion(own, tuple(parts * (len(places.shapes) // len(parts))), places)
    return found


def _place_tensors(tensors: list[ModelTensor], array: TrainerArray) -> FusionPlaces:
    """Return where tensors lie in an array."""
    first = tensors[0]
    if array.rows == "paired":
        return pair_rows(first.shape, first.spec.cuts[0][0].sections[0].unit)
    if array.section is not None:
        sizes = [section.size for cut in first.spec.cuts[0] for section in cut.sections]
        end = list(accumulate(sizes))[array.section]
        return cut_rows(first.shape, end - sizes[array.section], end)
    return join_tensors(tuple(tensor.shape for tensor in tensors))
