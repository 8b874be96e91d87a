"""Sorts the keys of a Megatron-LM checkpoint: weights, optimizer states, and the rest.

Keys are those of `ShardedTensor` (Megatron-LM core `dist_checkpointing/mapping.py`), not the way through the dicts that
were saved; optimizers put theirs before the weight's own (`optimizer/optimizer.py` and `distrib_optimizer.py`).
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import TYPE_CHECKING, Final

from shardctl.base.value import state_class
from shardctl.libraries.megatron.dist_arrays import EXPERTS, HALVES, LAYERS, NAME, VOCABULARY
from shardctl.libraries.megatron.further_layers import COUNT, count_stored_layers
from shardctl.libraries.megatron.layers import ZERO_CENTRED
from shardctl.tensors.naming_scheme import NamingScheme

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shardctl.tensors.mesh import Mesh
    from shardctl.tensors.naming_scheme import Fact

_OPTIMIZER_STATE_PATTERN: Final = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.state\.([^.]+)\.(.+)")
_OPTIMIZER_KEY_PATTERN: Final = re.compile(r"(?:chained_[0-9]+\.)?optimizer\..+")
_WRAPPER_PREFIXES: Final = ("model.module.module.", "model.module.", "module.module.", "module.", "model.")
"""What training loops put before Megatron-LM's names: NeMo 2 and Lightning, wrappers of data parallelism."""
_ROOT_MODULE_PREFIXES: Final = ("decoder.", "embedding.", "encoder.")
_EMBEDDING_NAME: Final = "embedding.word_embeddings.weight"
_OF_LAYER: Final = re.compile(r"decoder\.layers\.[0-9]+\..+")
_OF_EXPERT: Final = re.compile(r".+\.mlp\.experts\.experts\.[0-9]+\..+")
_GATE_UP_NAME_PATTERN: Final = re.compile(r".+\.linear_fc1\.(weight|bias)_w")


@state_class
class MegatronKeys:
    """The keys of tensors, by what they are."""

    wrapper: str = ""
    """What stands before Megatron-LM's own names."""
    weights: dict[str, str] = field(default_factory=dict)
    """Keys of weights, each with Megatron-LM's name for it."""
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Keys of optimizer states, each with the state's own name and the weight's."""
    buckets: list[str] = field(default_factory=list)
    """Keys of tensors that an optimizer keeps in an order of its own."""


def sort_keys(tensors: Collection[str]) -> MegatronKeys:
    """Return what each key is, from its name alone."""
    found = MegatronKeys(
        next((w for w in _WRAPPER_PREFIXES if any(k.startswith(w) and _is_ours(k, w) for k in tensors)), "")
    )
    for key in tensors:
        state = _OPTIMIZER_STATE_PATTERN.fullmatch(key)
        if state is not None:
            found.states[key] = state[1], state[2].removeprefix(found.wrapper)
        elif _OPTIMIZER_KEY_PATTERN.fullmatch(key):
            found.buckets.append(key)
        else:
            found.weights[key] = key.removeprefix(found.wrapper)
    return found


def _is_ours(key: str, wrapper: str) -> bool:
    return key.removeprefix(wrapper).startswith(_ROOT_MODULE_PREFIXES)


def build_dialect(shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, *, centred: bool = False) -> NamingScheme:
    """Build the variant that weights of these names and shapes are in.

    `mesh` is the one that wrote them, and `centred` says whether norms keep their weights less one.
    """
    facts: dict[str, Fact] = {
        LAYERS: _has_match(_OF_LAYER, shapes),
        EXPERTS: _has_match(_OF_EXPERT, shapes),
        HALVES: _has_match(_GATE_UP_NAME_PATTERN, shapes),
        ZERO_CENTRED: centred,
        COUNT: count_stored_layers(shapes),
    }
    embedding = shapes.get(_EMBEDDING_NAME)
    if embedding:
        facts[VOCABULARY] = embedding[0]
    return NamingScheme(NAME, mesh, facts=facts)


def _has_match(pattern: re.Pattern[str], names: Iterable[str]) -> bool:
    return any(pattern.fullmatch(name) is not None for name in names)
