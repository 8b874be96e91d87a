"""NaN is equal to nothing: neither a proof nor a forward pass nor an engine's answer passes with it."""

from __future__ import annotations

import json
from math import inf, nan

import pytest
import torch
from forward_models import config_of, run, save
from safetensors.torch import load_file, save_file

from shardctl.base.errors import Mismatch, UnsupportedError
from shardctl.options import DestinationOptions, ReshardOptions, VerifyOptions
from shardctl.report.documents import build_verify_document
from shardctl.running.engines.score_check import BOUND, compare_scores
from shardctl.running.forward.verdict import count_flips, find_lost_outputs
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify
from shardctl.verify.engine_result import TokenScores
from shardctl.verify.tolerance import measure_distance

NORM = "model.norm.weight"
FP16 = ReshardOptions(mesh=Mesh.of(tp=2), dtype="fp16")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "source"
    save(path, config_of("llama"))
    return path


@pytest.fixture
def spoiled(whole, tmp_path):
    """Gives the model with a value in three places of its last norm."""

    def give(value):
        tensors = load_file(whole / "model.safetensors")
        tensors[NORM][:3] = value
        (tmp_path / "source").mkdir()
        save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
        (tmp_path / "source" / "config.json").write_text((whole / "config.json").read_text())
        return tmp_path / "source"

    return give


def find_level(result, name):
    return next(level for level in result.levels if level.name == name)


def test_no_distance_takes_a_nan_for_another():
    values = torch.tensor([1.0, nan])
    assert measure_distance(values, values.clone()) == inf
    assert measure_distance(torch.tensor([1.0, inf]), torch.tensor([1.0, inf])) == 0
    logits = torch.full((1, 2, 5), nan)
    assert count_flips(logits, logits.clone()) == (2, 2)


@pytest.mark.parametrize(
    ("found", "allowed", "said"),
    [
        ([nan, 1.0], True, "not a number in 1 of 2 places"),
        ([inf, 1.0], False, "infinite in 1 of 2 places"),
        ([inf, 1.0], True, ""),
        ([1.0, -inf], False, ""),
    ],
    ids=["NaN is never allowed", "infinite", "allowed", "a token that a bias forbids"],
)
def test_outputs_that_are_not_finite_where_the_source_is_are_an_error(found, allowed, said):
    exact = torch.tensor([1.0, torch.finfo(torch.float32).min])
    messages = [each.message for each in find_lost_outputs("logits", exact, torch.tensor(found), allowed=allowed)]
    assert [said in message for message in messages] == ([True] if said else [])


def test_a_result_that_computes_only_nan_is_neither_published_nor_passed(spoiled, tmp_path):
    source, proved = spoiled(1e5), DestinationOptions(prove=True, allow_overflow=True)
    with pytest.raises(Mismatch, match=r"not published.*logits of the shards are not a number") as refused:
        reshard(source, tmp_path / "out", FP16, destination_options=proved)
    assert "--keep-fp32" in refused.value.hint
    assert not (tmp_path / "out").exists()
    reshard(source, tmp_path / "out", FP16, destination_options=DestinationOptions(allow_overflow=True))
    result = verify(tmp_path / "out", VerifyOptions(forward=True, against=source))
    forward = find_level(result, "forward")
    assert (result.exit_code, forward.status) == (3, "failed")
    assert (forward.forward.output_error, forward.forward.flips) == (inf, forward.forward.positions)


def test_a_source_that_computes_nan_itself_proves_nothing(spoiled, tmp_path):
    source = spoiled(nan)
    with pytest.raises(UnsupportedError, match="the source itself computes logits that are not a number"):
        reshard(
            source,
            tmp_path / "out",
            ReshardOptions(mesh=Mesh.of(tp=2)),
            destination_options=DestinationOptions(prove=True),
        )
    reshard(source, tmp_path / "out", ReshardOptions(mesh=Mesh.of(tp=2)))
    for against in (source, None):
        result = verify(tmp_path / "out", VerifyOptions(forward=True, against=against))
        assert (result.exit_code, find_level(result, "forward").status) == (3, "skipped")


def test_a_narrow_type_in_which_the_source_overflows_is_no_measure(spoiled, tmp_path):
    source = spoiled(3e4)
    reshard(source, tmp_path / "out", ReshardOptions(mesh=Mesh.of(tp=2)))
    result = run(source, tmp_path / "out", dtype="fp16")
    assert (result.status, result.reason.endswith("leave --dtype out")) == ("skipped", True)


def test_the_distance_from_the_source_before_the_cast_is_reported(whole, tmp_path):
    made = reshard(whole, tmp_path / "out", FP16, destination_options=DestinationOptions(prove=True))
    proof = made.proof.forward
    assert proof.output_error < 1e-5 < proof.unrounded_error < 1e-2
    document = build_verify_document(verify(tmp_path / "out", VerifyOptions(forward=True, against=whole)))
    levels = {level["name"]: level for level in json.loads(json.dumps(document))["levels"]}
    assert levels["forward"]["forward"]["unrounded_error"] == pytest.approx(proof.unrounded_error)
    assert levels["identity"]["unrounded"][0]["change"] == "cast"


def test_an_engine_that_answers_nan_is_not_the_source():
    scores = TokenScores(({1: nan},), (1,), ({1: nan},))
    assert compare_scores([scores], [scores], BOUND).apart == inf
