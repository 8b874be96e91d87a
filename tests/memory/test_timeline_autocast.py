"""The moments of a step of a plain loop under autocast are those of torch: storages followed through a step."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from fsdp2_moments import Tracker
from known_models import stock
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, masking_utils

from shardctl.cli.program import run
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.training.rank_training import build_timeline
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.mesh import Mesh

SIZES = {
    "vocab_size": 128256, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip


def follow(layers, tokens, *, recompute, foreach):
    """The most bytes alive in each pass and in the optimizer's step of a second step."""
    tracker = Tracker()
    config = LlamaConfig(**SIZES, num_hidden_layers=layers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        model.train()
        if recompute == "full":
            model.activation_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach, fused=not foreach)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with tracker, mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None):
            for tensor in (*model.parameters(), *model.buffers()):
                tracker.see(tensor, "model")
            for step in range(2):
                tracker.armed = step == 1
                optimizer.zero_grad()
                tracker.enter("forward")
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                tracker.enter("backward")
                loss.backward()
                del loss
                tracker.enter("step")
                optimizer.step()
    return tracker.most


@pytest.mark.parametrize(
    ("layers", "tokens", "recompute", "kernel"),
    [
        (4, 8192, "none", None), (4, 8192, "full", "fused"), (8, 256, "none", None), (8, 256, "full", "foreach"),
    ],
)  # fmt: skip
def test_autocasts_moments_are_torchs(layers, tokens, recompute, kernel):
    """By default AdamW is fused, as in transformers' Trainer."""
    config = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
    (holding,) = list_rank_shards(stock(config), Mesh.of(), [layers])
    work = TrainingWorkload(tokens, profile="hf", recompute=recompute, microbatches=1, optimizer_kernel=kernel)
    line = build_timeline(build_layer_graph(config), holding, Mesh.of(), work, stages=[layers])
    *passes, step = line.list_moments()
    most = follow(layers, tokens, recompute=recompute, foreach=kernel == "foreach")
    assert step.nbytes == pytest.approx(most["step"], rel=0.001)
    if recompute == "full":
        end = passes.pop(0)
        assert (end.name, end.nbytes) == ("end of the forward pass", pytest.approx(most["forward"], rel=0.001))
    assert max(moment.nbytes for moment in passes) == pytest.approx(most["backward"], rel=0.001)
    assert max(moment.nbytes for moment in line.list_moments()) == pytest.approx(max(most.values()), rel=0.001)


class LoraLinear(torch.nn.Module):
    """A frozen matrix and two narrow ones beside it, in fp32 as PEFT has them."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def trace_adapted_step(model, tracker, tokens, behind):
    """Run a model with a frozen base under autocast, its layers computed again, and back, seen by `tracker`.

    What comes behind the forward pass is the moment `behind`. Returns the bytes of the model.
    """
    model.train()
    model.enable_input_require_grads()
    model.activation_checkpointing_enable()
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with tracker, mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None):
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.see(tensor, "model")
        held, tracker.armed = tracker.now, True
        tracker.enter("forward")
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        tracker.enter(behind)
        loss.backward()
    return held


def test_nothing_is_in_fp32_between_the_layers_of_a_narrow_base(tmp_path, capsys):
    """Of a frozen base in 16 bits under autocast."""
    layers, tokens, rank = 4, 8192, 16
    tracker = Tracker()
    with FakeTensorMode(allow_non_fake_inputs=True):
        config = LlamaConfig(**SIZES, num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        model.requires_grad_(False)
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name), rank))
        trace_adapted_step(model, tracker, tokens, "loss")
    base = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base | {"torch_dtype": "bfloat16"}))
    words = f"--lora-rank {rank} --lora-targets q_proj,k_proj,v_proj,o_proj --profile hf --recompute full --json"
    run(["plan", str(path), "--for", "train", "--seq-len", str(tokens), "--microbatches", "1", *words.split()])
    found = json.loads(capsys.readouterr().out)["timeline"]
    moments = {moment["name"]: moment["allocated_bytes"] for moment in found["moments"]}
    states = 2 * 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)  # which a first step has not yet
    assert found["largest"] == "backward pass of the loss"
    assert moments["backward pass of the loss"] - states == pytest.approx(tracker.most["loss"], rel=0.001)
    assert moments["end of the forward pass"] - states == pytest.approx(tracker.most["forward"], rel=0.001)


class Dequantized(torch.autograd.Function):
    """A product with a matrix that is there while it is needed, as bitsandbytes' `MatMul4Bit`."""

    @staticmethod
    def forward(ctx, x, shape):
        ctx.shape = shape
        return x @ torch.empty(shape, dtype=x.dtype).t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ torch.empty(ctx.shape, dtype=gradient.dtype), None


class CodedLinear(torch.nn.Module):
    """bitsandbytes' `Linear4bit`, whose result has the type of what it reads; its codes are not counted."""

    def __init__(self, inner, outer):
        super().__init__()
        self.in_features, self.out_features = inner, outer

    def forward(self, x):
        shape = self.out_features, self.in_features
        return Dequantized.apply(x.to(torch.bfloat16), shape).to(x.dtype)


class LoopedExperts(torch.nn.Module):
    """Experts with as many tokens each, one after another, as transformers had them before 5."""

    def __init__(self, hidden, wide, count, chosen):
        super().__init__()
        self.count, self.chosen = count, chosen
        self.router = torch.nn.Linear(hidden, count, bias=False, dtype=torch.bfloat16)
        self.parts = torch.nn.ModuleList(CodedLinear(*s) for s in ((hidden, wide), (hidden, wide), (wide, hidden)))

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weights, _ = torch.topk(torch.softmax(self.router(flat), 1, dtype=torch.float32), self.chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(flat.dtype)
        result = torch.zeros_like(flat)
        gate, up, down = self.parts
        for _ in range(self.count):
            rows = torch.zeros(len(flat) * self.chosen // self.count, dtype=torch.long)
            some = flat[rows]
            made = down(torch.nn.functional.silu(gate(some)) * up(some)) * weights[rows, rows, None]
            result.index_add_(0, rows, made.to(flat.dtype))
        return result.view(x.shape)


@pytest.mark.parametrize(
    ("experts", "wide", "prepared", "near"),
    [(8, 14336, "trl", 0.03), (8, 14336, None, 0.03), (64, 1024, "trl", 0.06), (64, 1024, None, 0.03)],
)
def test_experts_of_bitsandbytes_run_one_after_another(experts, wide, prepared, near, tmp_path, capsys):
    """With results in fp32 if norms are: the peak of a layer's backward pass, computed again from its input.

    An input in fp32 is what its norm keeps, too, and is counted twice: 5.6 % of small experts.
    """
    layers, tokens, rank = 4, 8192, 16
    sizes = SIZES | {"intermediate_size": wide, "num_local_experts": experts, "num_experts_per_tok": 2}
    sizes |= {"vocab_size": 1024, "num_hidden_layers": layers}
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    tracker = Tracker()
    with FakeTensorMode(allow_non_fake_inputs=True):
        config = MixtralConfig(**sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.mlp = LoopedExperts(config.hidden_size, wide, experts, 2).requires_grad_(False)
            for name in names:
                old = getattr(layer.self_attn, name)
                setattr(layer.self_attn, name, LoraLinear(CodedLinear(old.in_features, old.out_features), rank))
        for module in model.modules() if prepared else ():
            if "Norm" in type(module).__name__:
                module.weight = torch.nn.Parameter(module.weight.float(), requires_grad=False)
        before = trace_adapted_step(model, tracker, tokens, "backward")
    base = sizes | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "torch_dtype": "bfloat16"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base))
    words = f"--lora-rank {rank} --lora-targets {','.join(names)} --profile hf --recompute full --base-dtype nf4 --json"
    words += f" --prepare-base {prepared}" if prepared else ""
    run(["plan", str(path), "--for", "train", "--seq-len", str(tokens), "--microbatches", "1", *words.split()])
    said = json.loads(capsys.readouterr().out)
    kept = [t for t in said["needs"][0]["terms"] if t["category"] in {"activations", "workspace"}]
    assert sum(t["term_bytes"] for t in kept) == pytest.approx(tracker.most["backward"] - before, rel=near)
    assert any("transformers 5 has one array of all experts" in warning for warning in said["warnings"])
