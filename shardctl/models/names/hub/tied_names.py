"""Finds which stored names transformers' class of a config ties to others, where no table knows the model.

>>> config = {"architectures": ["CTRLLMHeadModel"], "model_type": "ctrl"}
>>> find_tied_names(config, ["transformer.w.weight", "lm_head.weight"])
{'lm_head.weight': 'transformer.w.weight'}
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

from shardctl.models.names.hub.conversion_table import list_model_ties
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from shardctl.tensors.manifest import Manifest, Tensor


def find_tied_names(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Find the names that are tied to another of `names`, and that name (`get_expanded_tied_weights_keys`)."""
    found: dict[str, str] = {}
    for path, ties in list_model_ties(ModelConfig(config).architecture(), config):
        prefix = f"{path}." if path else ""
        inner = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        for target, source in ties.items():
            sources, targets = (sorted(n for n in inner if re.match(each, n)) for each in (source, target))
            for one, other in zip(targets, cycle(sources), strict=False) if sources else ():
                first = found.get(prefix + other, prefix + other)
                if first != prefix + one:
                    found[prefix + one] = first
    return found


def merge_tied_tensors(config: Mapping[str, Any] | None, stored: Manifest) -> Manifest:
    """Return `stored`, each weight that is stored under several names as one tensor with ties.

    The copies are compared when they are read.
    """
    tied = find_tied_names(config, stored.tensors) if config is not None else {}
    if not tied:
        return stored
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in stored.tensors.items():
        first = stored.tensors[tied.get(name, name)]
        same = (first.shape, first.dtype) == (tensor.shape, tensor.dtype) and not tensor.ties
        groups.setdefault(first.name if same else name, []).append(tensor)
    return replace(stored, tensors=dict(_merge_groups(groups)))


def _merge_groups(groups: Mapping[str, Sequence[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the one tensor of each group, by its name."""
    for name, group in groups.items():
        first = next(tensor for tensor in group if tensor.name == name)
        if len(group) > 1:
            ties = tuple(tensor.name for tensor in group if tensor.name != name)
            chunks = tuple(
                chunk for tensor in (first, *(t for t in group if t is not first)) for chunk in tensor.chunks
            )
            first = replace(first, ties=ties, chunks=chunks)
        yield name, first
