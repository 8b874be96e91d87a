"""transformers' own tensor parallelism on the shards: agrees, differs, or says nothing of them and why."""

from __future__ import annotations

from functools import partial

import pytest
from forward_models import cut, run, saved_and_cut, values

from shardctl.tensors.mesh import Mesh


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return partial(saved_and_cut, tmp_path_factory.mktemp("opinion"))


@pytest.mark.parametrize(("name", "mesh"), [("llama", "fsdp=2,tp=2"), ("mixtral", "tp=2")])
def test_it_agrees_where_transformers_cuts_as_shardctl_does(made, name, mesh):
    result = run(*made(name, mesh), second_opinion=True)
    assert result.status == "passed", result.findings
    assert result.opinion.status == "agrees", result.opinion
    assert 0 < result.opinion.error < 1e-5


def test_a_fault_is_a_difference(made, tmp_path):
    whole, _ = made("llama")
    shards = cut(whole, tmp_path / "broken", Mesh.of(tp=2))
    values(shards, "model.layers.1.mlp.up_proj.weight", 1)[3] = 0
    result = run(whole, shards, second_opinion=True)
    assert result.opinion.status == "differs"
    assert any(finding.check == "second opinion" for finding in result.findings)


def test_a_family_for_which_transformers_has_no_plan_is_skipped_and_that_is_said(made):
    result = run(*made("gpt2"), second_opinion=True)
    assert (result.status, result.opinion.status) == ("passed", "skipped")
    assert any("no second opinion" in note and "no `tp_plan`" in note for note in result.notes)


def test_a_mesh_without_tp_has_nothing_to_ask(made):
    assert run(*made("llama", "fsdp=2"), second_opinion=True).opinion.reason == "the mesh has no tp"


def test_another_layout_than_that_of_transformers_is_no_opinion(made):
    """transformers cuts Phi-3's fused projections in plain halves and gathers their outputs; shardctl cuts heads."""
    result = run(*made("phi3"), second_opinion=True)
    assert result.status == "passed"
    assert result.opinion.status == "skipped"
    assert "layout differs from that of transformers" in result.opinion.reason
    assert "qkv_proj" in result.opinion.reason
    assert result.opinion.error < 1e-5, "what it computed from all files together is right all the same"
