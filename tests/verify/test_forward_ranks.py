"""Each rank computes with what it holds: the share of the weights, by family, and what only that shows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from forward_models import FIXTURES, run, saved_and_cut, values

import shardctl.models.describe
import shardctl.models.submodels.multimodal
from shardctl.tensors.placement import AxisPartition, PartitionSection

SHARE = 0.95
"""Of the weights, with which ranks are to compute as they hold them."""
PICTURES = "no inputs with pictures or sounds are made for it, so that towers or what joins them to text do not run"
LESS = {
    **dict.fromkeys(("gemma4", "gemma4-audio", "gemma4_unified", "minimax_m3_vl", "mistral3", "voxtral"), PICTURES),
    **dict.fromkeys(("deberta", "deberta-v2"), "its embedding of relative positions is read and never called"),
}
"""Families of which less is reached, with the reason."""
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "jamba-moe", "qwen3_next", "granitemoe")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return partial(saved_and_cut, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, "tp=2") for name in FIXTURES if name != "llama4"),  # whose wrapper transformers 5.24 cannot run
        *((name, "tp=4,ep=2,etp=2") for name in EXPERTS),
    ],
)
def test_ranks_compute_with_what_they_hold(made, name, mesh):
    result = run(*made(name, mesh))
    assert result.status == "passed", result.findings
    print(f"{name} over {mesh}: {result.share.own:.1%}", *result.share.joined, sep="\n  ")
    assert (result.share.own < SHARE) == (name in LESS), result.share
    gathered = [joined for joined in result.share.joined if joined.reason.startswith("joined: ")]
    assert sum(joined.share for joined in gathered) < 0.01, gathered


def cut_otherwise(monkeypatch, ending, cuts):
    """Have the tables cut the first dim of some tensors in sections of other sizes."""
    for place in (shardctl.models.describe, shardctl.models.submodels.multimodal):
        usual = place.build_model

        def build(*args, usual=usual, **kwargs):
            model = usual(*args, **kwargs)
            tensors = dict(model.tensors)
            for name, tensor in tensors.items():
                if name.endswith(ending):
                    sections = tuple(PartitionSection(size) for size in cuts(tensor.shape[0]))
                    first = tuple(
                        AxisPartition(cut.axis, sections) if cut.sections else cut for cut in tensor.spec.cuts[0]
                    )
                    spec = replace(tensor.spec, cuts=(first, *tensor.spec.cuts[1:]))
                    tensors[name] = replace(tensor, spec=spec)
            return replace(model, tensors=tensors)

        monkeypatch.setattr(place, "build_model", build)


@pytest.mark.parametrize(
    ("name", "ending", "cuts"),
    [
        ("qwen3_next", "linear_attn.conv1d.weight", lambda rows: (rows,)),
        ("mamba", "mixer.conv1d.weight", lambda rows: (rows // 2, rows // 2)),
        ("mamba2", "mixer.conv1d.weight", lambda rows: (rows,)),
        ("mamba", "mixer.A_log", lambda rows: (rows // 2, rows // 2)),
        ("kimi_linear", "self_attn.q_conv1d.weight", lambda rows: (rows // 2, rows // 2)),
        ("mixtral", "w1.weight", lambda rows: (rows // 2, rows // 2)),
        ("deepseek_v3", "experts.1.up_proj.weight", lambda rows: (rows // 2, rows // 2)),
    ],
)
def test_channels_and_slices_of_experts_on_the_wrong_rank_are_found(tmp_path, monkeypatch, name, ending, cuts):
    """Every value is right and where the table says; only a rank that computes with its own part shows the fault."""
    cut_otherwise(monkeypatch, ending, cuts)
    result = run(*saved_and_cut(tmp_path, name, "tp=2"))
    assert result.status == "failed"
    assert any("is cut so that its ranks do not compute" in finding.message for finding in result.findings)


@pytest.mark.parametrize(
    ("name", "mesh", "tensor", "block"),
    [
        ("qwen3_next", "tp=2", "model.layers.{}.linear_attn.conv1d.weight", "model.layers.{}"),
        ("mamba", "tp=2", "backbone.layers.{}.mixer.conv1d.weight", "backbone.layers.{}"),
        ("mamba", "tp=2", "backbone.layers.{}.mixer.A_log", "backbone.layers.{}"),
        ("mixtral", "tp=4,ep=2,etp=2", "model.layers.{}.block_sparse_moe.experts.1.w1.weight", "model.layers.{}"),
        ("mixtral", "fsdp=2,ep=2", "model.layers.{}.block_sparse_moe.experts.1.w2.weight", "model.layers.{}"),
    ],
)
def test_a_channel_that_one_rank_has_in_another_place_is_found(tmp_path, name, mesh, tensor, block):
    whole, shards = saved_and_cut(tmp_path, name, mesh)
    rank = 0 if "ep" in mesh else 1
    part = values(shards, tensor.format(0), rank)
    part[...] = part[::-1].copy()
    result = run(whole, shards)
    assert result.status == "failed"
    wrong = {each.name: each.rank for each in result.blocks if each.error > result.tolerance.warn}
    assert set(wrong) == {block.format(0)}
    if "ep" not in mesh:
        assert any(f"something else on rank {rank} " in f.message or "(tp" in f.message for f in result.findings)
