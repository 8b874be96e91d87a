"""Takes the adapter of all experts of a layer apart into those of each expert, which vLLM and SGLang load.

PEFT has two matrices for an array of experts (`target_parameters`); engines look for those of each expert's own
modules, and pass over others without a word.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING, Any, Final

from shardctl import models
from shardctl.checkpoint.adapter_checkpoint import describe_adapter, read_adapter_settings
from shardctl.checkpoint.config_only import build_model_from_config
from shardctl.checkpoint.merge_targets import find_target
from shardctl.errors import SourceError, UnsupportedError, UsageError
from shardctl.libraries.files.impostors import ADAPTER_CONFIG, ADAPTER_PREFIX
from shardctl.libraries.peft.modules import sort_tensors
from shardctl.libraries.peft.settings import parse_settings
from shardctl.manifest import OpaqueObject, Tensor
from shardctl.models.adaptation.strided_view import StridedView
from shardctl.storage.bounded_text import CONFIG_TEXT, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.checkpoint.merge_targets import MergeTarget
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint

_MATRIX: Final = 2


def split_expert_adapter(checkpoint: OpenedCheckpoint) -> OpenedCheckpoint:
    """Return an adapter whose experts have matrices of their own.

    Raises UsageError where nothing says which model the base is, and for an adapter of no experts, SourceError where
    the adapter does not fit it, UnsupportedError for a base that has its experts in one array on the Hub, too.
    """
    if checkpoint.base_config is None:
        raise UsageError("--experts split needs the config of the adapter's base", hint="give it with --config PATH")
    config = models.drop_quantisation_config(checkpoint.base_config)
    model, manifest = build_model_from_config(checkpoint.source, config)
    base = replace(checkpoint, manifest=manifest, model=model, adapter=False)
    settings = read_adapter_settings(checkpoint.source)
    found = sort_tensors(checkpoint.manifest.tensors.values())
    targets: list[MergeTarget] = []
    taken: set[str] = set()
    for module in found.modules.values():
        stacked = [target for target in find_target(base, settings, module) if target.experts]
        targets += stacked
        if stacked:
            taken |= {part.name for part in (module.down, module.up) if part is not None}
    if not targets:
        raise UsageError(
            "--experts split needs an adapter of stacked experts, and this one has none", hint="leave it out"
        )
    own = {name: tensor for name, tensor in checkpoint.manifest.tensors.items() if name not in taken}
    split = {tensor.name: tensor for target in targets for tensor in _split_target(target, model.tensors[target.name])}
    values = _change_config(read_json(checkpoint.source, ADAPTER_CONFIG, CONFIG_TEXT), targets)
    content = (json.dumps(values, indent=2) + "\n").encode()
    objects = (
        *(each for each in checkpoint.manifest.objects if each.name != ADAPTER_CONFIG),
        OpaqueObject(ADAPTER_CONFIG, "synthesise", size=len(content), content=content),
    )
    made = replace(checkpoint.manifest, tensors={**own, **split}, objects=objects)
    described = describe_adapter(
        checkpoint.source, made, checkpoint.base_config, settings=parse_settings(values, merged=False)
    )
    return replace(
        described,
        stored=checkpoint.stored,
        resources=checkpoint.resources,
        allow_unverified=checkpoint.allow_unverified,
    )


def _split_target(target: MergeTarget, weight: models.ModelTensor) -> Iterator[Tensor]:
    """Yield the two matrices of one expert, which lie in those of all."""
    if len(weight.shape) != _MATRIX or target.module.down is None or target.module.up is None:
        raise UnsupportedError(
            f"{target.name} has all experts in one array on the Hub, too, and engines load no matrices of each"
        )
    parts = {"down": StridedView.of(target.module.down), "up": StridedView.of(target.module.up)}
    shape = (weight.shape[0], weight.shape[1])
    left, right = target.find_factors(parts, shape, target.view.origin[0] if target.view is not None else 0)
    module = f"{ADAPTER_PREFIX}{target.name.removesuffix('.weight')}"
    for name, view in ((f"{module}.lora_A.weight", right), (f"{module}.lora_B.weight", left)):
        yield Tensor(name, view.dtype, view.shape, tuple(view.index().chunks))


def _change_config(values: dict[str, Any], targets: list[MergeTarget]) -> dict[str, Any]:
    """Return the adapter's config with the experts' modules in the place of arrays."""
    modules = values.get("target_modules") or []
    if not isinstance(modules, list):
        raise SourceError(
            f"{ADAPTER_CONFIG} has target_modules = {modules!r:.100}, to which no modules can be added",
            hint="write it as a list of names",
        )
    ranks, alphas = dict(values.get("rank_pattern") or {}), dict(values.get("alpha_pattern") or {})
    leaves = {}
    for target in targets:
        leaf = target.name.removesuffix(".weight").rpartition(".")[2]
        leaves[leaf] = target.rank, target.scaling * (sqrt(target.rank) if values.get("use_rslora") else target.rank)
    for leaf, (rank, alpha) in leaves.items():
        if rank != values.get("r"):
            ranks[rf".*\.experts\.[0-9]+\.{leaf}"] = rank
        if alpha != values.get("lora_alpha", 8):
            alphas[rf".*\.experts\.[0-9]+\.{leaf}"] = int(alpha) if float(alpha).is_integer() else alpha
    return {
        **values,
        "target_modules": sorted({*modules, *leaves}),
        "target_parameters": None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }
