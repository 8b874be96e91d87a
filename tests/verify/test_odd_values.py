"""NaN and infinity, weights that are there twice with other values, and the levels that `--strict` leaves to be run."""

from __future__ import annotations

import json

import pytest
import torch
from forward_models import config_of, save
from safetensors.torch import load_file, save_file

from shardctl.base.workers import ExecutionOptions
from shardctl.options import SourceOptions, VerifyOptions
from shardctl.verbs.verify import verify
from shardctl.verify.content import measure_content

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("odd") / "llama"
    save(path, config_of("llama"))
    return load_file(path / "model.safetensors")


@pytest.fixture
def foreign(weights, tmp_path):
    """Gives a checkpoint that shardctl did not write, with some tensors changed."""

    def give(**changed):
        tmp_path.joinpath("config.json").write_text(json.dumps(config_of("llama")))
        save_file({**weights, **changed}, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "model.safetensors").chmod(0o644)
        return tmp_path

    return give


def find(verified, check):
    return [(f.severity, f.message) for f in verified.findings if f.check == check]


def spoiled(weights, value):
    part = weights[UP].clone()
    part[1, 2] = value
    return {UP: part}


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "1 NaN"), (float("inf"), "1 infinities")])
def test_nan_and_infinity_are_errors_where_values_must_be_finite(foreign, weights, value, said):
    place = foreign(**spoiled(weights, value))
    found = verify(place, VerifyOptions(level="full"))
    assert (found.ok, [severity for severity, _ in find(found, "values")]) == (True, ["warning"])
    found = verify(place, VerifyOptions(require_finite=True))
    assert [level.name for level in found.levels] == ["structure", "content"]
    assert not found.ok
    ((severity, message),) = find(found, "values")
    assert (severity, said in message) == ("error", True)
    assert find(found, "digest") == [("warning", "there is no shardctl.json to compare digests with")]


def test_what_is_finite_passes(foreign):
    found = verify(foreign(), VerifyOptions(require_finite=True))
    assert found.ok
    assert not [f for f in found.findings if f.severity == "error"]


ODD = {
    torch.float8_e4m3fn: (2, 0),
    torch.float8_e5m2: (6, 2),
    torch.float8_e8m0fnu: (1, 0),
    torch.float8_e4m3fnuz: (1, 0),
    torch.float8_e5m2fnuz: (1, 0),
    torch.float16: (2 * (2**10 - 1), 2),
    torch.bfloat16: (2 * (2**7 - 1), 2),
}


def measure_values(path):
    from shardctl.checkpoint.opening import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        tensors = list(checkpoint.manifest.tensors.values())
        (found,) = measure_content(tensors, checkpoint.source, ExecutionOptions(), values=True)
    return found.nans, found.infinities, found.zero


@pytest.mark.parametrize("dtype", ODD, ids=str)
def test_every_code_of_a_narrow_type_is_judged_as_torch_judges_it(tmp_path, dtype):
    every = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    every = every.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    numbers = every.float()
    judged = int(numbers.isnan().sum()), int(numbers.isinf().sum())
    assert judged == ODD[dtype]
    save_file({"w": every}, tmp_path / "model.safetensors")
    assert measure_values(tmp_path) == (*judged, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64])
def test_odd_values_are_found_wherever_they_lie_in_a_large_tensor(tmp_path, dtype):
    numbers = torch.zeros(300_000, dtype=dtype)
    save_file({"w": numbers}, tmp_path / "model.safetensors")
    assert measure_values(tmp_path) == (0, 0, True)
    numbers[:] = -torch.finfo(dtype).max
    for place, value in ((0, "-inf"), (140_001, "nan"), (140_002, "inf"), (-1, "-nan")):
        numbers[place] = float(value)
    save_file({"w": numbers}, tmp_path / "model.safetensors")
    assert measure_values(tmp_path) == (2, 2, False)


def test_strict_makes_warnings_errors_and_runs_every_level(foreign, weights):
    place = foreign(**spoiled(weights, float("nan")))
    (place / "pytorch_model.bin").write_bytes(b"no pickle")
    (place / "model.safetensors").chmod(0o600)
    (place / "config.json").chmod(0o644)
    found = verify(place, VerifyOptions(level="full", against=place), source_options=SourceOptions(strict=True))
    assert [(level.name, level.status) for level in found.levels] == [
        *(("structure", "failed"), ("content", "failed"), ("identity", "failed"))
    ]
    for check in ("reading", "modes", "values", "digest", "duplicates"):
        assert {severity for severity, _ in find(found, check)} == {"error"}, check


OTHERS = ("other.safetensors", "consolidated.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin")


def write(path, tensors):
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("name", OTHERS)
def test_a_second_file_with_other_values_is_an_error(foreign, weights, name):
    place = foreign()
    write(place / name, weights)
    found = verify(place, VerifyOptions(level="full"))
    assert (found.ok, find(found, "duplicates")) == (True, []), "equal values"
    write(place / name, weights | spoiled(weights, 7.0))
    found = verify(place, VerifyOptions(level="full"))
    ((severity, message),) = find(found, "duplicates")
    assert (found.ok, severity) == (False, "error")
    assert f"{name} has other values than this checkpoint in 1 of 21 tensors of the same names ({UP})" in message


def test_a_second_file_with_other_shapes_or_other_tensors(foreign, weights):
    place = foreign()
    write(place / "other.safetensors", {UP: weights[UP][:4].clone()})
    assert len(find(verify(place, VerifyOptions(level="full")), "duplicates")) == 1
    write(place / "other.safetensors", {"adapter": weights[UP]})
    assert find(verify(place, VerifyOptions(level="full")), "duplicates") == []


def test_a_second_file_that_is_a_cast_of_the_first(foreign, weights):
    place = foreign()
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    for mine, other in ((weights, half), (half, weights)):
        save_file(mine, place / "model.safetensors", {"format": "pt"})
        write(place / "other.safetensors", other)
        assert find(verify(place, VerifyOptions(level="full")), "duplicates") == []
    other = half | {UP: half[UP] * 2}
    for one, two in ((weights, other), (other, weights)):
        save_file(one, place / "model.safetensors", {"format": "pt"})
        write(place / "other.safetensors", two)
        assert len(find(verify(place, VerifyOptions(level="full")), "duplicates")) == 1


def test_a_second_file_that_cannot_be_read_is_said(foreign):
    place = foreign()
    (place / "pytorch_model.bin").write_bytes(b"no pickle")
    ((severity, message),) = find(verify(place, VerifyOptions(level="full")), "duplicates")
    assert severity == "warning"
    assert "pytorch_model.bin was not compared with the tensors of this checkpoint" in message
