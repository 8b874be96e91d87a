"""The moments of a step of DeepSpeed beside those of two processes on the CPU, as deepspeed_moments.py printed them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from deepspeed_moments import BUCKET, MODEL, SMALL, TOKENS
from known_models import stock

from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.term import sum_terms
from shardctl.estimate.training import transients
from shardctl.estimate.training.rank_training import build_timeline
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.mesh import Mesh

PRINTED = {
    1: {"forward": 35185168, "backward": 38307604, "step": 47736336, "after": 27278344},
    2: {"forward": 35185168, "backward": 35709464, "step": 47736336, "after": 27278344},
    3: {"forward": 47195405, "backward": 43328797, "step": 48536357, "after": 28081933},
}
"""By stage of ZeRO; DeepSpeed 0.19.8, torch 2.13, whose AdamW has three more vectors of its part in a step."""
FROZEN = {"forward": 23917069, "backward": 19984925, "step": 9322533, "after": 6966797}
"""Of stage 3, where `wq` and `wo` are trained and all else is not."""


def freeze_others(inventory, pattern):
    """Train those kinds alone whose names match."""
    learns = re.compile(pattern).search
    return replace(inventory, kinds=tuple(replace(k, trainable=bool(learns(k.example))) for k in inventory.kinds))


@pytest.mark.parametrize(("stage", "trained"), [*((stage, "") for stage in PRINTED), (3, r"q_proj|o_proj")])
def test_deepspeeds_moments(stage, trained, monkeypatch):
    monkeypatch.setattr(transients, "_REDUCE_BUCKET_ELEMENTS", BUCKET)
    monkeypatch.setattr(transients, "_PERSISTENCE_THRESHOLD_ELEMENTS", SMALL)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": MODEL["vocabulary"],
        "num_key_value_heads": MODEL["kv_heads"], "hidden_size": MODEL["hidden"], "head_dim": MODEL["head_dim"],
        "intermediate_size": MODEL["intermediate"], "num_attention_heads": MODEL["heads"],
        "tie_word_embeddings": False, "num_hidden_layers": MODEL["layers"], "dtype": "bfloat16",
    }  # fmt: skip
    mesh, stages = Mesh.of(dp=2), [MODEL["layers"]]
    holding, *_ = list_rank_shards(freeze_others(stock(config), trained), mesh, stages)
    work = TrainingWorkload(TOKENS, profile="deepspeed", zero=stage, microbatches=1)
    line = build_timeline(build_layer_graph(config), holding, mesh, work, stages=stages)
    *passes, _ = line.list_moments()
    terms = line.list_worst_terms()
    printed = FROZEN if trained else PRINTED[stage]
    lasting = sum_terms(terms, category="optimizer").nbytes + sum_terms(terms, category="weights").nbytes
    learning = holding.elements(trainable=True)
    most = max(printed["forward"], printed["backward"])
    assert most < max(moment.nbytes for moment in passes) < most + 3_600_000  # 7 % where all is trained
    if stage == 3:  # what is gathered has gone, and the gradients of a rank's part have a buffer, as the bucket is one
        gathered = sum(t.nbytes for t in terms if "gather" in t.name or t.name.startswith("small tensors"))
        lasting += learning + 2 * BUCKET - gathered
    assert lasting == pytest.approx(printed["after"], rel=0.001)  # gradients of other stages are gone after a step
