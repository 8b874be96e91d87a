"""Lists what training keeps of layers that mix several states of each token (hyper-connections).

Counted of the connections and decoder layers of transformers 5's DeepSeek-V4, GLM-5.3-Flash and Hunyuan 4. Of a
family's dims, `count` are the states of a token, `streams` their elements, and `mixes` what is made of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.models.layer_traits import FurtherTensor

if TYPE_CHECKING:
    from collections.abc import Iterator


def list_mixed_streams() -> Iterator[FurtherTensor]:
    """Yield what is kept where streams go into each other, too, by shares evened out in `rounds` (DeepSeek-V4)."""
    for half in ("attention", "the MLP"):
        yield from _list_shares(half)
        yield FurtherTensor(f"all streams normed in fp32, before {half}", dims="streams", width=4)
        yield FurtherTensor(f"shares of the streams in each other behind {half}", dims="rounds count count", width=8)
        yield FurtherTensor(f"their sums, and the shares in the input of {half}", dims="rounds count", width=8)
        yield FurtherTensor(f"shares of the streams in each other, cast, behind {half}", dims="count count")
        yield FurtherTensor(f"shares of the result of {half}, cast", dims="count")
        yield FurtherTensor(f"result of {half}, before the streams", "hidden")


def list_added_streams() -> Iterator[FurtherTensor]:
    """Yield what is kept where a result is added to each stream, in fp32 (Hunyuan 4)."""
    for half in ("attention", "the MLP"):
        yield from _list_shares(half)
        yield FurtherTensor(f"the same before the norm, of {half}", dims="mixes", width=4)
        yield FurtherTensor(f"shares of the input and the result of {half}", dims="count", width=8)
        yield FurtherTensor(f"result of {half} in fp32, before the streams", "hidden", width=4)


def _list_shares(half: str) -> Iterator[FurtherTensor]:
    yield FurtherTensor(f"all streams and their fp32 copy, before {half}", dims="streams", width=6)
    yield FurtherTensor(f"statistics of that norm, before {half}", width=4)
    yield FurtherTensor(f"what is made of the streams in fp32, before {half}", dims="mixes", width=4)
    yield FurtherTensor(f"the same, activated, of {half}", dims="count", width=8)
