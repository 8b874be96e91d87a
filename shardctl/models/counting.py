"""Counts the parameters of a checkpoint, however they are stored."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from shardctl.models.describe import describe_model
from shardctl.models.quantization import drop_quantization_config, find_quantization_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.tables.model import Model, ModelTensor
    from shardctl.tensors.manifest import Tensor


def count_parameters(model: Model, config: Mapping[str, object] | None, tensors: Mapping[str, Tensor]) -> int:
    """Count elements of what can be trained, ties once and without buffers.

    Of quantized weights those that codes stand for.

    `tensors` are those stored, by canonical name. A quantized weight is known by its module, of which some array is
    stored: codes, scales and zeros are no parameters of their own.
    """
    if not is_quantized(model, config):
        return sum(t.size for name, t in tensors.items() if not model.tensors[name].row.buffer)
    shapes = Counter([t.shape for t in list_meant_parameters(model, config or {}, tensors)])
    return sum(prod(shape) * count for shape, count in shapes.items())


def is_quantized(model: Model, config: Mapping[str, object] | None) -> bool:
    """Return whether codes of weights are stored, of which the config says what they stand for."""
    return config is not None and model.tabled and find_quantization_config(config) is not None


def list_meant_parameters(
    model: Model, config: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> list[ModelTensor]:
    """List the parameters that the stored `tensors` of a quantized model stand for, in the types that it declares."""
    plain = model.plain or (model if model.text else describe_model(drop_quantization_config(config)))
    parameters = [t for t in plain.tensors.values() if not t.row.buffer]
    if plain.tensors.keys() <= tensors.keys():
        return parameters
    lacking = {t.name for t in parameters if t.name not in tensors}
    if not lacking:
        return parameters
    modules = {name.rpartition(".")[0] for name in tensors}
    stems = {name.rpartition("_")[0] for name in tensors}  # MXFP4's `..._blocks` and `..._scales`
    coded = {name for name in lacking if name in stems or (name.endswith(".weight") and name[:-7] in modules)}
    return [t for t in parameters if t.name not in lacking or t.name in coded]
