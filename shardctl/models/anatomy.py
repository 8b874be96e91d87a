"""What a model is made of, layer by layer: what estimates of memory, traffic and work need besides its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer, whose keys and values grow with the tokens."""

    kind: Literal["full", "sliding", "latent"]
    heads: int
    """Query heads."""
    kv_heads: int
    """Heads of keys and values; of latent attention as many as query heads, though it caches none of them."""
    head_dim: int
    """Elements of one query or key."""
    value_dim: int
    """Elements of one value."""
    window: int | None = None
    """Tokens that a query sees, where it sees not all (sliding and chunked attention)."""
    latent: int = 0
    """Elements that latent attention caches of each token for all heads together: `kv_lora_rank + qk_rope_head_dim`."""
    cross: bool = False
    """Whether the layer attends to the encoder, too, with heads of the same numbers and a cache of its own."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of one layer that does not grow with the tokens (Mamba, gated delta net)."""

    convolution: int
    """Elements per sequence of the window of the convolution."""
    recurrent: int
    """Elements per sequence of the recurrent state."""
    recurrent_fp32: bool
    """Whether the recurrent state is kept in fp32 whatever the model's type."""
    divided: bool = True
    """Whether tp divides it."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of one layer, and the shared ones."""

    count: int
    chosen: int
    """Experts that each token goes to."""
    size: int
    """The intermediate size of one."""
    shared: int = 0
    """The intermediate size of those that see every token, all together; 0 for none."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One pipeline layer."""

    attention: Attention | None
    """None where there is no attention (Mamba)."""
    state: State | None
    mlp: int
    """The intermediate size of the dense MLP; 0 where there is none."""
    gated: bool
    """Whether the MLP, or each expert, has a gate projection beside the up projection."""
    experts: Experts | None
    encoder: bool = False
    """Whether it is an encoder's, which caches nothing and sees tokens both ways."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A transformer, or a model with layers of its kind."""

    hidden: int
    vocabulary: int
    """Outputs of the head and rows of the embedding, as the config says; 0 for a model without."""
    layers: tuple[Layer, ...]
    """In pipeline order: of an encoder-decoder first those of the encoder."""
    tied: bool
    """Whether the head is the embedding."""
    generates: bool
    """Whether the class has a language-modelling head and a cache to generate with."""
    positions: int | None
    """The most tokens that the model was made for, where the config says so."""
