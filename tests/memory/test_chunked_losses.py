"""Losses in chunks, optimizer steps in the backward pass and checkpoints on the host, as torch and runs have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_peak import peak_of
from known_models import LLAMA_3_405B, stock
from torch.nn import functional

from shardctl.base.errors import UsageError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.search.forecast import estimate_ranks
from shardctl.estimate.term import sum_terms
from shardctl.estimate.training.activations import RankActivations
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.mesh import Mesh

SMALL = {
    **LLAMA_3_405B,
    "num_hidden_layers": 1,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LLAMA_3_2_3B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
WORK = TrainingWorkload(4096, micro_batch=2, profile="ddp", precision="bf16", optimizer_kernel="fused")
TOKENS, VOCABULARY = 2 * 4096, 128256
GIB = 1 << 30


def terms(config, mesh="tp=1", **options):
    inventory, parsed = stock(config), Mesh.parse(mesh)
    stages = (inventory.layers,)
    holdings = list_rank_shards(inventory, parsed, stages)
    (rank,) = estimate_ranks(
        holdings, build_layer_graph(config), parsed, stages, replace(WORK, **options), dtype="BF16"
    ).distinct
    return rank.terms


def sum_loss(loss):
    """Bytes that the loss keeps and has at once, without its labels and the last norm."""
    inventory, mesh = stock(SMALL), Mesh.parse("tp=1")
    (holding,) = list_rank_shards(inventory, mesh, (1,))
    found = RankActivations(build_layer_graph(SMALL), holding, mesh, replace(WORK, chunked_loss=loss), (1,))
    first = next(found.list_moments())
    return found.head.nbytes + first.besides.nbytes - TOKENS * (16 + 4 + 2 * 2 * 512)


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Parameter(torch.empty(2, 4096, 512, dtype=torch.bfloat16))
        self.output = torch.nn.Linear(512, VOCABULARY, bias=False, dtype=torch.bfloat16)


def step_torchtune(head):
    """`TransformerDecoder.chunked_output` and `CEWithChunkedOutputLoss` (torchtune 0.6.1)."""
    logits = [head.output(chunk) for chunk in head.hidden.chunk(8, dim=1)]
    labels = torch.zeros(2, 4096, dtype=torch.long).chunk(8, dim=1)
    loss = 0.0
    for some, label in zip(logits, labels, strict=True):
        loss += functional.cross_entropy(some.reshape(-1, VOCABULARY).float(), label.reshape(-1), reduction="sum")
    return loss


class Holder:
    """Holds the logits, as the caller of LitGPT's loss does."""


def step_litgpt(head):
    """`GPT.forward` with `lm_head_chunk_size` and `chunked_cross_entropy` (litgpt 0.5.13)."""
    logits = [head.output(chunk) for chunk in head.hidden.split(128, dim=1)]
    labels = torch.zeros(2, 4096, dtype=torch.long).split(128, dim=1)
    losses = [
        functional.cross_entropy(some.reshape(-1, VOCABULARY), label.reshape(-1), reduction="none")
        for some, label in zip(logits, labels, strict=True)
    ]
    Holder.logits = logits
    return torch.cat(losses).sum()


@pytest.mark.parametrize(("loss", "step"), [("torchtune", step_torchtune), ("litgpt", step_litgpt)])
def test_what_autograd_keeps_of_each_chunk_is_what_torch_has(loss, step):
    peak = peak_of(Head, step)
    Holder.logits = None
    # LitGPT's largest moment comes with the head's gradient, which the plan counts with the others.
    gradient = 2 * VOCABULARY * 512 if loss == "litgpt" else 0
    assert sum_loss(loss) + gradient == pytest.approx(peak.nbytes, rel=0.01)


def test_a_gradient_in_the_forward_pass_leaves_nothing_as_large_as_the_logits():
    logits = 2 * TOKENS * VOCABULARY
    assert all(sum_loss(loss) < logits for loss in ("liger", "unsloth"))
    # 8,192 / ceil(128,256 / 512) = 32.6 tokens: 64 of them, and both gradients
    assert sum_loss("liger") == 2 * (64 * VOCABULARY + 512 * VOCABULARY + TOKENS * 512)


TORCHTUNE = {"profile": "torchtune"}
COMPILED = {**TORCHTUNE, "compiled": "all"}
CHUNKED = {**COMPILED, "chunked_loss": "torchtune"}
RECOMPUTED = {**CHUNKED, "recompute": "full"}
IN_BACKWARD = {**RECOMPUTED, "step_in_backward": True}


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        (TORCHTUNE, 60.0),
        (COMPILED, 51.0),
        (CHUNKED, 42.9),
        (RECOMPUTED, 24.9),
        (IN_BACKWARD, 23.1),
        ({**IN_BACKWARD, "offload_checkpoints": True}, 21.8),
    ],
    ids=["packed", "compile", "chunked loss", "checkpointing", "step in backward", "offloading"],
)
def test_torchtunes_table_of_optimization_flags(options, measured):
    # torchtune 0.6.1, README.md: Llama 3.2 3B, batch 2, 4,096 tokens, bf16, A100, peak of active memory
    total = sum_terms(terms(LLAMA_3_2_3B, **options), counter="allocated").nbytes
    assert total / GIB == pytest.approx(measured, rel=0.045)


def test_a_step_in_the_backward_pass_frees_gradients_on_many_ranks_too():
    mesh, size = "fsdp=8", 2 * 3_212_749_824 / 8
    before, after = (
        sum_terms(
            terms(LLAMA_3_2_3B, mesh, profile="fsdp2", recompute="full", step_in_backward=each), counter="allocated"
        ).nbytes
        for each in (False, True)
    )
    assert 0 <= before - after <= size


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"profile": "deepspeed", "zero": 1, "step_in_backward": True}, "no optimizer step in the backward pass"),
        ({"step_in_backward": True, "microbatches": 2}, "cannot add the gradients of microbatches"),
        ({"zero": 1}, "DDP shares no states"),
    ],
)
def test_what_no_runtime_does_is_refused(options, match):
    with pytest.raises(UsageError, match=match):
        terms(SMALL, **options)
