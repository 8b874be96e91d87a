"""Says which weights of BitNet can be cut: those that are stored as they are trained, not those that are packed.

transformers packs four rows into one (`integrations/bitnet.py`, `pack_weights`): row `i` holds rows `i`, `i + n/4`,
`i + n/2` and `i + 3n/4` of a matrix, and one scale is that of the whole matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.models.quantization.storage import QuantizationMethod

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig


def _refuse_packed(settings: ModelConfig) -> None:
    """Return nothing where weights are rounded while a model runs; raises UnsupportedError where they are packed."""
    linear, mode = settings.text("linear_class", "bitlinear"), settings.text("quantization_mode", "offline")
    if (linear, mode) == ("autobitlinear", "online"):
        return
    raise UnsupportedError(
        "the packed weights of BitNet cannot be cut: each byte holds four rows that are a quarter of the matrix apart, "
        "so that no run of packed rows is a run of heads",
        hint="on one device they are converted as they are; cut the model whose weights are bfloat16",
    )


BITNET: Final = QuantizationMethod(("bitnet",), _refuse_packed)
