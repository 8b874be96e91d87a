"""Describes a text model whose linears have adapters beside them, as Phi-4-multimodal has in its checkpoint.

The weight of such a linear is stored as `base_layer`, and of each adapter two matrices, by its name. They are cut as
vLLM cuts LoRA: what reads the linear's inputs with those, what writes its outputs with these, the rank nowhere.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import LAYER
from shardctl.models.tables.family import INDEX, LogicalDim, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import Family, ModelDims
    from shardctl.tensors.manifest import Manifest

_DOWN: Final = re.compile(r".*\.lora_A\.(\w+)\.weight")
_WRAPPED: Final = ".base_layer.weight"
_KEY: Final = "_lora"
"""How keys of an outer config end that say the rank of an adapter, such as `vision_lora`."""


def list_inner_adapters(config: Mapping[str, object], stored: Manifest) -> dict[str, int]:
    """List the ranks of the adapters in a checkpoint, by name; of a config alone, those that it speaks of.

    >>> from shardctl.tensors.manifest import Manifest
    >>> list_inner_adapters({"vision_lora": {"r": 256}}, Manifest("", {}, {}))
    {'vision': 256}
    """
    if stored.tensors:
        found = ((_DOWN.fullmatch(name), tensor.shape) for name, tensor in stored.tensors.items() if "lora_A" in name)
        return {match[1]: shape[0] for match, shape in found if match and shape}
    said = ((key.removesuffix(_KEY), value) for key, value in config.items() if key.endswith(_KEY))
    return {name: value["r"] for name, value in said if isinstance(value, dict) and isinstance(value.get("r"), int)}


def add_inner_adapters(family: Family, adapters: Mapping[str, int], stored: Manifest) -> Family:
    """Return `family` with `adapters` beside those linears that have them; of a config alone, beside all of layers."""
    if not adapters:
        return family
    wrapped = [name for name in stored.tensors if name.endswith(_WRAPPED)]

    def build_facts(config: ModelConfig) -> ModelDims:
        dims = {f"rank_{name}": LogicalDim(rank) for name, rank in adapters.items()}
        return family.facts(config).also(dims=dims)

    rows = tuple(new for row in family.rows for new in _adapt_row(row, adapters, wrapped, alone=not stored.tensors))
    return replace(family, rows=rows, facts=build_facts)


def _adapt_row(row: Row, adapters: Mapping[str, int], wrapped: Sequence[str], *, alone: bool) -> Iterator[Row]:
    module, dims = row.name.removesuffix(".weight"), row.dims.split()
    pattern = re.compile(
        INDEX.sub(r"\\d+", re.escape(module).replace(r"\{", "{").replace(r"\}", "}")) + re.escape(_WRAPPED)
    )
    linear = len(dims) == 2 and module != row.name  # noqa: PLR2004 - what it writes, and what it reads
    if not linear or not (row.name.startswith(LAYER) if alone else any(map(pattern.search, wrapped))):
        yield row
        return
    yield replace(row, name=f"{module}{_WRAPPED}")
    for name in adapters:
        yield replace(row, name=f"{module}.lora_A.{name}.weight", dims=f"rank_{name} {dims[1]}")
        yield replace(row, name=f"{module}.lora_B.{name}.weight", dims=f"{dims[0]} rank_{name}")
