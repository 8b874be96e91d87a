"""Says which side files travel along with a conversion, and what its `config.json` must say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.base.dtype import CASTABLE, FLOATS
from shardctl.checkpoint.config_files import CONFIG
from shardctl.checkpoint.pipeline_parts import is_pipeline, read_part_config
from shardctl.conversion.optimizer_states import build_settings_file, get_states
from shardctl.models import find_quantization_config
from shardctl.models.names.hub.older_config import add_older_settings
from shardctl.models.quantization.settings import QUANTIZATION_FILES
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_text
from shardctl.tensors.manifest import OpaqueObject
from shardctl.tensors.training import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.libraries.writer import Layout
    from shardctl.tensors.manifest import Manifest


def list_carried_files(
    checkpoint: OpenedCheckpoint, have: Manifest, dtypes: Mapping[str, DType], layout: Layout
) -> list[OpaqueObject]:
    """List the side files that travel along; after a cast, `config.json` says the new dtype, and no quantization."""
    computed = () if checkpoint.averaged and not checkpoint.encoded else have.tensors.values()
    worked_out = next((t.dtype.torch for t in computed if t.encoded_bytes and t.dtype in FLOATS.values()), "")
    cast = {dtypes[n].torch for n, t in have.tensors.items() if dtypes[n] is not t.dtype}
    part_configs = _list_part_configs(checkpoint, have, dtypes)
    carried = []
    for side in have.objects:
        if side.name in checkpoint.remade_files:
            content = checkpoint.remade_files[side.name]
            carried.append(replace(side, policy="synthesise", size=len(content), content=content))
            continue
        if side.policy == "drop" or (checkpoint.encoded and side.name in QUANTIZATION_FILES):
            continue
        if side.name == CONFIG and checkpoint.remade_config:
            content = _set_config_dtype(json.dumps(checkpoint.config).encode(), worked_out or next(iter(cast), ""))
            carried.append(replace(side, policy="synthesise", size=len(content), content=content))
        elif side.name == CONFIG and cast:
            content = _set_config_dtype(read_text(checkpoint.source, CONFIG, CONFIG_TEXT), cast.pop())
            carried.append(replace(side, policy="synthesise", size=len(content), content=content))
        elif side.name in part_configs:
            content = _set_config_dtype(read_text(checkpoint.source, side.name, CONFIG_TEXT), part_configs[side.name])
            carried.append(replace(side, policy="synthesise", size=len(content), content=content))
        elif side.name != SETTINGS or checkpoint.manifest.training is None:  # else it is made new
            carried.append(side)
    carried += build_settings_file(have, layout)
    if checkpoint.config is not None and CONFIG not in {side.name for side in carried}:  # it was given by --config
        dtype = "" if find_quantization_config(checkpoint.config) is not None else _find_common_dtype(have, dtypes)
        content = _set_config_dtype(json.dumps(dict(checkpoint.config)).encode(), dtype)
        carried.append(OpaqueObject(CONFIG, "synthesise", size=len(content), content=content))
    return carried


def write_older_config(checkpoint: OpenedCheckpoint, config: OpaqueObject) -> OpaqueObject:
    """Return a `config.json` with the settings that transformers 4 reads, if it lacks them."""
    said = config.content if config.content is not None else read_text(checkpoint.source, CONFIG, CONFIG_TEXT)
    parsed = parse_json(said, CONFIG, CONFIG_TEXT)
    older = add_older_settings(parsed)
    if older == parsed:
        return config
    content = (json.dumps(older, indent=2, ensure_ascii=False) + "\n").encode()
    return replace(config, policy="synthesise", size=len(content), content=content)


def _list_part_configs(checkpoint: OpenedCheckpoint, have: Manifest, dtypes: Mapping[str, DType]) -> Mapping[str, str]:
    """List the configs of a pipeline's parts that were cast, each with the type; those of diffusers name no type."""
    if not is_pipeline(checkpoint.stored):
        return {}
    cast = {n.partition("/")[0]: dtypes[n].torch for n, t in have.tensors.items() if dtypes[n] != t.dtype}
    configs = {part: read_part_config(checkpoint.source, part) for part in cast}
    return {
        f"{part}/{CONFIG}": cast[part] for part, config in configs.items() if config and "_class_name" not in config
    }


def _find_common_dtype(have: Manifest, dtypes: Mapping[str, DType]) -> str:
    """Find the type of most elements of weights that are floats, as transformers would write it into a config."""
    sizes: dict[str, int] = {}
    states = get_states(have)
    for name, tensor in have.tensors.items():
        if dtypes[name].name in CASTABLE and name not in states:
            sizes[dtypes[name].torch] = sizes.get(dtypes[name].torch, 0) + tensor.size
    return max(sizes, key=lambda dtype: sizes[dtype], default="")


def _set_config_dtype(config: bytes, dtype: str) -> bytes:
    """Return a config that says `dtype`, unless that is empty."""
    parsed = parse_json(config, CONFIG, CONFIG_TEXT)
    keys = [key for key in ("dtype", "torch_dtype") if key in parsed] or ["dtype"]
    return (
        json.dumps(parsed | (dict.fromkeys(keys, dtype) if dtype else {}), indent=2, ensure_ascii=False) + "\n"
    ).encode()
