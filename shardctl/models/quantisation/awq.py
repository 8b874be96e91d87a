"""AWQ as its `gemm` kernels want it: eight interleaved output codes an integer.

Layout: `WQLinear_GEMM` in AutoAWQ (awq/modules/linear/gemm.py). Within an integer the codes stand in the order 0, 2, 4,
6, 1, 3, 5, 7, so that no output can be taken from it, and eight outputs are the least that can be cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError
from shardctl.models.quantisation.gptq import bits_and_groups
from shardctl.models.quantisation.module_list import parts, words
from shardctl.models.quantisation.storage import FLOAT, IN, OUT, Along, Array, Method, Scheme, Storage, packed

if TYPE_CHECKING:
    from shardctl.models.config import Config


def _read(config: Config) -> Scheme:
    form = (config.text("version", "") or config.text("format", "gemm")).lower()
    if form != "gemm":
        raise UnsupportedError(f"AWQ weights in the format {form!r} are ordered for one kernel, and cannot be cut")
    bits, group = bits_and_groups(config, "w_bit" if "w_bit" in config.values else "bits")

    by_group = Along(IN, group) if group > 0 else 1
    storage = Storage(
        (
            Array("qweight", ("I32",), ((Along(IN), packed(OUT, bits)),)),
            Array("qzeros", ("I32",), ((by_group, packed(OUT, bits)),)),
            Array("scales", FLOAT, ((by_group, Along(OUT)),), plain=True),
            Array("bias", FLOAT, ((Along(OUT),),), optional=True),
        )
    )

    return Scheme(lambda _names: storage, parts(words(config, "modules_to_not_convert") or ()))


AWQ: Final = Method(("awq",), _read)
