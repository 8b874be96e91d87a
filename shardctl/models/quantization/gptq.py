"""Describes GPTQ: codes packed along the input dim, zeros along the output dim, and a group number for each input.

Layout: `QuantLinear` in AutoGPTQ (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py) and in GPTQModel
(gptqmodel/nn_modules/qlinear/__init__.py, `BaseQuantLinear`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.quantization.expressions import compile_expression
from shardctl.models.quantization.marlin import BITS, build_marlin_storage
from shardctl.models.quantization.module_list import match_name_parts
from shardctl.models.quantization.storage import (
    FLOAT,
    IN,
    OUT,
    AlongDim,
    PackedByInput,
    QuantizationMethod,
    QuantizationScheme,
    QuantizedArray,
    WeightStorage,
    build_packed_dim,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.models.quantization.expressions import ModuleExpression
    from shardctl.models.quantization.storage import Names
    from shardctl.models.tables.config import ModelConfig

_SUPPORTED_BIT_WIDTHS: Final = (2, 3, 4, 8)
_CHECKPOINT_FORMATS: Final = ("gptq", "gptq_v2")
"""Both have the same arrays; in the first, zeros are stored less one."""
_MARLIN_FORMAT: Final = "marlin"
MIXED: Final = "run of inputs, because act-order (desc_act) mixed their groups"


def parse_bits_and_groups(config: ModelConfig, key: str = "bits") -> tuple[int, int]:
    """Parse bits of a code, and inputs that share a scale (`group_size`): -1 for all.

    Raises SourceError for numbers that no writer has.
    """
    bits = config.size(key, 4)
    if bits not in _SUPPORTED_BIT_WIDTHS:
        raise SourceError(
            f"config.json has {key} = {bits} where one of {', '.join(map(str, _SUPPORTED_BIT_WIDTHS))} is expected"
        )
    return bits, -1 if config.values.get("group_size") == -1 else config.size("group_size", 128)


def refuse_kernel_order(weights: str, usual: str) -> UnsupportedError:
    """Build the refusal of weights that were stored in the order of a kernel, and name the format to take instead."""
    return UnsupportedError(
        f"{weights} are ordered for one kernel, and can neither be cut nor decoded",
        hint=f"take the model in the format {usual!r}; as it is, shardctl converts it on one device only, with --to hf "
        "and without --dtype",
    )


def build_gptq_storage(config: ModelConfig) -> WeightStorage:
    """Build the arrays of a weight with the bits, groups and order that a config says."""
    form = config.text("checkpoint_format", "") or config.text("format", "gptq")
    if config.read_flag("is_marlin_format", default=False):  # as AutoGPTQ says it up to 0.7
        form = _MARLIN_FORMAT
    bits, group = parse_bits_and_groups(config)
    if form.lower() == _MARLIN_FORMAT and bits == BITS:
        return build_marlin_storage("B", "s", group)
    if form.lower() not in _CHECKPOINT_FORMATS:
        raise refuse_kernel_order(f"GPTQ weights in the format {form!r}", "gptq")
    mixed = config.read_flag("desc_act", default=False) and group > 0
    by_group = AlongDim(IN, group) if group > 0 else 1
    codes = QuantizedArray("qweight", ("I32",), ((build_packed_dim(IN, bits), AlongDim(OUT)),))
    zeros = QuantizedArray("qzeros", ("I32",), ((by_group, build_packed_dim(OUT, bits)),))
    scales = QuantizedArray("scales", FLOAT, ((by_group, AlongDim(OUT)),), plain=True)
    # Without act-order it says nothing new, and some writers leave it out.
    groups = QuantizedArray("g_idx", ("I32", "I64"), ((AlongDim(IN),),), optional=not mixed)
    bias = QuantizedArray("bias", FLOAT, ((AlongDim(OUT),),), optional=True)
    return WeightStorage(
        (codes, zeros, scales, groups, bias),
        uncut={IN: MIXED} if mixed else {},
        decoder=PackedByInput(
            codes, scales, zeros, bits, group, groups, less_one=form.lower() == _CHECKPOINT_FORMATS[0]
        ),
    )


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    usual, rules = build_gptq_storage(config), _list_dynamic_rules(config)

    def find(names: Names) -> WeightStorage | None:
        for expression, storage in rules:
            if any(expression.matches(name) for name in names):
                return storage
        return usual

    inner = _list_inner_modules(config)
    chosen = match_name_parts(inner)
    return QuantizationScheme(
        lambda names: find(names) or usual,
        lambda names: (bool(inner) and not chosen(names)) or find(names) is None,
        heads=config.read_flag("lm_head", default=False),
    )


def _list_inner_modules(config: ModelConfig) -> list[str]:
    """List the modules of a layer that are quantized, if the config lists them; else empty."""
    value = config.values.get("modules_in_block_to_quantize") or []
    if not isinstance(value, list):
        raise SourceError(f"config.json has modules_in_block_to_quantize = {value!r} where lists of names are expected")
    flat = [name for group in value for name in (group if isinstance(group, list) else [group])]
    if not all(isinstance(name, str) for name in flat):
        raise SourceError(f"config.json has modules_in_block_to_quantize = {value!r} where lists of names are expected")
    return flat


def _list_dynamic_rules(config: ModelConfig) -> list[tuple[ModuleExpression, WeightStorage | None]]:
    """List what `dynamic` says of modules, of which the first that matches decides; None for those left as they are.

    As GPTQModel and vLLM read it (model_executor/layers/quantization/utils/gptq_utils.py, `get_dynamic_override`).
    """
    value = config.values.get("dynamic") or {}
    if not isinstance(value, dict) or not all(isinstance(said, dict) for said in value.values()):
        raise SourceError(f"{config.file} has dynamic = {value!r:.200} where a table of modules is expected")
    rules: list[tuple[ModuleExpression, WeightStorage | None]] = []
    for text, said in value.items():
        expression = compile_expression(text.removeprefix("-:").removeprefix("+:"), config.file, text)
        own = replace(config, values={**config.values, **said})
        rules.append((expression, None if text.startswith("-:") else build_gptq_storage(own)))
    return rules


def _spare_modules(settings: Mapping[str, Any], decoded: Sequence[str], _plain: Sequence[str]) -> Mapping[str, Any]:
    """Return settings with a rule of `dynamic` for each module that is left, in front of those that there are.

    vLLM takes a quantized head from `lm_head` alone.
    """
    rules: dict[str, object] = {f"-:^{re.escape(name)}$": {} for name in decoded}
    heads = any(name.rpartition(".")[2] == "lm_head" for name in decoded)
    head = {"lm_head": False} if heads and settings.get("lm_head") else {}
    return {**settings, **head, "dynamic": {**rules, **(settings.get("dynamic") or {})}}


GPTQ: Final = QuantizationMethod(("gptq",), _parse_scheme, _spare_modules)
