"""Two architectures that no library has: cut by names, shapes and config alone, run from each rank's own file.

The code below computes a layer from what each rank holds and adds what tensor parallelism adds; with the whole state as
the only rank it is the model itself.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention, silu

from shardctl.cli.program import run
from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard

WIDTH, HEADS, KEY_HEADS, SIZE, INNER, TOKENS, LAYERS, EXPERTS = 32, 4, 2, 8, 48, 97, 2, 4
CONFIG = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": SIZE,
    "vocab_size": TOKENS,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
}
DECODER = {**CONFIG, "architectures": ["HeronForCausalLM"], "model_type": "heron"}
EXPERT_DECODER = {**CONFIG, "architectures": ["EgretForCausalLM"], "model_type": "egret", "num_experts": EXPERTS}


def list_shapes(config):
    """Names and shapes of a model; `{n}` is a layer."""
    shapes = {"backbone.embed_tokens.weight": (TOKENS, WIDTH), "lm_head.weight": (TOKENS, WIDTH)}
    keys = KEY_HEADS * SIZE
    for n in range(LAYERS):
        layer = f"backbone.layers.{n}"
        shapes |= {f"{layer}.norm_a.weight": (WIDTH,), f"{layer}.norm_b.weight": (WIDTH,)}
        shapes |= {f"{layer}.attention.o_proj.weight": (WIDTH, HEADS * SIZE)}
        if config is DECODER:
            shapes |= {
                f"{layer}.attention.q_proj.weight": (HEADS * SIZE, WIDTH),
                f"{layer}.attention.q_norm.weight": (SIZE,),
            }
            shapes |= {
                f"{layer}.attention.{k}_proj.{p}": (keys, WIDTH)[: 2 - (p == "bias")]
                for k in "kv"
                for p in ("weight", "bias")
            }
            shapes |= {f"{layer}.mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
            shapes |= {f"{layer}.mlp.down_proj.weight": (WIDTH, INNER)}
            continue
        rows = {"q": HEADS * SIZE, "k": keys, "v": keys}
        shapes |= {f"{layer}.attention.{name}_proj.weight": (count, WIDTH) for name, count in rows.items()}
        shapes |= {f"{layer}.moe.router.weight": (EXPERTS, WIDTH)}
        for expert in range(EXPERTS):
            shapes |= {f"{layer}.moe.experts.{expert}.{w}.weight": (INNER, WIDTH) for w in ("w1", "w3")}
            shapes |= {f"{layer}.moe.experts.{expert}.w2.weight": (WIDTH, INNER)}
    return shapes


def attend(config, state, layer, x):
    """What one rank's heads give."""
    out = state[f"{layer}.o_proj.weight"]
    heads = out.shape[1] // SIZE
    if config is DECODER:
        q = x @ state[f"{layer}.q_proj.weight"].T
        k, v = (x @ state[f"{layer}.{n}_proj.weight"].T + state[f"{layer}.{n}_proj.bias"] for n in "kv")
    else:
        q, k, v = (x @ state[f"{layer}.{n}_proj.weight"].T for n in "qkv")
    q, k, v = (part.unflatten(-1, (-1, SIZE)).transpose(-2, -3) for part in (q, k, v))
    if config is DECODER:
        q = q * state[f"{layer}.q_norm.weight"]
    k, v = (part.repeat_interleave(heads // part.shape[-3], -3) for part in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2) @ out.T


def feed(config, state, layer, x):
    """What one rank's columns or experts give; every token goes to two experts."""
    if config is DECODER:
        gate, up = (x @ state[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return (silu(gate) * up) @ state[f"{layer}.mlp.down_proj.weight"].T
    scores = (x @ state[f"{layer}.moe.router.weight"].T).softmax(-1)
    scores = scores * (scores >= scores.topk(2).values[..., -1:])
    found = torch.zeros_like(x)
    for expert in range(EXPERTS):
        owner = f"{layer}.moe.experts.{expert}"
        if f"{owner}.w2.weight" in state:
            one, three, two = (state[f"{owner}.w{n}.weight"] for n in (1, 3, 2))
            found += scores[..., expert : expert + 1] * ((silu(x @ one.T) * (x @ three.T)) @ two.T)
    return found


def compute(config, ranks, ids, *, apart):
    """Logits from what ranks hold; `apart` says that they share attention and tokens, else experts alone."""

    def add(part, *rest):
        return sum(part(config, state, *rest) for state in (ranks if apart or part is feed else ranks[:1]))

    def embed(state, first):
        table = state["backbone.embed_tokens.weight"]
        inside = (ids >= first) & (ids < first + len(table))
        return torch.where(inside[..., None], table[(ids - first).clamp(0, len(table) - 1)], 0)

    starts = [0]
    for state in ranks[:-1] if apart else ():
        starts.append(starts[-1] + len(state["backbone.embed_tokens.weight"]))
    x = sum(embed(state, first) for state, first in zip(ranks, starts, strict=False))
    for n in range(LAYERS):
        layer = f"backbone.layers.{n}"
        x = x + add(attend, f"{layer}.attention", normalise(x) * ranks[0][f"{layer}.norm_a.weight"])
        x = x + add(feed, layer, normalise(x) * ranks[0][f"{layer}.norm_b.weight"])
    heads = [state["lm_head.weight"] for state in (ranks if apart else ranks[:1])]
    return torch.cat([normalise(x) @ head.T for head in heads], -1)


def normalise(x):
    return x * x.pow(2).mean(-1, keepdim=True).rsqrt()


@pytest.fixture(params=[DECODER, EXPERT_DECODER], ids=["decoder", "experts"])
def unknown(request, tmp_path):
    """A saved model that nobody knows: its config, state and folder."""
    torch.manual_seed(0)
    state = {name: torch.randn(shape) * 0.3 + (len(shape) == 1) for name, shape in list_shapes(request.param).items()}
    (tmp_path / "source").mkdir()
    save_file(state, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    (tmp_path / "source" / "config.json").write_text(json.dumps(request.param))
    return request.param, state, tmp_path / "source"


def load_ranks(path):
    """What each rank's files hold; of fused rows, each section has a file of its own."""
    found = {}
    for file in sorted(path.glob("shard-*.safetensors")):
        held = found.setdefault(file.name.split("-")[1], {})
        held |= {n: torch.cat([held[n], part]) if n in held else part for n, part in load_file(file).items()}
    return list(found.values())


IDS = torch.arange(24).reshape(2, 12) * 4 % TOKENS


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(dp=2, ep=2)], ids=str)
def test_ranks_compute_what_the_model_computes_and_come_back(unknown, tmp_path, mesh):
    config, state, source = unknown
    if config is DECODER and mesh.degree("ep") > 1:
        pytest.skip("it has no experts")
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=mesh))
    ranks = load_ranks(tmp_path / "ranks")
    assert len(ranks) == 2
    held = [sum(t.numel() for t in each.values()) for each in ranks]
    assert max(held) < 0.8 * sum(t.numel() for t in state.values())
    if mesh.degree("ep") > 1:  # what is whole on both is written once
        shared = {n: t for each in ranks for n, t in each.items() if ".experts." not in n}
        ranks = [shared | {n: t for n, t in each.items() if ".experts." in n} for each in ranks]
    whole = compute(config, [state], IDS, apart=True)
    found = compute(config, ranks, IDS, apart=mesh.degree("tp") > 1)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert digest(tmp_path / "back").digest == digest(source).digest


def test_what_was_derived_is_said(unknown, tmp_path, capfd):
    config, _, source = unknown
    assert run(["plan", str(source), "--tp", "2"]) == 0
    said = capfd.readouterr().err
    assert f"no table for {config['architectures'][0]}; its cuts are derived from names and shapes" in said
    assert run(["inspect", str(source), "--show-rules"]) == 0
    (tmp_path / "rules.toml").write_text(capfd.readouterr().out)
    reshard(source, tmp_path / "derived", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert (
        run(["reshard", str(source), str(tmp_path / "printed"), "--tp", "2", "--rules", str(tmp_path / "rules.toml")])
        == 0
    )
    for one, other in zip(load_ranks(tmp_path / "derived"), load_ranks(tmp_path / "printed"), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_heads_that_are_exchanged_are_seen(unknown, tmp_path):
    """The comparison can fail: two ranks with each other's queries compute something else."""
    config, state, source = unknown
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    ranks = load_ranks(tmp_path / "ranks")
    name = next(n for n in ranks[0] if n.endswith("q_proj.weight"))
    ranks[0][name], ranks[1][name] = ranks[1][name], ranks[0][name]
    assert not torch.allclose(
        compute(config, ranks, IDS, apart=True), compute(config, [state], IDS, apart=True), rtol=1e-2
    )


def test_arrays_whose_order_is_not_known_are_whole_on_every_rank_and_said_to_be(tmp_path, capfd):
    """Rows of a class that nobody knows may be fused group by group, and gates and ups may alternate."""
    layer = "backbone.layers.0"
    shapes = {
        f"{layer}.attention.qkv_proj.weight": ((HEADS + 2 * KEY_HEADS) * SIZE, WIDTH),
        f"{layer}.attention.o_proj.weight": (WIDTH, HEADS * SIZE),
        f"{layer}.mlp.gate_up_proj.weight": (2 * INNER, WIDTH),
        f"{layer}.mlp.down_proj.weight": (WIDTH, INNER),
        "lm_head.weight": (TOKENS, WIDTH),
    }
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(DECODER))
    rows = {"q": HEADS * SIZE, "k": KEY_HEADS * SIZE, "v": KEY_HEADS * SIZE, "o": HEADS * SIZE}
    cut = {f"{layer}.cross.{name}_proj.weight": torch.randn(count, WIDTH) for name, count in rows.items()}
    save_file(cut | state, tmp_path / "source" / "model.safetensors")
    patterns = [name.replace(".0.", ".*.") for name in shapes if name.startswith(layer)]
    arguments = ["reshard", str(tmp_path / "source"), str(tmp_path / "ranks"), "--tp", "2", "--json"]
    assert run(arguments) == 0
    said = json.loads(capfd.readouterr().out)
    assert sorted(said["fused_order_unknown"]) == sorted(patterns)
    assert any(
        "the order of what is fused in them is not known: backbone.layers.*" in each for each in said["warnings"]
    )
    record = json.loads((tmp_path / "ranks" / "shardctl.json").read_text())
    assert record["options"]["fused_order_unknown"] == ", ".join(said["fused_order_unknown"])
    for held in load_ranks(tmp_path / "ranks"):
        assert all(torch.equal(held[name], state[name]) for name in shapes if name in held and name.startswith(layer))
