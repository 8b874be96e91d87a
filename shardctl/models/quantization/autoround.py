"""Describes AutoRound (Intel), which packs integers as GPTQ or AWQ do, with other bits or groups for some modules.

Layout: `packing_format`; which module has which: vLLM (model_executor/layers/quantization/inc/config_parser.py).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.quantization.awq import build_awq_storage
from shardctl.models.quantization.expressions import compile_expression
from shardctl.models.quantization.gptq import build_gptq_storage
from shardctl.models.quantization.storage import QuantizationMethod, QuantizationScheme
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardctl.models.quantization.storage import Names, WeightStorage

_STORAGE_BUILDERS_BY_PACKING: Final[Mapping[str, Callable[[ModelConfig], WeightStorage]]] = {
    "auto_round": build_gptq_storage,
    "auto_round:gptq": build_gptq_storage,
    "auto_round:auto_gptq": build_gptq_storage,
    "auto_round:awq": build_awq_storage,
    "auto_round:auto_awq": build_awq_storage,
}
_WHOLE_BITS: Final = 16
_REGEX_SYNTAX_PATTERN: Final = re.compile(r"[*+?^$()\[\]{}|\\]")
"""What makes a name of `extra_config` a regular expression."""


def _parse_scheme(config: ModelConfig) -> QuantizationScheme:
    packing, kind = config.text("packing_format", "auto_round:auto_gptq").lower(), config.text("data_type", "int")
    if packing not in _STORAGE_BUILDERS_BY_PACKING or kind != "int":
        raise UnsupportedError(f"AutoRound's {kind} weights in the format {packing!r} are not known")
    pack = _STORAGE_BUILDERS_BY_PACKING[packing]

    def build_storage(said: Mapping[str, object]) -> WeightStorage | None:
        own = {key: said.get(key, config.values.get(key)) for key in ("bits", "group_size")}
        bits = ModelConfig(own, config.file).size("bits", 4)
        return pack(ModelConfig(own, config.file)) if bits < _WHOLE_BITS else None

    usual = build_storage({})
    if usual is None:
        raise UnsupportedError(f"{config.file} says AutoRound, but weights of 16 bits")
    storages = {name: build_storage(said) for name, said in _list_exceptions(config).items()}
    rules = [
        (compile_expression(f".*(?:{name})", config.file, name), storage)
        for name, storage in storages.items()
        if _REGEX_SYNTAX_PATTERN.search(name)
    ]
    blocks = _list_blocks(config)

    def find(names: Names) -> WeightStorage | None:
        for name in names:
            for known, storage in storages.items():
                if name == known or name.endswith(f".{known}"):
                    return storage
        for expression, storage in rules:
            if any(expression.matches(name) for name in names):
                return storage
        return usual if not blocks or any(name.startswith(blocks) for name in names) else None

    heads = any(name.endswith("lm_head") and storage is not None for name, storage in storages.items())
    return QuantizationScheme(lambda names: find(names) or usual, lambda names: find(names) is None, heads=heads)


def _list_exceptions(config: ModelConfig) -> Mapping[str, Mapping[str, object]]:
    value = config.values.get("extra_config") or {}
    if not isinstance(value, dict) or not all(isinstance(said, dict) for said in value.values()):
        raise SourceError(f"{config.file} has extra_config = {value!r:.200} where a table of modules is expected")
    return value


def _list_blocks(config: ModelConfig) -> tuple[str, ...]:
    """List how the names of quantized modules begin; empty if they all are."""
    value = config.values.get("block_name_to_quantize") or config.values.get("to_quant_block_names") or []
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SourceError(f"{config.file} has block_name_to_quantize = {value!r:.200} where names are expected")
    return tuple(f"{name.strip()}." for name in names)


def _spare_modules(settings: Mapping[str, Any], decoded: Sequence[str], _plain: Sequence[str]) -> Mapping[str, Any]:
    """Return settings that give modules 16 bits, as AutoRound itself says of those that it leaves."""
    left = {name: {"bits": _WHOLE_BITS, "data_type": "float"} for name in decoded}
    return {**settings, "extra_config": {**(settings.get("extra_config") or {}), **left}}


AUTOROUND: Final = QuantizationMethod(
    ("auto-round", "auto_round", "intel/auto-round", "inc"), _parse_scheme, _spare_modules
)
