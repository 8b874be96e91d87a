"""Meta's `consolidated.NN.pth`: parts are joined by their shapes, and what does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from stored_bytes import scan

from fixtures.meta import make as make_meta
from shardctl.errors import SourceError, UnsupportedError
from shardctl.libraries.meta.params import MetaParams
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def place(tmp_path) -> Path:
    """A copy of the fixture with two ranks."""
    return Path(shutil.copytree(FIXTURES / "meta" / "llama2", tmp_path / "llama2"))


def change(path: Path, **tensors) -> None:
    """Replace tensors of a file; None takes one away."""
    state = torch.load(path)
    for name, value in tensors.items():
        state[name.replace("__", ".")] = value
    torch.save({name: t for name, t in state.items() if t is not None}, path)


def say(place: Path, **fields) -> None:
    params = json.loads((place / "params.json").read_text())
    (place / "params.json").write_text(json.dumps(params | fields))


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("llama2", ["the embedding is cut along the hidden dim, as Llama 2 does"]),
        (
            "llama3",
            [
                "the embedding is cut along the vocabulary, as Llama 3 does",
                "each key/value head is on 2 ranks; its copies must be equal",
            ],
        ),
        ("llama31", []),
    ],
)
def test_how_it_was_understood_is_said(name, notes):
    manifest = scan(FIXTURES / "meta" / name)
    assert (manifest.format, manifest.training.writer) == ("meta", "Meta's Llama")
    assert manifest.training.ranks == make_meta.RANKS[name]
    assert list(manifest.training.notes) == notes
    assert manifest.warnings == ()
    assert {n: t.shape for n, t in manifest.tensors.items()} == {
        n: tuple(t.shape) for n, t in make_meta.weights(name).items()
    }


def test_buffers_and_descriptions_are_left_behind(place):
    dropped = inspect(place).dropped
    assert set(dropped) == {"params.json", "checklist.chk", "rope.freqs"}


def test_a_missing_file_in_the_middle_is_named(place):
    for rank in (3, 4):
        shutil.copy(place / "consolidated.01.pth", place / f"consolidated.{rank:02d}.pth")
    with pytest.raises(SourceError, match=r"consolidated\.02\.pth is missing, but consolidated\.04\.pth is there"):
        scan(place)


def test_an_embedding_that_is_cut_in_no_known_way_is_refused(place):
    for rank in range(2):
        change(place / f"consolidated.{rank:02d}.pth", tok_embeddings__weight=torch.zeros(64, 20).half())
    with pytest.raises(
        SourceError, match=r"tok_embeddings\.weight is \[64, 20\], neither one of 2 parts of 32 columns nor"
    ):
        scan(place)


def test_parts_of_other_models_are_refused(place):
    change(place / "consolidated.01.pth", layers__0__feed_forward__w1__weight=torch.zeros(40, 32).half())
    with pytest.raises(SourceError, match=r"w1.weight is F16 \[40, 32\] in consolidated\.01\.pth, but F16 \[44, 32\]"):
        scan(place)


def test_a_tensor_that_one_rank_lacks_is_named(place):
    change(place / "consolidated.01.pth", norm__weight=None)
    with pytest.raises(SourceError, match=r"consolidated\.01\.pth has no norm\.weight, but consolidated\.00\.pth has"):
        scan(place)


def test_tensors_that_no_such_llama_has_are_refused(place):
    for rank in range(2):
        change(place / f"consolidated.{rank:02d}.pth", vision_model__conv1__weight=torch.zeros(2))
    with pytest.raises(UnsupportedError, match=r"'vision_model\.conv1\.weight', which Llama 2 and 3 do not have"):
        scan(place)


def test_quantised_weights_are_refused(place):
    (place / "fp8_scales_0.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="quantised to 8 bits"):
        scan(place)


def test_copies_of_a_head_that_differ_are_found(tmp_path):
    place = tmp_path / "llama3"
    make_meta.write("llama3", place)
    change(place / "consolidated.01.pth", layers__1__attention__wk__weight=torch.zeros(4, 32).bfloat16())
    with pytest.raises(SourceError, match=r"layers\.1\.self_attn\.k_proj\.weight"):
        reshard(place, tmp_path / "out")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 0}, "dim 0, which is not a positive number"),
        ({"n_layers": "2"}, "n_layers '2', which is not a positive number"),
        ({"n_heads": 5}, "5 heads, which do not divide dim 32"),
        ({"norm_eps": -1}, "norm_eps -1"),
        ({"n_kv_heads": True}, "n_kv_heads True"),
    ],
)
def test_params_that_make_no_sense_are_refused(place, fields, message):
    say(place, **fields)
    with pytest.raises(SourceError, match=message):
        scan(place)


def test_params_that_are_not_json_are_refused(place):
    (place / "params.json").write_text("{")
    with pytest.raises(SourceError, match=r"params\.json is not JSON"):
        scan(place)


def test_params_of_another_kind_give_no_config(place):
    say(place, moe_args={"num_experts": 16})
    manifest = scan(place)
    assert manifest.own_config is None
    assert manifest.training.notes[-1].startswith("params.json is unlike that of Llama 2 and 3: without --config")


def test_without_params_the_names_stay_metas(place):
    (place / "params.json").unlink()
    found = inspect(place)
    assert found.architecture == ""
    assert "layers.0.attention.wq.weight" in {line.name for line in found.tensors}


@pytest.mark.parametrize("name", ["rope_theta", "norm_eps", "multiple_of", "ffn_dim_multiplier", "hidden_dim"])
def test_a_field_that_is_null_is_as_good_as_none(name):
    params = MetaParams(32, 1, 4, 4, 8, None, {"dim": 32, "n_layers": 1, "n_heads": 4, name: None})
    without = MetaParams(32, 1, 4, 4, 8, None, {"dim": 32, "n_layers": 1, "n_heads": 4})
    shapes = {"tok_embeddings.weight": (96, 32)}
    assert params.config(shapes) == without.config(shapes)
