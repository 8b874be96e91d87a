"""What torch's caching allocator reserves for FSDP2, by its rules, as torchtitan trained Llama-3.1-8B in December 2024.

    python docs/benchmarks/reserved.py [--layers 32] [--ranks 8] [--steps 2]

Every storage of two steps of torch's own FSDP2, with torchtitan's selective recomputation and uncompiled layers, is
followed with fake tensors and a fake process group, and put through the rules of `CUDACachingAllocator.cpp` without
expandable segments: a pool for each stream, the smallest free block that fits, and what is left of it if it is more
than 1 MiB. Nothing of transformers, of torchtitan or of shardctl is asked. It needs a minute and 2 GiB.
"""

from __future__ import annotations

import argparse
import collections
import gc
import weakref
from bisect import bisect_left, insort
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

MIB, GIB = 1 << 20, 1 << 30
HIDDEN, WIDE, HEADS, KEYS, DIM, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
WORKSPACE = 32 * MIB
"""Of cuBLAS since Hopper, for each thread that multiplies."""
ATEN = torch.ops.aten
SAVED = {
    ATEN.mm.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001 - its only name
}


@dataclass(eq=False)
class Block:
    """A stretch of a segment."""

    segment: int
    start: int
    size: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class Pool:
    """Segments of one stream, of blocks up to 1 MiB or of larger ones."""

    def __init__(self, *, small: bool) -> None:
        self.small, self.segments, self.reserved = small, 0, 0
        self.free: list[tuple[int, int, int, Block]] = []

    def take(self, size: int) -> Block:
        at = bisect_left(self.free, (size, -1, -1), key=lambda one: one[:3])
        if at < len(self.free):
            block = self.free.pop(at)[3]
        else:
            whole = 2 * MIB if self.small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            block = Block(self.segments, 0, whole)
            self.segments += 1
            self.reserved += whole
        if block.size - size >= 512 if self.small else block.size - size > MIB:
            rest = Block(block.segment, block.start + size, block.size - size, True, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._add(rest)
        block.free = False
        return block

    def give(self, block: Block) -> None:
        block.free = True
        if block.before is not None and block.before.free:
            self._remove(block.before)
            block = self._join(block.before, block)
        if block.after is not None and block.after.free:
            self._remove(block.after)
            block = self._join(block, block.after)
        self._add(block)

    def _join(self, first: Block, second: Block) -> Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _add(self, block: Block) -> None:
        insort(self.free, (block.size, block.segment, block.start, block), key=lambda one: one[:3])

    def _remove(self, block: Block) -> None:
        self.free.pop(bisect_left(self.free, (block.size, block.segment, block.start), key=lambda one: one[:3]))


class Follower(TorchDispatchMode):
    """Gives every new storage a block of the stream that is current, until nothing refers to it."""

    def __init__(self) -> None:
        super().__init__()
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.known: weakref.WeakKeyDictionary[torch.UntypedStorage, list] = weakref.WeakKeyDictionary()
        self.allocated = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self.see(one.untyped_storage())
        return made

    def see(self, storage: torch.UntypedStorage) -> None:
        if storage not in self.known:
            self.known[storage] = held = []
            self.hold(held, storage.nbytes())
            weakref.finalize(storage, self.drop, held)

    def hold(self, held: list, nbytes: int) -> None:
        if nbytes:
            size = -(-nbytes // 512) * 512
            key = id(torch.cpu.current_stream()), size <= MIB
            pool = self.pools.setdefault(key, Pool(small=key[1]))
            held += [pool, pool.take(size)]
            self.allocated += held[1].size
            self.peak = max(self.peak, self.allocated)

    def drop(self, held: list) -> None:
        if held:
            pool, block = held
            held.clear()
            self.allocated -= block.size
            pool.give(block)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(HIDDEN, KEYS * DIM, bias=False) for _ in range(2))

    def forward(self, x, turns):
        batch, tokens, _ = x.shape
        q, k, v = (one(x).view(batch, tokens, -1, DIM) for one in (self.wq, self.wk, self.wv))
        turned = []
        for one in (q, k):
            pairs = torch.view_as_complex(one.float().reshape(*one.shape[:-1], -1, 2))
            turned.append(torch.view_as_real(pairs * turns).flatten(3).type_as(one))
        q, k = turned
        k, v = (
            one[:, :, :, None, :].expand(batch, tokens, KEYS, HEADS // KEYS, DIM).reshape(batch, tokens, HEADS, DIM)
            for one in (k, v)
        )
        made = functional.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), is_causal=True)
        return self.wo(made.transpose(1, 2).contiguous().view(batch, tokens, -1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.before, self.between = Attention(), Norm(), Norm()
        self.w1, self.w3 = (nn.Linear(HIDDEN, WIDE, bias=False) for _ in range(2))
        self.w2 = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x, turns):
        x = x + self.attention(self.before(x), turns)
        return x + self.feed(self.between(x))

    def feed(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Model(nn.Module):
    def __init__(self, layers: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.register_buffer("turns", torch.zeros(1, tokens, 1, DIM // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.output = Norm(), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.output(self.norm(x))


def choose_saved():
    """torchtitan's `_save_list`: attention, and every second product of matrices."""
    counts = collections.Counter()

    def choose(context, func, *_args, **_kwargs):
        counts[context.is_recompute] += func == ATEN.mm.default
        saved = func in SAVED and (func != ATEN.mm.default or counts[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def step_adam(model: nn.Module, states: list) -> None:
    with torch.no_grad():
        weights = [one.to_local() for one in model.parameters()]
        gradients = [one.grad.to_local() for one in model.parameters()]
        if not states:
            states += [[torch.zeros_like(one) for one in weights] for _ in range(2)]
        first, second = states
        torch._foreach_lerp_(first, gradients, 0.1)
        torch._foreach_addcmul_(second, gradients, gradients, 0.1)
        roots = torch._foreach_sqrt(second)  # noqa: SLF001
        torch._foreach_addcdiv_(weights, first, roots)


def follow_steps(layers: int, ranks: int, steps: int, batch: int = 2, tokens: int = 8192) -> Follower:
    mesh, mode = init_device_mesh("cpu", (ranks,)), FakeTensorMode(allow_non_fake_inputs=True)
    follower = Follower()
    resize = torch.UntypedStorage.resize_

    def resized(storage, nbytes):
        made = resize(storage, nbytes)
        if storage in follower.known:
            held = follower.known[storage]
            follower.drop(held)
            follower.hold(held, nbytes)
        return made

    torch.UntypedStorage.resize_ = resized
    with mode:
        with torch.device("meta"):
            model = Model(layers, tokens)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for number, layer in enumerate(model.layers):
            wrapped = checkpoint_wrapper(layer, preserve_rng_state=False, context_fn=choose_saved)
            model.layers[number] = fully_shard(
                wrapped, mesh=mesh, mp_policy=policy, reshard_after_forward=number < layers - 1
            )
        fully_shard(model, mesh=mesh, mp_policy=policy)
        states: list = []
        with follower:
            model.to_empty(device="cpu")
            for _ in range(2):
                follower.hold([], WORKSPACE)
            gc.collect()
            gc.disable()
            for _ in range(steps):
                inputs, labels = (torch.zeros(batch, tokens, dtype=torch.int64) for _ in range(2))
                model.zero_grad()
                logits = model(inputs)
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
                del logits
                loss.backward()
                step_adam(model, states)
    torch.UntypedStorage.resize_ = resize
    return follower


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, usual in (("layers", 32), ("ranks", 8), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=given.ranks)
    follower = follow_steps(given.layers, given.ranks, given.steps)
    reserved = sum(pool.reserved for pool in follower.pools.values())
    sizes = f"{follower.peak / GIB:.2f} GiB allocated, {reserved / GIB:.2f} reserved"
    print(f"{given.layers} layers, fsdp{given.ranks}: {sizes}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
