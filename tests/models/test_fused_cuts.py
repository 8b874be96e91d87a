"""Fused and interleaved projections are cut head by head and part by part, and state spaces channel by channel."""

from __future__ import annotations

import pytest
import torch
from model_oracle import fixture

from shardctl.base.errors import PartitionError
from shardctl.models import describe_model
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import check_cuts, compute_rank_boxes


def ranks(mesh):
    return [mesh.coordinate(rank) for rank in range(mesh.world)]


def interleaved(heads, parts, size):
    """What each row of a fused tensor is: [head or group, part (q, k or v), row within it]."""
    return torch.cartesian_prod(torch.arange(heads), torch.arange(parts), torch.arange(size))


@pytest.mark.parametrize(
    ("name", "tensor", "heads", "parts"),
    [
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value", 4, 3),
        ("bloom", "transformer.h.0.self_attention.query_key_value", 4, 3),
        ("falcon-rw", "transformer.h.0.self_attention.query_key_value", 4, 3),
        ("falcon", "transformer.h.0.self_attention.query_key_value", 4, 4),  # two queries, a key and a value a group
    ],
)
def test_interleaved_heads_are_cut_between_heads(name, tensor, heads, parts):
    model = describe_model(fixture(name))
    weight, dense = model.tensors[f"{tensor}.weight"], model.tensors[tensor.replace("query_key_value", "dense.weight")]
    rows = interleaved(heads, parts, weight.shape[0] // heads // parts)
    for at in ranks(mesh := Mesh.of(tp=2)):
        (mine,) = compute_rank_boxes(weight.shape, weight.spec, mesh, at)
        held = rows[mine.origin[0] : mine.stop[0]]
        assert set(held[:, 0].tolist()) == {2 * at["tp"], 2 * at["tp"] + 1}
        (columns,) = compute_rank_boxes(dense.shape, dense.spec, mesh, at)
        assert (columns.origin[1], columns.stop[1]) == (16 * at["tp"], 16 * at["tp"] + 16)
    with pytest.raises(PartitionError, match="over tp=8: 4 "):
        check_cuts(weight.name, weight.shape, weight.spec, Mesh.of(tp=8))


MULTI_QUERY = {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": None, "num_attention_heads": 4}


def test_the_one_key_value_head_of_multi_query_attention_is_on_every_rank_or_refused():
    name = "transformer.h.0.self_attention.query_key_value.weight"
    refused = describe_model(fixture("falcon", **MULTI_QUERY)).tensors[name]
    with pytest.raises(PartitionError, match="over tp=2: 1 key/value heads") as caught:
        check_cuts(refused.name, refused.shape, refused.spec, Mesh.of(tp=2))
    assert caught.value.hint == "use --tp 1, or --kv-heads replicate to keep each head on several ranks"
    shared = describe_model(fixture("falcon", **MULTI_QUERY), kv_heads="replicate").tensors[name]
    for at in ranks(mesh := Mesh.of(tp=2)):
        held = [(box.origin[0], box.stop[0]) for box in compute_rank_boxes(shared.shape, shared.spec, mesh, at)]
        assert held == ([(0, 16), (32, 48)], [(16, 48)])[at["tp"]]


def test_fused_projections_are_cut_part_by_part():
    model = describe_model(fixture("phi3"))
    qkv, gate_up = (model.tensors[f"model.layers.0.{n}.weight"] for n in ("self_attn.qkv_proj", "mlp.gate_up_proj"))
    held = [
        [[(b.origin[0], b.stop[0]) for b in compute_rank_boxes(t.shape, t.spec, mesh, at)] for at in ranks(mesh)]
        for t, mesh in ((qkv, Mesh.of(tp=2)), (gate_up, Mesh.of(tp=2)))
    ]
    assert held[0] == [[(0, 16), (32, 40), (48, 56)], [(16, 32), (40, 48), (56, 64)]]
    assert held[1] == [[(0, 24), (48, 72)], [(24, 48), (72, 96)]]


def test_a_mamba_rank_holds_its_channels_of_every_part_of_the_mixer():
    tensors = describe_model(fixture("mamba")).tensors
    mixer = {n.rpartition("mixer.")[2]: t for n, t in tensors.items() if ".0.mixer." in n}
    for at in ranks(mesh := Mesh.of(tp=2)):
        half = (32 * at["tp"], 32 * at["tp"] + 32)
        held = {n: compute_rank_boxes(t.shape, t.spec, mesh, at) for n, t in mixer.items()}
        for name in ("A_log", "D", "conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias"):
            assert [(b.origin[0], b.stop[0]) for b in held[name]] == [half], name
        for name in ("x_proj.weight", "out_proj.weight"):
            assert [(b.origin[1], b.stop[1]) for b in held[name]] == [half], name
        assert [(b.origin[0], b.stop[0]) for b in held["in_proj.weight"]] == [half, (64 + half[0], 64 + half[1])]


def test_one_group_of_a_mamba_2_is_shared_by_the_ranks_or_refused():
    name = "backbone.layers.0.mixer.in_proj.weight"
    refused = describe_model(fixture("mamba2", n_groups=1)).tensors[name]
    with pytest.raises(PartitionError, match=r"over tp=2: 1 key/query groups \(B and C\)") as caught:
        check_cuts(refused.name, refused.shape, refused.spec, Mesh.of(tp=2))
    assert caught.value.hint == "use --tp 1, or --kv-heads replicate to keep each head on several ranks"
    shared = describe_model(fixture("mamba2", n_groups=1), kv_heads="replicate").tensors[name]
    mesh = Mesh.of(tp=2)
    held = [
        [(b.origin[0], b.stop[0]) for b in compute_rank_boxes(shared.shape, shared.spec, mesh, at)]
        for at in ranks(mesh)
    ]
    # gate and channels of two of the four heads, all of B and C, two time steps
    assert held == [[(0, 32), (64, 96), (128, 146)], [(32, 64), (96, 144), (146, 148)]]
