"""Reads names that classes of transformers without a table had in memory in earlier versions as those of today.

>>> name = "model.layers.0.self_attn.r_proj.weight"
>>> modernize_name(name, {"architectures": ["Inkling2ForCausalLM"], "model_type": "inkling2_text"})
'model.layers.0.self_attn.relative_position_bias.linear.weight'
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardctl.models.names.wrapping import rename_training

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.tensors.manifest import Manifest

_INKLING2_ATTENTION_PATTERN: Final = re.compile(
    r"(?P<attention>model\.(?:language_model\.)?layers\.\d+\.self_attn)\.(?P<rest>.+)"
)
_INKLING2_RENAMES: Final = (
    (re.compile(r"(q|k|v|o)_proj\.weight"), r"\1_proj.linear.weight"),
    (re.compile(r"(k|v)_sconv\.(.+)"), r"\1_proj.sconv.\2"),
    (re.compile(r"r_proj\.(.+)"), r"relative_position_bias.linear.\1"),
    (re.compile(r"rel_logits_proj\.(.+)"), r"relative_position_bias.\1"),
    (re.compile(r"gate_proj\.(.+)"), r"o_proj.gate_proj.\1"),
    (re.compile(r"q_l2_clip\.(.+)"), r"q_proj.norm.\1"),
    (re.compile(r"rel_l2_clip\.(.+)"), r"relative_position_bias.norm.\1"),
)
"""What transformers 5.23 called parts of attention (`models/inkling2/modeling_inkling2.py`), and what 5.24 does."""
_INKLING2_TYPES: Final = ("inkling2", "inkling2_text")


def modernize_name(name: str, config: Mapping[str, Any]) -> str:
    """Return what transformers 5.24 calls a tensor in memory that an earlier version called `name`."""
    found = _INKLING2_ATTENTION_PATTERN.fullmatch(name) if config.get("model_type") in _INKLING2_TYPES else None
    if found is None:
        return name
    for pattern, new in _INKLING2_RENAMES:
        older = pattern.fullmatch(found["rest"])
        if older is not None:
            return f"{found['attention']}.{older.expand(new)}"
    return name


def read_older_names(stored: Manifest, config: Mapping[str, Any] | None) -> Manifest:
    """Return `stored`, and the states of optimizers, under the names that transformers 5.24 has in memory."""
    names = {name: modernize_name(name, config) for name in stored.tensors} if config is not None else {}
    if all(name == new for name, new in names.items()) or len(set(names.values())) < len(names):
        return stored
    tensors = {names[name]: replace(tensor, name=names[name]) for name, tensor in stored.tensors.items()}
    training = stored.training
    if training is not None:
        training = rename_training(training, lambda name: names.get(name, name))
    return replace(stored, tensors=tensors, training=training)
