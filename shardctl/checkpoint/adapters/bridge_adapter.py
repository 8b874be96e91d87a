"""Opens an adapter that Megatron-Bridge trained, as the PEFT adapter that its export makes of it.

What the products are multiplied with, the section `peft` of `run_config.yaml` says (Megatron-Bridge,
models/conversion/auto_bridge.py, `export_adapter_ckpt`; peft_bridge.py, `build_adapter_config_dict`).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardctl import models
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.checkpoint.adapters.adapter_checkpoint import describe_adapter
from shardctl.checkpoint.config_files import read_config
from shardctl.libraries.arrays.adapter_arrays import bind_adapter_arrays
from shardctl.libraries.arrays.binding import BRIDGE_ADAPTER
from shardctl.libraries.catalogue import get_schema
from shardctl.libraries.files.impostors import ADAPTER_CONFIG
from shardctl.libraries.peft.settings import parse_settings
from shardctl.storage.bounded_text import CONFIG_TEXT, read_text
from shardctl.tensors.manifest import OpaqueObject

if TYPE_CHECKING:
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.options import SourceOptions
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest, Tensor

_RUN_CONFIG_FILE: Final = "run_config.yaml"
_LORA_CLASS_NAMES: Final = ("megatron.bridge.peft.lora.LoRA", "megatron.bridge.peft.canonical_lora.CanonicalLoRA")
_YAML_LINE_PATTERN: Final = re.compile(r"( +)(\w+): *(\S.*)?")


def open_bridge_adapter(source: Source, stored: Manifest, source_options: SourceOptions) -> OpenedCheckpoint | None:
    """Open an adapter of the model that `--config` names; None without one, if the arrays alone are asked for.

    Raises SourceError where nothing says which model that is or how the adapter is scaled, or it does not fit the
    model, and UnsupportedError for one whose export is not known.
    """
    base = read_config(source, source_options.config).values
    if base is None and source_options.unbound:
        return None
    if base is None:
        raise SourceError(
            f"{source.name} is an adapter of Megatron-Bridge, and nothing says of which model",
            hint="give the base's config.json with --config PATH",
        )
    kv_heads = source_options.kv_heads or "error"
    model = models.describe_model(models.drop_quantization_config(base), kv_heads=kv_heads)
    assert stored.dialect is not None  # noqa: S101 - asked before
    matrices = bind_adapter_arrays(get_schema(stored.dialect.schema), model, stored)
    config = _build_config(source, stored, matrices)
    content = (json.dumps(config, indent=2) + "\n").encode()
    made = OpaqueObject(ADAPTER_CONFIG, "synthesise", size=len(content), content=content)
    trained = stored.training is not None and stored.training.states
    warnings = ("the optimizer's states of an adapter of Megatron-Bridge are left behind",) if trained else ()
    manifest = replace(
        stored,
        tensors=matrices,
        objects=(*stored.objects, made),
        dialect=None,
        training=None,
        warnings=(*stored.warnings, *warnings),
    )
    found = describe_adapter(source, manifest, base, kv_heads=kv_heads, settings=parse_settings(config, merged=False))
    return replace(found, stored=stored, allow_unverified=source_options.allow_unverified)


def _build_config(source: Source, stored: Manifest, matrices: dict[str, Tensor]) -> dict[str, Any]:
    """Build the `adapter_config.json` of the export."""
    file = _find_run_config(source, stored)
    said = parse_run_config(read_text(source, file, CONFIG_TEXT).decode("utf-8", "replace"))
    kind = said.get("_target_", "")
    if kind not in _LORA_CLASS_NAMES:
        raise UnsupportedError(f"{file} says {kind!r:.100}, of which the export is not known", hint=BRIDGE_ADAPTER)
    try:
        rank, alpha = int(said["dim"]), float(said["alpha"])
    except (KeyError, ValueError) as error:
        raise SourceError(f"{file} does not say dim and alpha as numbers in its section peft") from error
    ranks = {tensor.shape[0] for name, tensor in matrices.items() if ".lora_A." in name}
    if ranks - {rank}:
        raise UnsupportedError(
            f"{file} says dim {rank}, but matrices have rank {', '.join(map(str, sorted(ranks)))}", hint=BRIDGE_ADAPTER
        )
    targets = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in matrices}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
    }


def _find_run_config(source: Source, stored: Manifest) -> str:
    """Find the file beside the arrays, or above them."""
    folder = next(iter(stored.files)).rpartition("/")[0]
    for path in (f"{folder}/{_RUN_CONFIG_FILE}".lstrip("/"), _RUN_CONFIG_FILE):
        if path in source.files():
            return path
    raise SourceError(
        f"{source.name} has no {_RUN_CONFIG_FILE}, and only that says what the products of the adapter are multiplied"
        " with",
        hint=f"put the {_RUN_CONFIG_FILE} of the training into the directory",
    )


def parse_run_config(text: str) -> dict[str, str]:
    r"""Parse the plain values in the section `peft` of the YAML that Megatron-Bridge writes.

    >>> parse_run_config("model:\n  dim: 1\npeft:\n  _target_: a.LoRA\n  dim: 8\n  targets:\n  - x\ntrain:\n  dim: 3\n")
    {'_target_': 'a.LoRA', 'dim': '8'}
    """
    found: dict[str, str] = {}
    inside, indent = False, 0
    for line in text.splitlines():
        if line[:1] not in {" ", "-", "#", ""}:
            inside = line.rstrip() == "peft:"
            continue
        match = _YAML_LINE_PATTERN.fullmatch(line) if inside else None
        if match is None:
            continue
        indent = indent or len(match[1])
        if len(match[1]) == indent and match[3]:
            found[match[2]] = match[3].strip().strip("'\"")
    return found
