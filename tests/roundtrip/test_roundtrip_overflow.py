"""A cast that makes finite weights infinite is refused, and nothing is published, unless that is allowed and recorded.

Masks of attention hold the lowest number of their type in place of minus infinity, and are no reason to refuse.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import config_of, save

from shardctl.base.errors import SourceError
from shardctl.conversion.engine.worker import WorkerId
from shardctl.conversion.worker_part import contribute
from shardctl.options import DestinationOptions, ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import RECORD
from shardctl.verbs.diff import diff
from shardctl.verbs.finish import finish
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

NORM = "model.norm.weight"
FP16 = ReshardOptions(mesh=Mesh.of(tp=2), dtype="fp16", threads=1)
ALLOWED = DestinationOptions(allow_overflow=True)
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture
def large(tmp_path):
    """A Llama in fp32 with three numbers in its last norm that fp16 does not hold."""
    path = save(tmp_path / "source", {**config_of("llama"), "dtype": "float32"}).path
    tensors = load_file(path / "model.safetensors")
    tensors[NORM][:3] = torch.tensor([1e5, -2e5, 3.4e38])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def write(path, **tensors):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return path


def list_errors(found):
    return [each.message for each in found.findings if each.severity == "error"]


def test_a_cast_that_overflows_is_refused_with_the_ways_out_and_publishes_nothing(large, tmp_path):
    with pytest.raises(SourceError, match=f"{NORM}: 3 finite values become infinite in F16") as refused:
        reshard(large, tmp_path / "out", FP16)
    assert refused.value.exit_code == 4
    for way in ("--dtype bf16", "--keep-fp32 REGEX", "--allow-overflow"):
        assert way in refused.value.hint
    assert not (tmp_path / "out").exists()
    reshard(large, tmp_path / "kept", ReshardOptions(dtype="fp16", keep_fp32="norm"))
    assert verify(tmp_path / "kept", VerifyOptions(level="full", against=large)).ok


def test_what_was_written_before_the_refusal_is_kept_for_a_run_that_allows_it(large, tmp_path):
    for _ in range(2):  # the second run has the bands of the first, and refuses them all the same
        with pytest.raises(SourceError, match="finite values become infinite"):
            reshard(large, tmp_path / "out", FP16)
    made = reshard(large, tmp_path / "out", FP16, destination_options=ALLOWED)
    assert made.kept_bytes > 0
    assert f"{NORM}: 3 finite values became infinite in F16" in made.warnings
    assert made.record.options["allow_overflow"] == "true"
    again = reshard(tmp_path / "out", tmp_path / "again", ReshardOptions(to="hf"))
    assert again.record.options["allow_overflow"] == "true", "the result of a result has the same infinities"
    assert verify(tmp_path / "again", VerifyOptions(level="full", against=large)).ok


def test_permission_changes_neither_a_result_without_overflow_nor_its_plan(large, tmp_path):
    bf16 = ReshardOptions(dtype="bf16")
    with pytest.raises(SourceError, match=f"{NORM}: 1 finite value becomes infinite in BF16"):
        reshard(large, tmp_path / "refused", bf16)
    tensors = load_file(large / "model.safetensors")
    tensors[NORM][2] = 0
    save_file(tensors, large / "model.safetensors", {"format": "pt"})
    reshard(large, tmp_path / "plain", bf16)
    reshard(large, tmp_path / "allowed", bf16, destination_options=ALLOWED)
    assert (tmp_path / "plain" / RECORD).read_bytes() == (tmp_path / "allowed" / RECORD).read_bytes()


def test_each_worker_refuses_what_it_casts_and_finish_records_what_was_allowed(large, tmp_path):
    def work(number, options=None):
        return contribute(large, tmp_path / "out", FP16, worker=WorkerId(number, 2), destination_options=options)

    for number in range(2):
        with pytest.raises(SourceError, match="finite values become infinite"):
            work(number)
    work(0, ALLOWED)
    work(1, ALLOWED)
    assert finish(tmp_path / "out").record.options["allow_overflow"] == "true"


def test_masks_may_hold_the_lowest_number_of_their_type_and_weights_may_not(tmp_path):
    masks = {"h.0.attn.masked_bias": torch.tensor(LOWEST), "causal_mask": torch.full((2, 2), LOWEST).triu(1)}
    masks["mask_of_bf16"] = torch.full((3,), torch.finfo(torch.bfloat16).min)
    source = write(tmp_path / "masks", **masks)
    made = reshard(source, tmp_path / "out", ReshardOptions(dtype="fp16"))
    assert "allow_overflow" not in made.record.options
    assert load_file(tmp_path / "out" / "model.safetensors")["causal_mask"][0, 1] == -torch.inf
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok
    for name, value in (("h.0.ln_1.weight", LOWEST), ("causal_mask", -1e9), ("causal_mask", -LOWEST)):
        spoiled = write(tmp_path / f"{name}{value}", **{name: torch.tensor([value])})
        with pytest.raises(SourceError, match=f"{name}: 1 finite value becomes infinite in F16"):
            reshard(spoiled, tmp_path / "refused", ReshardOptions(dtype="fp16"))


def test_verify_finds_infinities_where_the_source_is_finite_unless_they_were_allowed(large, tmp_path):
    out = tmp_path / "out"
    reshard(large, out, ReshardOptions(dtype="fp16", to="hf"), destination_options=ALLOWED)
    lost = f"{NORM} is infinite in 3 elements in which the source is finite"
    compared = f"{NORM} is infinite in 3 elements in which the wider of the two is finite"
    allowed = verify(out, VerifyOptions(level="full", against=large))
    assert allowed.ok
    assert any(each.message.startswith(f"{lost}; {RECORD} says") for each in allowed.findings)
    assert compared in diff(out, large).warnings
    assert compared in diff(large, out).warnings
    (out / RECORD).unlink()
    for level in ("quick", "full"):
        found = verify(out, VerifyOptions(level=level, against=large))
        assert (found.exit_code, list_errors(found)) == (3, [lost])


@pytest.mark.parametrize(("dtype", "step"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_verify_reports_the_distance_from_the_source_before_the_cast(tmp_path, dtype, step):
    values = torch.tensor([1 + step, 1.0, -2.0, 0.5])
    source = write(tmp_path / "source", w=values, v=torch.ones(2, dtype=torch.int64))
    reshard(source, tmp_path / "out", ReshardOptions(dtype=dtype))
    level = next(
        each
        for each in verify(tmp_path / "out", VerifyOptions(level="full", against=source)).levels
        if each.name == "identity"
    )
    (found,) = level.unrounded
    assert (found.change, found.tensors, found.tensor) == ("cast", 1, "w")
    assert found.largest == float(f"{step:.6g}")
    assert found.mean == float(f"{step / 4:.6g}")
    assert found.relative == float(f"{step / (4.5 + step):.6g}")
    assert str(found) in list(level.describe_reading())
