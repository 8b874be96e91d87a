"""Checkpoints of a part of a model, chains of conversions, and checksums for those who know no digest."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from damage import flip
from safetensors.torch import load_file
from tiny_models import assert_same, config_of, save, stored

from shardctl.base.errors import UsageError
from shardctl.options import DestinationOptions, ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify
from shardctl.verify import structure
from shardctl.verify.finding import CheckFinding


def errors(found):
    return [finding.message for finding in found.findings if finding.severity == "error"]


@pytest.mark.parametrize("include", ["layers.0", "embed", "norm"])
def test_a_part_can_be_cut_and_put_together_like_a_whole(tiny, tmp_path, include):
    source = tiny("qwen2-tied").path
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2, pp=2), include=include))
    reshard(tmp_path / "ranks", tmp_path / "other", ReshardOptions(mesh=Mesh.of(tp=4)))
    reshard(tmp_path / "other", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), {n: t for n, t in stored(source).items() if include in n})
    for step in ("ranks", "other", "back"):
        assert verify(tmp_path / step, VerifyOptions(level="full", against=source)).ok
    assert digest(tmp_path / "ranks").digest == digest(tmp_path / "back").digest


def test_exclude_leaves_out(tiny, tmp_path):
    source = tiny("llama").path
    reshard(source, tmp_path / "part", ReshardOptions(include="layers", exclude=r"layers\.1|norm"))
    assert set(stored(tmp_path / "part")) == {n for n in stored(source) if "layers.0" in n and "norm" not in n}


def test_what_patterns_leave_out_is_said_by_reshard_and_by_verify(tiny, tmp_path):
    """A directory without its q_proj was "ok", and nothing said that it is no whole model."""
    source, part = tiny("llama").path, tmp_path / "part"
    made = reshard(source, part, ReshardOptions(exclude="q_proj"))
    left = "model.layers.*.self_attn.q_proj.** (2 tensors, "
    assert [warning for warning in made.warnings if warning.startswith(f"left out: {left}")]
    assert any("left out by --exclude q_proj" in text for text in verify(part).unchecked)
    compared = verify(part, VerifyOptions(against=source)).unchecked
    assert any(f" that were left out here: {left}" in text for text in compared), compared
    reshard(part, tmp_path / "again", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert any("left out by --exclude q_proj" in text for text in verify(tmp_path / "again").unchecked)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exclude": "q_porj"}, "--exclude 'q_porj' matches no tensor"),
        ({"dtype": "bf16", "keep_fp32": "nrom"}, "--keep-fp32 'nrom' matches no tensor"),
    ],
)
def test_a_mistyped_pattern_is_refused(tiny, tmp_path, options, said):
    with pytest.raises(UsageError, match=said):
        reshard(tiny("llama").path, tmp_path / "made", ReshardOptions(**options))


def test_keep_fp32_that_would_keep_nothing_is_refused(tiny, tmp_path):
    """It casts nothing to fp32, so norms in bf16 would be cast to fp16 although they are named."""
    reshard(tiny("llama").path, tmp_path / "bf16", ReshardOptions(dtype="bf16"))
    with pytest.raises(UsageError, match=r"matches no tensor that is in fp32: model.layers.0.* is in BF16"):
        reshard(tmp_path / "bf16", tmp_path / "made", ReshardOptions(dtype="fp16", keep_fp32="norm"))


def test_a_cast_is_remembered_down_a_chain(tiny, tmp_path):
    source = tiny("llama").path
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2), dtype="fp32"))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert verify(tmp_path / "back", VerifyOptions(level="full", against=source)).ok
    assert verify(tmp_path / "back", VerifyOptions(level="full", against=tmp_path / "ranks")).ok


@pytest.mark.parametrize("mesh", [None, Mesh.of(tp=2, pp=2)], ids=str)
def test_checksums_are_those_of_sha256sum_and_verify_checks_them(tiny, tmp_path, mesh):
    made = tmp_path / "made"
    reshard(
        tiny("llama").path, made, ReshardOptions(mesh=mesh), destination_options=DestinationOptions(checksums="sha256")
    )
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=made, check=True, capture_output=True)
    listed = {line.split("  ", 1)[1] for line in (made / "SHA256SUMS").read_text().splitlines()}
    there = {f.relative_to(made).as_posix() for f in made.rglob("*") if f.is_file()}
    assert listed == there - {"SHA256SUMS", "shardctl.json"}
    assert verify(made, VerifyOptions(level="full")).ok


@pytest.mark.parametrize("harm", ["changed", "missing", "garbled"])
def test_a_directory_that_only_has_checksums_is_held_against_them(tiny, tmp_path, harm):
    made = tmp_path / "made"
    reshard(tiny("llama").path, made, ReshardOptions(), destination_options=DestinationOptions(checksums="sha256"))
    (made / "shardctl.json").unlink()
    assert verify(made, VerifyOptions(level="full")).ok
    if harm == "changed":
        flip(made / "model.safetensors", (made / "model.safetensors").stat().st_size - 1)
        assert errors(verify(made, VerifyOptions(level="full"))) == [
            "model.safetensors is not the file that SHA256SUMS lists"
        ]
    elif harm == "missing":
        (made / "tokenizer.json").unlink()
        assert errors(verify(made, VerifyOptions(level="full"))) == ["tokenizer.json is missing; SHA256SUMS lists it"]
    else:
        (made / "SHA256SUMS").write_text("what?\n")
        found = verify(made, VerifyOptions(level="full"))
        assert found.ok
        assert "line 1 of SHA256SUMS is not understood" in [finding.message for finding in found.findings]


def test_one_file_of_a_directory_is_a_checkpoint_too(tiny, tmp_path):
    source = tiny("llama")
    file = source.path / "model.safetensors"
    reshard(file, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert digest(file).digest == digest(tmp_path / "ranks").digest == source.digest.digest
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(load_file(tmp_path / "back/model.safetensors"), load_file(file))


def test_an_array_that_transformers_saved_in_even_parts_is_read_as_it_is(tmp_path):
    """It saves OLMo-Hybrid's three convolutions as thirds of their array, whose values are wider than queries."""
    whole = save(tmp_path / "whole", {**config_of("olmo_hybrid"), "linear_value_head_dim": 8})
    names = [f"model.layers.0.linear_attn.{each}_conv1d.weight" for each in "qkv"]
    assert [stored(whole.path)[name].shape[0] for name in names] == [43, 43, 42]
    done = reshard(whole.path, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert any("even parts" in line for line in done.warnings)
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    back = stored(tmp_path / "back")
    assert [back[name].shape[0] for name in names] == [32, 32, 64]
    again = type(whole.model).from_pretrained(tmp_path / "back").state_dict()
    assert_same(again, whole.model.state_dict())
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", forward=True, against=whole.path)).ok


def test_a_result_that_fails_its_own_verify_fails_the_test_that_made_it(tiny, tmp_path, monkeypatch):
    """The fixture of `tests/conftest.py` verifies what every other test writes."""
    monkeypatch.setattr(structure, "check_record", lambda *_: iter([CheckFinding("error", "x", "wrong")]))
    with pytest.raises(AssertionError, match="wrong"):
        reshard(tiny("llama").path, tmp_path / "out")
