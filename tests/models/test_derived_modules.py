"""Architectures that no library knows are derived from names, shapes and config alone, and run in two halves."""

from __future__ import annotations

import pytest
import torch
from model_oracle import stored
from torch import nn
from torch.nn import functional

from shardctl.models.derived import derive_model
from shardctl.models.rules.untabled import build_untabled_model
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import compute_rank_boxes

HIDDEN, HEADS, KEY_HEADS, SIZE, WIDTH, EXPERTS, TOKENS = 32, 4, 2, 12, 40, 4, 50
CONFIG = {
    "architectures": ["NovelForCausalLM"],
    "model_type": "novel",
    "vocab_size": TOKENS,
    "n_heads": HEADS,
    "n_kv_heads": KEY_HEADS,
    "head_size": SIZE,
}


def attend(q, k, v, heads):
    """Attention of `heads` queries, which share keys; all are (length, heads x size)."""
    q, k, v = (x.view(len(x), -1, SIZE).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // len(x), 0) for x in (k, v))
    return (
        functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1).flatten(1)
    )


class PlainBlock(nn.Module):
    """A decoder's layer with linears of its own for queries, keys and values, and a plain MLP."""

    def __init__(self):
        super().__init__()
        self.mixer = nn.ModuleDict({"wq": nn.Linear(HIDDEN, HEADS * SIZE), "wk": nn.Linear(HIDDEN, KEY_HEADS * SIZE)})
        self.mixer.update({"wv": nn.Linear(HIDDEN, KEY_HEADS * SIZE), "wo": nn.Linear(HEADS * SIZE, HIDDEN)})
        self.ff = nn.ModuleDict({"fc_in": nn.Linear(HIDDEN, WIDTH), "fc_out": nn.Linear(WIDTH, HIDDEN)})

    def halves(self, states, held, ranks):
        """What the ranks add up to, each with what it holds."""
        q, k, v = (functional.linear(states, held[f"mixer.w{c}.weight"], held[f"mixer.w{c}.bias"]) for c in "qkv")
        mixed = functional.linear(attend(q, k, v, HEADS // ranks), held["mixer.wo.weight"])
        mixed = mixed + held["mixer.wo.bias"] / ranks
        inner = functional.gelu(functional.linear(states, held["ff.fc_in.weight"], held["ff.fc_in.bias"]))
        return mixed + functional.linear(inner, held["ff.fc_out.weight"]) + held["ff.fc_out.bias"] / ranks


class ExpertBlock(nn.Module):
    """A layer with fused queries, keys and values, and numbered experts, all of which see every token."""

    def __init__(self):
        super().__init__()
        rows = (HEADS + 2 * KEY_HEADS) * SIZE
        self.mixer = nn.ModuleDict({"qkv_proj": nn.Linear(HIDDEN, rows, bias=False)})
        self.mixer.update({"o_proj": nn.Linear(HEADS * SIZE, HIDDEN, bias=False)})
        names = {"w1": (HIDDEN, WIDTH), "w2": (WIDTH, HIDDEN), "w3": (HIDDEN, WIDTH)}
        experts = [nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in names.items()}) for _ in range(EXPERTS)]
        self.moe = nn.ModuleDict({"router": nn.Linear(HIDDEN, EXPERTS, bias=False), "experts": nn.ModuleList(experts)})

    def halves(self, states, held, ranks):
        """What the ranks add up to, each with what it holds."""
        fused = functional.linear(states, held["mixer.qkv_proj.weight"])
        heads = HEADS * len(held["mixer.qkv_proj.weight"]) // ((HEADS + 2 * KEY_HEADS) * SIZE)
        q, k, v = fused.split([heads * SIZE, heads * SIZE // 2, heads * SIZE // 2], -1)
        mixed = functional.linear(attend(q, k, v, heads), held["mixer.o_proj.weight"])
        mixed = mixed / ranks if heads == HEADS else mixed  # what both have is added once
        weights = functional.linear(states, held["moe.router.weight"]).softmax(-1)
        for n in range(EXPERTS):
            if held.get(f"moe.experts.{n}.w1.weight") is not None:
                gate, down, up = (held[f"moe.experts.{n}.w{i}.weight"] for i in (1, 2, 3))
                inner = functional.silu(functional.linear(states, gate)) * functional.linear(states, up)
                mixed = mixed + weights[:, n : n + 1] * functional.linear(inner, down)
        return mixed


class Novel(nn.Module):
    """A model of two layers."""

    def __init__(self, kind):
        super().__init__()
        self.tok_embed = nn.Embedding(TOKENS, HIDDEN)
        self.stack = nn.ModuleList([kind(), kind()])


def hold(tensors, values, mesh, rank):
    """What a rank has of each tensor of the first layer: dense, or None of an expert that is another's."""
    held = {}
    for name, tensor in tensors.items():
        if name.startswith("stack.0."):
            boxes = compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(rank))
            dims = [sorted({(b.origin[d], b.shape[d]) for b in boxes}) for d in range(len(tensor.shape))]
            part = values[name] if boxes else None
            for d, runs in enumerate(dims if boxes else ()):
                part = torch.cat([part.narrow(d, start, size) for start, size in runs], d)
            held[name.removeprefix("stack.0.")] = part
    return held


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(dp=2, ep=2)], ids=str)
@pytest.mark.parametrize("kind", [PlainBlock, ExpertBlock])
def test_two_halves_add_up_to_the_whole(kind, mesh):
    torch.manual_seed(0)
    model = Novel(kind).double()
    values = model.state_dict()
    known = build_untabled_model(CONFIG, stored((n, tuple(t.shape)) for n, t in values.items())).model
    derived = derive_model(CONFIG, known, share_kv=False)
    assert derived.derivation.origins == ("names and shapes",)
    fused = tuple(f"stack.*.mixer.{name}_proj.weight" for name in ("qkv", "o")) if kind is ExpertBlock else ()
    assert derived.derivation.unordered == tuple(each.pattern for each in derived.derivation.uncut) == fused
    states = torch.randn(7, HIDDEN, dtype=torch.float64)
    block = model.stack[0]
    whole = block.halves(states, hold(derived.tensors, values, Mesh.of(), 0), 1)
    parts = [hold(derived.tensors, values, mesh, rank) for rank in range(2)]
    if mesh.degree("tp") == 1 and kind is PlainBlock:
        assert all(torch.equal(part, values[f"stack.0.{name}"]) for name, part in parts[0].items())
        return
    if mesh.degree("tp") == 1:
        assert [n for n in range(EXPERTS) if parts[1][f"moe.experts.{n}.w1.weight"] is None] == [0, 1]
    halves = [block.halves(states, part, 2) for part in parts]
    if kind is ExpertBlock and mesh.degree("tp") > 1:
        for name in ("mixer.qkv_proj.weight", "mixer.o_proj.weight"):
            assert torch.equal(parts[1][name], values[f"stack.0.{name}"])
    torch.testing.assert_close(sum(halves), whole)
    assert not torch.allclose(2 * halves[0], whole)
