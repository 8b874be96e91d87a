"""The moments of a step of a plain loop under autocast are those of torch: storages followed through a step."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from fsdp2_moments import Tracker
from known_models import stock
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, masking_utils

from shardctl.estimate.holding import list_holdings
from shardctl.estimate.training import build_timeline
from shardctl.estimate.workload import TrainingWorkload
from shardctl.mesh import Mesh
from shardctl.models.anatomy import build_anatomy

SIZES = {
    "vocab_size": 128256, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip


def follow(layers, tokens, *, recompute):
    """The most bytes alive in each pass and in the optimizer's step of a second step."""
    tracker = Tracker()
    config = LlamaConfig(**SIZES, num_hidden_layers=layers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        model.train()
        if recompute == "full":
            model.activation_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # as transformers' Trainer has it
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
    ("layers", "tokens", "recompute"), [(4, 8192, "none"), (4, 8192, "full"), (8, 256, "none"), (8, 256, "full")]
)
def test_autocasts_moments_are_torchs(layers, tokens, recompute):
    config = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
    (holding,) = list_holdings(stock(config), Mesh.of(), [layers])
    work = TrainingWorkload(tokens, profile="hf", recompute=recompute, microbatches=1)
    line = build_timeline(build_anatomy(config), holding, Mesh.of(), work, stages=[layers])
    *passes, step = line.list_moments()
    most = follow(layers, tokens, recompute=recompute)
    assert step.nbytes == pytest.approx(most["step"], rel=0.001)
    if recompute == "full":
        end = passes.pop(0)
        assert (end.name, end.nbytes) == ("end of the forward pass", pytest.approx(most["forward"], rel=0.001))
    assert max(moment.nbytes for moment in passes) == pytest.approx(most["backward"], rel=0.001)
    assert max(moment.nbytes for moment in line.list_moments()) == pytest.approx(max(most.values()), rel=0.001)
