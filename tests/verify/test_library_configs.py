"""Checkpoints of other libraries without a config.json: what their own settings leave open is no finding."""

from __future__ import annotations

import json
import shutil

import pytest
from forward_models import config_of, save

from shardctl.options import DestinationOptions, ReshardOptions, VerifyOptions
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

SOURCES = {
    "meta": config_of("llama", max_position_embeddings=77),
    "megatron": config_of("mistral", sliding_window=None),
}
"""By layout: a Llama with another context than Llama 2 has, and a model that computes as a Llama does."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Gives the source of a layout, and a copy as the layout's own library would leave it: without a config."""
    base = tmp_path_factory.mktemp("libraries")
    for layout, config in SOURCES.items():
        save(base / f"{layout}.hf", config)
        reshard(base / f"{layout}.hf", base / layout, ReshardOptions(to=layout))
        (base / layout / "shardctl.json").unlink()
        (base / layout / "config.json").unlink()
    return lambda layout: (base / f"{layout}.hf", base / layout)


def messages(result, severity="error"):
    return [each.message for level in result.levels for each in level.findings if each.severity == severity]


@pytest.mark.parametrize(
    ("layout", "unsaid"), [("meta", "max_position_embeddings"), ("megatron", "architectures, model_type")]
)
def test_an_assumed_default_is_not_compared(made, layout, unsaid):
    """Meta's params.json does not say how long a context is, and Megatron-LM's args do not name the class."""
    source, place = made(layout)
    found = verify(place, VerifyOptions(level="full", against=source))
    assert messages(found) == []
    assert found.ok
    assert any(f"but not {unsaid}, which it does not keep" in note for level in found.levels for note in level.notes)


def test_a_stated_setting_is_still_compared(made, tmp_path):
    source, place = made("meta")
    place = shutil.copytree(place, tmp_path / "meta")
    params = json.loads((place / "params.json").read_text())
    (place / "params.json").write_text(json.dumps({**params, "rope_theta": 5_000_000.0}))
    found = verify(place, VerifyOptions(level="full", against=source))
    assert any("rope_theta 5000000.0" in message for message in messages(found))


@pytest.mark.parametrize("layout", ["meta", "megatron"])
def test_a_library_s_arrays_are_proved_under_canonical_names(made, tmp_path, layout):
    """transformers does not understand the names of other libraries, which is no reason to call a result wrong."""
    _, place = made(layout)
    options = DestinationOptions(prove=True)
    proved = reshard(place, tmp_path / "hf", ReshardOptions(to="hf"), destination_options=options).proof
    assert proved.status == "passed"
    assert any("has names of its own, which shardctl" in note for note in proved.notes)
