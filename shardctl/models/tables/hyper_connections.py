"""Lists the saved activations of layers that mix multiple residual streams (hyper-connections).

Counted of the connections and decoder layers of transformers 5's DeepSeek-V4, GLM-5.3-Flash and Hunyuan 4. Of a
family's dims, `count` are the residual streams of a token, `streams` their elements, and `mixes` what is made of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.models.tables.layer_features import FurtherTensor

if TYPE_CHECKING:
    from collections.abc import Iterator


def list_mixed_streams(experts: str) -> Iterator[FurtherTensor]:
    """Yield the saved activations where residual streams are mixed by shares evened out in `rounds` (DeepSeek-V4).

    `experts` is the table's condition for layers with experts, whose results are as wide as they are.
    """
    for half in ("attention", "the MLP"):
        yield from _list_shares(half)
        yield from _list_products(half)
        yield FurtherTensor(f"shares of the streams in each other behind {half}", dims="rounds count count", width=8)
        yield FurtherTensor(f"their sums, and the shares in the input of {half}", dims="rounds count", width=8)
        yield FurtherTensor(f"shares of the streams in each other, cast, behind {half}", dims="count count")
        yield FurtherTensor(f"result of {half}, before the streams", "hidden")
    yield FurtherTensor("what is wider of the result of experts", "hidden", "", 2, experts, ("wide experts",))


def list_added_streams() -> Iterator[FurtherTensor]:
    """Yield what is kept where a result is added to each stream, in fp32 (Hunyuan 4), autocast or not."""
    for half in ("attention", "the MLP"):
        yield from _list_shares(half)
        yield FurtherTensor(f"what is made of the streams in fp32, also normed, of {half}", dims="mixes", width=8)
        yield FurtherTensor(f"shares of the input and the result of {half}", dims="count", width=8)
        yield FurtherTensor(f"result of {half} in fp32, before the streams", "hidden", width=4)


def _list_shares(half: str) -> Iterator[FurtherTensor]:
    yield FurtherTensor(f"all streams in fp32, before {half}", dims="streams", width=4)
    yield FurtherTensor(f"the same in the type that computes, before {half}", "tokens", "streams", 2, "", ("uncast",))
    yield FurtherTensor(f"statistics of that norm, before {half}", width=4)
    yield FurtherTensor(f"what is made of the streams, activated, of {half}", dims="count", width=8)


def _list_products(half: str) -> Iterator[FurtherTensor]:
    """Yield what products of streams keep, which compute in fp32 unless they are cast."""
    for name, dims, width, given in (
        (f"all streams normed in fp32, before {half}", "streams", 4, "uncast"),
        (f"all streams normed and cast, before {half}", "streams", 2, "autocast"),
        (f"all streams, cast, behind {half}", "streams", 2, "autocast"),
        (f"what is made of the streams in fp32, before {half}", "mixes", 4, "uncast"),
        (f"what is made of the streams, cast, before {half}", "mixes", 2, "autocast"),
        (f"shares of the result of {half}, cast", "count", 2, "uncast"),
        (f"shares of the result of {half} in fp32", "count", 4, "autocast"),
    ):
        yield FurtherTensor(name, "tokens", dims, width, "", (given,))
