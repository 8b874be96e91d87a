"""Takes stored arrays of quantized weights for the weights that they stand for, and cuts them where those are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.models.quantization import find_quantization_config, quantize_model
from shardctl.models.quantization.methods import read_scheme
from shardctl.models.quantization.settings import name_method
from shardctl.models.quantization.storage import FP8, AlongDim
from shardctl.models.tables.family import Row
from shardctl.models.tables.name_pattern import list_name_patterns
from shardctl.tensors.manifest import Manifest, Tensor
from shardctl.tensors.mesh import EXPERT_FSDP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.derived.derivation import TensorRule
    from shardctl.models.quantization.storage import QuantizationScheme
    from shardctl.models.tables.model import Model, ModelTensor

_FOLLOWED: Final = ("fp8", "fbgemm_fp8", "gptq", "awq")
"""Methods whose arrays say by their shapes what the weight's is."""
_CODES: Final = ("U8", "I8", "I32", *FP8)
_MATRIX: Final = 2


def restore_weights(model: Model, config: Mapping[str, object]) -> Model:
    """Return the model with its weights in place of the arrays that are stored of them.

    It is `model` where nothing is quantized. Raises UnsupportedError for codes whose weights are not known.
    """
    settings = find_quantization_config(config)
    if settings is None:
        return model
    scheme = read_scheme(config) if name_method(settings) in _FOLLOWED else None
    if scheme is None:
        raise _explain_unknown(model)
    tensors: dict[str, ModelTensor] = {}
    for name, tensor in model.tensors.items():
        module, _, last = name.rpartition(".")
        storage = scheme.storage((module,))
        weight = _restore_weight(model, scheme, module)
        if weight is None or last not in storage.names or last == "bias":
            tensors[name] = tensor
        else:
            tensors.setdefault(weight.name, weight)
    kept = (tensor for name, tensor in tensors.items() if tensor is model.tensors.get(name))
    if any(tensor.dtype.name in _CODES and len(tensor.shape) >= _MATRIX for tensor in kept):
        raise _explain_unknown(model)
    return replace(model, tensors=tensors)


def _restore_weight(model: Model, scheme: QuantizationScheme, module: str) -> ModelTensor | None:
    """Return the weight that the arrays of a module stand for; None if it is not quantized."""
    codes, *others = scheme.storage((module,)).arrays
    stored = next((t for n in codes.names if (t := model.tensors.get(f"{module}.{n}")) is not None), None)
    scaled = any(f"{module}.{name}" in model.tensors for array in others for name in array.names if name != "bias")
    if stored is None or stored.dtype.name not in _CODES or len(stored.shape) != _MATRIX or not scaled:
        return None
    extents = [0] * _MATRIX
    for extent, along in zip(stored.shape, codes.forms[0], strict=True):
        assert isinstance(along, AlongDim)  # noqa: S101 - codes of these methods follow the weight
        extents[along.dim] = extent * along.block // along.stored
    name = f"{module}.weight"
    return replace(stored, name=name, shape=tuple(extents), row=Row(list_name_patterns([name])[0], ""))


def spread_rules(
    rules: Mapping[str, TensorRule], weights: Model, stored: Model, config: Mapping[str, object]
) -> dict[str, TensorRule]:
    """Return the rules of stored arrays that follow from those of `weights`, which have their cuts."""
    tensors = {name: Tensor(name, t.dtype, t.shape, ()) for name, t in stored.tensors.items()}
    encodings = quantize_model(weights, config, Manifest("", tensors, {})).encodings
    found = {name: rule for name, rule in rules.items() if name not in encodings}
    for name, encoding in encodings.items():
        if name not in rules:
            continue
        for array in encoding.arrays:
            cuts = tuple(tuple(c for c in dim if c.axis not in ("fsdp", EXPERT_FSDP)) for dim in array.cuts)
            found[encoding.name(array)] = replace(rules[name], cuts=cuts)
    return found


def _explain_unknown(model: Model) -> UnsupportedError:
    return UnsupportedError(
        f"how quantized weights of {model.architecture or 'a model without a table'} are cut is not known",
        hint="write a rule file and give it with --rules FILE",
    )
