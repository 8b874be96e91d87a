"""The oracle of activation memory: the bytes that torch keeps alive in a forward and a backward pass, counted exactly.

Under FakeTensorMode every kernel runs on shapes alone, and autograd keeps what it would keep; so a model of any size is
measured in seconds, without its memory. What a kernel needs inside itself, and how an allocator rounds, is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable


class FusedNorm(torch.autograd.Function):
    """A norm of `x` by a weight that keeps what a fused kernel does: its input, and a number for each token."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, _):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@dataclass(frozen=True)
class Block:
    """One storage, and what first made it."""

    nbytes: int
    made_by: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Peak:
    """What was alive of activations, apart from parameters, their gradients and the inputs."""

    kept: int
    """Bytes alive after the forward pass."""
    nbytes: int
    """The most bytes alive at any time."""
    during: str
    """The kernel whose results made it the most, and how far the passes were."""
    blocks: Counter[tuple[str, tuple[int, ...], torch.dtype]] = field(default_factory=Counter)
    """Bytes alive then, by what made them."""

    def __str__(self) -> str:
        lines = [f"kept {self.kept:,}, peak {self.nbytes:,} during {self.during}"]
        lines += [
            f"{size:>16,}  {str(dtype)[6:]:8} {shape}  {op}" for (op, shape, dtype), size in self.blocks.most_common()
        ]
        return "\n".join(lines)


class _Live(TorchDispatchMode):
    """Notes when each storage begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self.events: list[tuple[int, int]] = []
        """`(+1 or -1, number of the block)` in the order of time."""
        self._number: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def see(self, tensor: torch.Tensor, made_by: str) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._number:
            number = len(self.blocks)
            self._number[key] = number
            self.blocks.append(Block(storage.nbytes(), made_by, tuple(tensor.shape), tensor.dtype))
            self.events.append((1, number))

            def gone(_: object, key: int = key) -> None:
                self.events.append((-1, self._number.pop(key)))
                del self._watch[key]

            self._watch[key] = weakref.ref(storage, gone)
        return self._number[key]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf, str(func))
        return made


def peak_of(build: Callable[[], torch.nn.Module], step: Callable[[torch.nn.Module], torch.Tensor]) -> Peak:
    """What is alive while `step(model)` makes a loss and its backward pass runs, after `build()` made the model.

    Both run on fake tensors. What `build` makes is not counted.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build()
        live = _Live()
        with live:
            for tensor in (*model.parameters(), *model.buffers()):
                live.see(tensor, "model")
            own = len(live.blocks)
            loss = step(model)
            forward = len(live.events)
            loss.backward()
        gradients = {live.see(p.grad, "gradient") for p in model.parameters() if p.grad is not None}
    return _measure(live, own, forward, gradients)


def _measure(live: _Live, own: int, forward: int, gradients: set[int]) -> Peak:
    now = most = kept = at = 0
    for n, (sign, number) in enumerate(live.events):
        if number >= own and number not in gradients:
            now += sign * live.blocks[number].nbytes
        if n + 1 == forward:
            kept = now
        if now > most:
            most, at = now, n
    alive: set[int] = set()
    for sign, number in live.events[: at + 1]:
        (alive.add if sign > 0 else alive.discard)(number)
    blocks: Counter[tuple[str, tuple[int, ...], torch.dtype]] = Counter()
    for number in alive:
        if number >= own and number not in gradients:
            block = live.blocks[number]
            blocks[block.made_by, block.shape, block.dtype] += block.nbytes
    phase = "forward" if at < forward else "backward"
    return Peak(kept, most, f"{live.blocks[live.events[at][1]].made_by} in the {phase} pass", blocks)


def peak_of_causal_lm(
    config: object, batch: int, sequence: int, *, attention: str = "sdpa", checkpointing: bool = False
) -> Peak:
    """The peak of transformers' model for `config` in bf16, its loss included; all sequences full.

    The model looks into the positions for packed sequences, which fake ones cannot answer: it is told that there are
    none. The outputs besides the loss are let go before the backward pass, as transformers' `Trainer` does.
    """
    from transformers import AutoModelForCausalLM, masking_utils

    def build() -> torch.nn.Module:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()
        return model

    def step(model: torch.nn.Module) -> torch.Tensor:
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        with mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    return peak_of(build, step)
