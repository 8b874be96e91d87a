"""Makes the config of a quantized checkpoint leave modules as they are, in the way of its method."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.base.dtype import CASTABLE
from shardctl.base.errors import UnsupportedError, format_first_few
from shardctl.base.value import value_class
from shardctl.checkpoint.quantization.quantized_modules import list_linear_modules, list_modules
from shardctl.models.quantization import quantize_model
from shardctl.models.quantization.methods import find_method
from shardctl.models.quantization.settings import (
    QUANTIZATION_FILES,
    name_method,
    replace_file_settings,
    replace_quantization_settings,
)
from shardctl.models.quantization.torchao import mark_plain_tensors
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_text
from shardctl.tensors.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.models import Model
    from shardctl.tensors.manifest import Tensor

_MATRIX_NDIM: Final = 2
_FUSED_MODULE_GROUPS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Modules that engines put into one matrix, all of which are quantized, or none."""


@value_class
class SparedModules:
    """What a checkpoint says of modules that are not quantized any more."""

    model: Model
    config: Mapping[str, Any]
    files: Mapping[str, bytes]
    """Other files with settings, by name."""
    metadata: Mapping[str, str]
    """Of the files with tensors."""
    warnings: tuple[str, ...]


def spare_modules(
    checkpoint: OpenedCheckpoint,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    decoded: Mapping[str, Tensor],
) -> SparedModules:
    """Return what is said of a checkpoint with `tensors`, of which the weights `decoded` were quantized before.

    Raises UnsupportedError if the settings of the method cannot say it.
    """
    settings = models.find_quantization_config(config)
    method = find_method(name_method(settings)) if settings is not None else None
    assert checkpoint.model is not None  # noqa: S101 - asked before
    plain = checkpoint.model.plain
    assert plain is not None  # noqa: S101 - asked before
    if method is None or method.spare is None:
        raise UnsupportedError("the settings of this method leave no single modules as they are")
    spare, left = method.spare, [module for tensor in decoded.values() for module in list_modules(tensor)]
    others = [
        module
        for name, tensor in tensors.items()
        if name not in decoded and len(tensor.shape) == _MATRIX_NDIM and tensor.dtype.name in CASTABLE
        if name in plain.tensors
        for module in list_linear_modules(plain, tensor)
    ]

    def change(values: Mapping[str, Any]) -> Mapping[str, Any]:
        return spare(values, left, others)

    found = replace_quantization_settings(config, change)
    _check_settings(plain, config, found, decoded)
    stored = checkpoint.source.files()
    files = {
        name: parse_json(read_text(checkpoint.source, name, CONFIG_TEXT), name, CONFIG_TEXT)
        for name in QUANTIZATION_FILES & stored.keys()
    }
    names = [chunk.name for tensor in decoded.values() for chunk in tensor.chunks]
    return SparedModules(
        quantize_model(plain, found, Manifest("", tensors, {})),
        found,
        {
            name: (json.dumps(replace_file_settings(said, change), indent=2) + "\n").encode()
            for name, said in files.items()
            if isinstance(said, dict)
        },
        mark_plain_tensors(checkpoint.manifest.metadata, names),
        tuple(_note_divided_modules(tensors, decoded)),
    )


def _check_settings(
    plain: Model, before: Mapping[str, Any], after: Mapping[str, Any], decoded: Mapping[str, Tensor]
) -> None:
    """Raise UnsupportedError unless the new settings leave the decoded weights and no others."""
    had, has = (quantize_model(plain, config).encodings.keys() for config in (before, after))
    unsaid = [name for name in decoded if name in has]
    lost = [name for name in had if name not in has and name not in decoded]
    if unsaid or lost:
        raise UnsupportedError(
            f"the quantization settings of the config cannot leave {format_first_few(unsaid or list(decoded))} as "
            "numbers and nothing else",
            hint="leave --dequantize out, and --dtype decodes all of them",
        )


def _note_divided_modules(tensors: Mapping[str, Tensor], decoded: Mapping[str, Tensor]) -> Iterator[str]:
    """Warn of modules that engines join, of which one stays quantized."""
    modules = {name.removesuffix(".weight") for name in decoded}
    parents = {module.rpartition(".")[0] for module in modules}
    there = {name.rpartition(".")[0] for name in tensors}
    for group in _FUSED_MODULE_GROUPS:
        divided = [
            parent
            for parent in sorted(parents)
            if any(f"{parent}.{own}" in modules for own in group)
            and any(f"{parent}.{own}" in there - modules for own in group)
        ]
        if divided:
            yield (
                f"{format_first_few(divided)} has some of {', '.join(group)} decoded and some quantized: engines that "
                "join them refuse that; name all of them with --dequantize"
            )
