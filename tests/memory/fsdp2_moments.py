"""A program that trains a model as one rank of many with FSDP2 and prints the most bytes alive in moments of a step.

Tensors are fake and collectives do nothing, which leaves sizes and lifetimes as they are: FSDP2 allocates and frees in
the order of the program. Every storage is counted from when it is allocated, or resized, until nothing refers to it.
The second step is measured, when there are optimizer states.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
import weakref
from collections import Counter, defaultdict
from unittest import mock

import torch
import torch.distributed as dist
from fake_peak import FusedNorm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,  # CPU's, in the place of those for GPUs
    aten.max.default,
}
"""torchtitan's list of what operation-level checkpointing saves, as far as these models have it."""


class Norm(nn.Module):
    """torch.nn.RMSNorm as a GPU computes it; on a CPU it is made of other operations."""

    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return FusedNorm.apply(x, self.weight)


class Attention(nn.Module):
    def __init__(self, hidden, heads, kv_heads, head_dim):
        super().__init__()
        self.sizes = heads, kv_heads, head_dim
        self.wq = nn.Linear(hidden, heads * head_dim, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x, cos, sin):
        heads, kv_heads, dim = self.sizes
        batch, tokens, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = rotate(q.view(batch, tokens, heads, dim), cos, sin)
        k = rotate(k.view(batch, tokens, kv_heads, dim), cos, sin)
        v = v.view(batch, tokens, kv_heads, dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, tokens, -1))


def rotate(x, cos, sin):
    """As torchtitan rotates: in fp32, by complex numbers or their parts, of which nothing is kept."""
    wide = x.float()
    one, two = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-two, one), -1) * sin).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, hidden, intermediate, heads, kv_heads, head_dim):
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(hidden), Norm(hidden)
        self.attention = Attention(hidden, heads, kv_heads, head_dim)
        self.w1 = nn.Linear(hidden, intermediate, bias=False)
        self.w2 = nn.Linear(intermediate, hidden, bias=False)
        self.w3 = nn.Linear(hidden, intermediate, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.ffn_norm(x)
        return x + self.w2(functional.silu(self.w1(y)) * self.w3(y))


class Decoder(nn.Module):
    """Llama as torchtitan writes it."""

    def __init__(self, layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList([Layer(hidden, intermediate, heads, kv_heads, head_dim) for _ in range(layers)])
        self.norm = Norm(hidden)
        self.output = nn.Linear(hidden, vocabulary, bias=False)
        self.head_dim = head_dim

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        cos = sin = torch.ones(ids.shape[1], 1, self.head_dim)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


class Tracker(TorchDispatchMode):
    """Notes how many bytes of storages are alive, by moment."""

    def __init__(self):
        super().__init__()
        self.size, self.what, self.watch = {}, {}, {}
        self.now, self.moment = 0, "before"
        self.most, self.blocks, self.order = {}, {}, []
        self.armed = False

    def enter(self, moment):
        self.moment = moment
        self.note()

    def note(self):
        if not self.armed:
            return
        if self.now > self.most.get(self.moment, -1):
            if self.moment not in self.most:
                self.order.append(self.moment)
            self.most[self.moment] = self.now
            found = Counter()
            for key, nbytes in self.size.items():
                found[self.what[key]] += nbytes
            self.blocks[self.moment] = found

    def see(self, tensor, made_by):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.size:
            self.size[key] = storage.nbytes()
            self.what[key] = f"{made_by} {str(tensor.dtype)[6:]} {tuple(tensor.shape)}"
            self.now += self.size[key]

            def gone(_, key=key):
                self.now -= self.size.pop(key)
                del self.what[key], self.watch[key]

            self.watch[key] = weakref.ref(storage, gone)
            self.note()

    def resized(self, storage):
        key = storage._cdata
        if key in self.size:
            self.now += storage.nbytes() - self.size[key]
            self.size[key] = storage.nbytes()
            self.note()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self.see(getattr(leaf, "_local_tensor", leaf), str(func).removesuffix(".default"))
        return made


def policy():
    """torchtitan's: all of `SAVED`, but every second product of matrices."""
    counts = defaultdict(int)

    def choose(ctx, func, *_, **__):
        if func == aten.mm.default:
            counts[ctx.is_recompute] += 1
        saved = func in SAVED and not (func == aten.mm.default and counts[ctx.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def wrap(model, recompute):
    for n, layer in enumerate(list(model.layers), 1):
        if recompute == "full" or (recompute.isdigit() and n % int(recompute) == 0):
            model.layers[n - 1] = checkpoint_wrapper(layer, preserve_rng_state=False)
        elif recompute == "op":
            model.layers[n - 1] = checkpoint_wrapper(layer, context_fn=policy, preserve_rng_state=False)


def shard(model, mesh, units, reshard):
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    if units == "parts":
        fully_shard(model.tok_embeddings, **options, reshard_after_forward=reshard)
    for layer in model.layers:
        fully_shard(layer, **options, reshard_after_forward=reshard)
    if units == "parts":
        fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options)


def synchronise(model, *, reduce):
    """As torch's pipelines set it before each microbatch, and after the last (distributed/pipelining/stage.py)."""
    model.set_is_last_backward(reduce)
    model.set_reshard_after_backward(reduce)
    model.set_requires_gradient_sync(reduce)


def label(group):
    return (group._module_fqn or "root").replace("._checkpoint_wrapped_module", "")


def follow(tracker):
    """Patch FSDP2 so that it says in which moment it is."""
    stack = mock.patch.object

    def told(name, said, after=None):
        original = getattr(FSDPParamGroup, name)

        @functools.wraps(original)
        def call(self, *args, **kwargs):
            tracker.enter(f"{said} {label(self)}")
            found = original(self, *args, **kwargs)
            if after:
                tracker.enter(f"{after} {label(self)}")
            return found

        return stack(FSDPParamGroup, name, call)

    return (
        told("pre_forward", "forward"),
        told("pre_backward", "backward"),
        told("post_backward", "reduce", "after"),
    )


def train(case, model, optimizer, tracker):
    """One step."""
    ids = torch.zeros(case["batch"], case["tokens"], dtype=torch.long)
    optimizer.zero_grad()
    for _ in range(case["microbatches"]):
        if case.get("piped"):
            synchronise(model, reduce=False)
        tracker.enter("forward")
        logits = model(ids)
        tracker.enter("loss")
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(0, 1))
        del logits
        tracker.enter("backward loss")
        loss.backward()
        del loss
    if case.get("piped"):
        synchronise(model, reduce=True)
        for state in fully_shard.state(model)._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group.post_backward()
        fully_shard.state(model)._root_post_backward_final_callback()
    tracker.enter("step")
    optimizer.step()
    tracker.enter("end")


def measure(case):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["ranks"])
    mesh = init_device_mesh("cpu", (case["ranks"],))
    tracker = Tracker()
    resize = torch.UntypedStorage.resize_

    def resized(self, size):
        found = resize(self, size)
        tracker.resized(self)
        return found

    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.object(torch.UntypedStorage, "resize_", resized):
        model = Decoder(**case["model"])
        wrap(model, case["recompute"])
        shard(model, mesh, case["units"], case.get("reshard", True))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=not case["fused"], fused=case["fused"])
        first, second, third = follow(tracker)
        with tracker, first, second, third:
            for p in model.parameters():
                tracker.see(p._local_tensor, "parameter")
            for step in range(2):
                tracker.armed = step == 1
                train(case, model, optimizer, tracker)
    dist.destroy_process_group()
    moments = [{"moment": m, "bytes": tracker.most[m]} for m in tracker.order]
    for moment in moments if case.get("blocks") else ():
        moment["blocks"] = tracker.blocks[moment["moment"]].most_common(25)
    return moments


def main():
    warnings.simplefilter("ignore")
    print(json.dumps([measure(case) for case in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
