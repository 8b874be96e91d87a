"""Where `diff` says that training changed the weights: exact norms by layer, equal for any layout and threads."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardctl
from shardctl.models import describe_model
from shardctl.verify.content import WeightChanges

CONFIG = Path(__file__).parents[2] / "fixtures" / "configs" / "llama.json"


def write_model(place, dtype, changed):
    """A Llama whose weights in `changed` layers were trained; one tensor of three bands changed in one element."""
    config = json.loads(CONFIG.read_text()) | {"vocab_size": 4000, "hidden_size": 48, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 12, "dtype": "float32"}
    random = np.random.default_rng(7)
    arrays = {each.name: random.standard_normal(each.shape, np.float32) for each in describe_model(config).own()}
    for name, array in arrays.items():
        for layer, size in changed.items():
            if f"layers.{layer}.mlp" in name:
                np.multiply(array, np.float32(1 + size), out=array)
    if changed:
        arrays["model.embed_tokens.weight"][3, 5] += 1
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    save_file({name: array.astype(dtype) for name, array in arrays.items()}, place / "model.safetensors")
    return place, arrays


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("changes")
    before = write_model(place / "before", np.float32, {})
    after = write_model(place / "after", np.float32, {2: 0.01, 10: 0.1})
    shardctl.reshard(before[0], place / "before-ranks", to="ranks", tp=2, fsdp=2)
    shardctl.reshard(after[0], place / "after-ranks", to="ranks", pp=2)
    return before, after, (place / "before-ranks", place / "after-ranks")


def test_layers_are_listed_by_their_relative_change(trained):
    (before, ours), (after, theirs), ranks = trained
    found = shardctl.diff(before, after)
    assert [each.layer for each in found.layers] == ["model.layers.10", "model.layers.2", "model.embed_tokens"]
    for each in found.layers:
        names = [name for name in ours if name.startswith(f"{each.layer}.")]
        first, second = (np.concatenate([m[n].ravel().astype(np.float64) for n in names]) for m in (ours, theirs))
        assert each.norm == pytest.approx(np.linalg.norm(first), rel=1e-12)
        assert each.change == pytest.approx(np.linalg.norm(second - first), rel=1e-12)
        assert each.relative == each.change / each.norm
        assert (each.tensors, each.changed) == (len(names), sum((ours[n] != theirs[n]).any() for n in names))
    assert "model.layers.10" in str(found)
    assert found.to_dict()["layers"][0]["relative"] == found.layers[0].relative
    for left, right, threads in ((ranks[0], after, 1), (before, ranks[1], 3), (*ranks, 2)):
        assert shardctl.diff(left, right, threads=threads).layers == found.layers
    back = shardctl.diff(after, before).layers
    assert [each.change for each in back] == [each.change for each in found.layers]
    assert back[0].norm != found.layers[0].norm


def test_bands_of_any_size_give_the_same_digits(trained, monkeypatch):
    (before, _), (after, _), _ = trained
    from shardctl.base.workers import ExecutionOptions
    from shardctl.verbs.diff import diff

    found = [
        diff(before, after, effort=ExecutionOptions(threads=2, block=b)).layers for b in (1 << 12, 1 << 17, 8 << 20)
    ]
    assert found[0] == found[1] == found[2]
    read = []
    monkeypatch.setattr(WeightChanges, "add", lambda *a: read.append(a))
    assert diff(before, before).layers == ()
    assert read == [], "equal checkpoints cost no sums"


def test_the_first_is_the_base_whichever_type_is_wider(trained, tmp_path):
    (before, _), _, _ = trained
    narrow, arrays = write_model(tmp_path / "narrow", ml_dtypes.bfloat16, {2: 0.01, 10: 0.1})
    for left, right in ((before, narrow), (narrow, before)):
        found = {each.layer: each for each in shardctl.diff(left, right).layers}
        assert found.keys() == {"model.layers.2", "model.layers.10", "model.embed_tokens"}
        names = [name for name in arrays if name.startswith("model.layers.10.")]
        squares = 0
        for name in names:
            mlp = "mlp" in name
            array = arrays[name] / np.float32(1.1) if left == before and mlp else arrays[name]
            squares += float((array.astype(ml_dtypes.bfloat16).astype(np.float64) ** 2).sum())
        assert found["model.layers.10"].norm == pytest.approx(np.sqrt(squares), rel=1e-3)
        assert found["model.layers.10"].tensors == len(names)


def test_what_was_zero_and_what_is_not_finite(tmp_path):
    for name, values in (("a", [0, 0, 0]), ("b", [3, 4, np.nan])):
        save_file({"layers.0.w": np.float32(values), "n": np.int64([1])}, tmp_path / f"{name}.safetensors")
    found = shardctl.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (layer,) = found.to_dict()["layers"]
    assert layer == {
        "layer": "layers.0",
        "relative": None,
        "change": 5.0,
        "norm": 0.0,
        "tensors": 1,
        "changed": 1,
        "not_finite": 1,
    }


def test_a_layer_that_is_no_longer_finite_comes_first(tmp_path):
    for name, nan, other in (("a", [3, 4], [1, 1]), ("b", [np.nan, np.inf], [2, 2])):
        save_file({"layers.0.w": np.float32(other), "layers.1.w": np.float32(nan)}, tmp_path / f"{name}.safetensors")
    found = shardctl.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [(each.layer, each.not_finite) for each in found.layers] == [("layers.1", 2), ("layers.0", 0)]
    assert "2 not finite  1 of 1 tensor  layers.1" in str(found)
    assert "100.000%  1 of 1 tensor  layers.0" in str(found)
