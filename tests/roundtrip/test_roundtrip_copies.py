"""A tensor that two shards hold is one tensor if its bytes are equal; else an index decides only if that is asked."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.cli.program import run

ONE, TWO = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3) + torch.eye(2, 3)


def write(directory, kind: str, first: dict, second: dict, *, index: bool = True):
    """Two shards; the index, if there is one, places what both hold in the second."""
    directory.mkdir()
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    names = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
    for name, tensors in zip(names, (first, second), strict=True):
        own = {key: tensor.clone() for key, tensor in tensors.items()}
        (save_file if kind == "safetensors" else torch.save)(own, directory / name)
    if index:
        weight_map = dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])
        (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return names


@pytest.fixture(params=["safetensors", "torch"])
def kind(request):
    return request.param


@pytest.fixture
def shardctl(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")

    def call(*args):
        code = run([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return code, out + err

    return call


@pytest.fixture
def source(tmp_path, kind):
    names = write(tmp_path / "source", kind, {"a": ONE, "both": ONE}, {"b": ONE, "both": TWO})
    return tmp_path / "source", *names


def test_different_values_are_an_error_that_names_both_files(source, tmp_path, shardctl):
    path, first, second = source
    for verb in (("reshard", path, tmp_path / "out", "--to", "hf"), ("digest", path), ("diff", path, path)):
        code, said = shardctl(*verb)
        assert code == 4, said
        assert f"error: both: copies differ in 2 elements, first at [0:1, 0:1] in {first} and {second}" in said
        assert "--prefer-index takes the copy that an index names" in said
    assert not (tmp_path / "out").exists()
    code, said = shardctl("verify", path, "--level", "full")
    assert code == 3
    assert f"[replicas] both: copies differ in 2 elements, first at [0:1, 0:1] in {first} and {second}" in said


def test_the_index_decides_if_that_is_asked(source, tmp_path, shardctl):
    path, *_ = source
    assert shardctl("reshard", path, tmp_path / "out", "--to", "hf", "--prefer-index")[0] == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["both"], TWO)
    assert shardctl("digest", path, "--prefer-index")[0] == 0
    assert shardctl("diff", path, tmp_path / "out", "--prefer-index")[0] == 0
    assert shardctl("verify", path, "--level", "full", "--prefer-index")[0] == 0
    assert shardctl("verify", tmp_path / "out", "--against", path, "--prefer-index")[0] == 0


def test_a_plan_remembers_that_it_was_asked(source, tmp_path, shardctl):
    path, *_ = source
    assert shardctl("plan", path, "--to", "hf", "--prefer-index", "--out", tmp_path / "p.json")[0] == 0
    assert shardctl("reshard", path, tmp_path / "out", "--plan", tmp_path / "p.json")[0] == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["both"], TWO)


def test_equal_bytes_in_two_files_are_one_tensor(tmp_path, kind, shardctl):
    write(tmp_path / "source", kind, {"a": ONE, "both": TWO}, {"b": ONE, "both": TWO})
    code, said = shardctl("reshard", tmp_path / "source", tmp_path / "out", "--to", "hf")
    assert code == 0, said
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["both"], TWO)
    assert shardctl("verify", tmp_path / "source", "--level", "full")[0] == 0


@pytest.mark.parametrize("other", [ONE.reshape(3, 2), ONE.double()], ids=["shape", "dtype"])
def test_another_shape_or_type_is_seen_without_reading_a_value(tmp_path, kind, shardctl, other):
    first, second = write(tmp_path / "source", kind, {"a": ONE, "both": other}, {"b": ONE, "both": TWO})
    code, said = shardctl("inspect", tmp_path / "source")
    assert code == 4
    assert f"tensor 'both' is F32 [2, 3] in {second}, which the index names, but F" in said
    assert f"in {first}" in said
    assert shardctl("inspect", tmp_path / "source", "--prefer-index")[0] == 0


def test_without_an_index_nothing_can_decide(tmp_path, kind, shardctl):
    first, second = write(tmp_path / "source", kind, {"a": ONE, "both": ONE}, {"b": ONE, "both": TWO}, index=False)
    code, said = shardctl("reshard", tmp_path / "source", tmp_path / "out", "--prefer-index")
    assert code == 4
    assert f"tensor 'both' is in both {first} and {second}, with different values" in said


def test_without_an_index_equal_values_are_one_tensor_and_it_is_said(tmp_path, kind, shardctl):
    first, second = write(tmp_path / "source", kind, {"a": ONE, "both": TWO}, {"b": ONE, "both": TWO}, index=False)
    code, said = shardctl("reshard", tmp_path / "source", tmp_path / "out", "--to", "hf")
    assert code == 0, said
    assert f"'both': each is in two files, such as {first} and {second}, and no index says which to use" in said
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["both"], TWO)
    assert shardctl("verify", tmp_path / "source", "--level", "full")[0] == 0
    assert shardctl("diff", tmp_path / "source", tmp_path / "out")[0] == 0


@pytest.mark.parametrize("prefer", [(), ("--prefer-index",)], ids=["", "prefer-index"])
def test_without_an_index_the_last_value_counts_too(tmp_path, kind, shardctl, prefer):
    """The beginnings are equal, so that only a comparison of all values tells."""
    long, other = torch.zeros(5000), torch.zeros(5000)
    other[-1] = 1
    first, second = write(tmp_path / "source", kind, {"both": long}, {"b": ONE, "both": other}, index=False)
    assert shardctl("inspect", tmp_path / "source")[0] == 0
    for verb in (("reshard", tmp_path / "source", tmp_path / "out", "--to", "hf"), ("digest", tmp_path / "source")):
        code, said = shardctl(*verb, *prefer)
        assert code == 4, said
        assert "both: copies differ in 1 elements, first at [4999:5000] in " in said
        assert first in said
        assert second in said
    assert not (tmp_path / "out").exists()
    assert shardctl("verify", tmp_path / "source", "--level", "full")[0] == 3


def test_files_in_which_a_tensor_is_laid_out_differently_are_compared_by_its_elements(tmp_path, shardctl):
    (tmp_path / "source").mkdir()
    value = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": value}, tmp_path / "source" / "x.pt")
    torch.save({"a": value.T.contiguous().T}, tmp_path / "source" / "y.pt")
    assert shardctl("digest", tmp_path / "source")[0] == 0


@pytest.mark.parametrize("other", [ONE.reshape(3, 2), ONE.double()], ids=["shape", "dtype"])
def test_without_an_index_another_shape_or_type_is_an_error(tmp_path, kind, shardctl, other):
    first, second = write(tmp_path / "source", kind, {"both": ONE}, {"b": ONE, "both": other}, index=False)
    code, said = shardctl("inspect", tmp_path / "source")
    assert code == 4
    assert f"tensor 'both' is F32 [2, 3] in {first}, but F" in said
    assert f"in {second}" in said
