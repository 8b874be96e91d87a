"""Reads what a config says of rotary embeddings, in any of transformers' spellings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.models.tables.config import is_finite_number

if TYPE_CHECKING:
    from collections.abc import Mapping

LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8_192}
"""What every Llama since 3.1 has beside its factor; Meta's code and Megatron-LM's args know no other."""
_DEFAULT_ROPE_THETA: Final = 10_000.0
"""What every config class assumes where a config is silent."""


@value_class
class RotaryEmbedding:
    """How positions turn queries and keys."""

    theta: float
    kind: str
    """`default`, or that of a scaling, such as `llama3`."""
    part: float
    """Of each head that is turned."""
    settings: Mapping[str, object]
    """The numbers of the scaling."""

    @property
    def as_llama3(self) -> bool:
        """Whether it is Llama 3's scaling by whatever factor."""
        return self.kind == "llama3" and all(self.settings.get(key) == value for key, value in LLAMA3.items())


def parse_rope(config: Mapping[str, object]) -> RotaryEmbedding:
    """Parse the rotary embeddings of a decoded `config.json`; raises SourceError for a theta or part that is no number.

    >>> parse_rope({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    RotaryEmbedding(theta=500000.0, kind='linear', part=1.0, settings={'factor': 2.0})
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    said: dict[str, object] = dict(given) if isinstance(given, dict) else {}
    kinds = [said.pop(key, None) for key in ("rope_type", "type")]
    theta, part = (
        said.pop(key, None) or config.get(key) or usual
        for key, usual in (("rope_theta", _DEFAULT_ROPE_THETA), ("partial_rotary_factor", 1.0))
    )
    if not is_finite_number(theta) or not is_finite_number(part):
        raise SourceError(f"config.json has rotary embeddings of theta {theta!r} for {part!r} of each head")
    return RotaryEmbedding(float(theta), str(next(filter(None, kinds), "default")), float(part), said)
