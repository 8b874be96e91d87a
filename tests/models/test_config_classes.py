"""A config is read as transformers' class reads it: silent, sparse, or in other words, it means the same."""

from __future__ import annotations

import copy
import json

import pytest
import transformers
from model_oracle import BUILT, FIXTURES, build_on_meta, fixture, on_meta, state

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import describe_model
from shardctl.options import SourceOptions

UNBUILDABLE = ("dots1", "qwen4_exp", "qwen4_exp_text")
"""Of whose default configs transformers 5.23 can build nothing."""
WHATEVER = {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype"}
"""What no config class has a default for."""


def config_class(name):
    """The class of a fixture's config."""
    return getattr(transformers, fixture(name)["architectures"][0]).config_class


def keys_of(config, within=()):
    """The path of every key, those of configs within the config included."""
    for key, value in config.items():
        if key in WHATEVER:
            continue
        yield (*within, key)
        if isinstance(value, dict) and key.endswith("_config"):
            yield from keys_of(value, (*within, key))


def changed(config, path, *, value=None, called="", drop=False):
    """A copy where the key at `path` is absent, has another value, or is called otherwise."""
    config = copy.deepcopy(config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    old = inner.pop(path[-1])
    if not drop:
        inner[called or path[-1]] = old if called else value
    return config


def built(config):
    """What transformers builds of it, or None if it cannot."""
    try:
        return state(on_meta(config))
    except Exception:  # noqa: BLE001 - a class refuses a config in whichever way it likes
        return None


def check_reading(config):
    """Ours is theirs, where they can build it and attention can run."""
    theirs = built(config)
    if theirs is None:
        return False
    try:
        found = describe_model(config)
    except SourceError as error:
        assert "does not divide" in error.message or "value heads for" in error.message  # noqa: PT017
        return False
    assert found.state() == theirs
    try:
        build_layer_graph(config)
    except UnsupportedError as error:
        assert "how many experts a token goes to" in error.message  # noqa: PT017
    return True


@pytest.mark.parametrize("name", FIXTURES)
def test_any_key_may_be_absent(name):
    config = fixture(name)
    assert sum(check_reading(changed(config, path, drop=True)) for path in keys_of(config)) > 3


@pytest.mark.parametrize(
    "name", [name for name in FIXTURES if name not in UNBUILDABLE and config_class(name).sub_configs]
)
def test_a_config_within_a_config_may_be_null(name):
    config = fixture(name)
    for key in ("text_config", "vision_config"):
        if key in config:
            assert check_reading(changed(config, (key,), value=None))


def other_names():
    """Every other name that the classes of the fixtures take for a key of theirs."""
    for name in FIXTURES:
        config, kind = fixture(name), config_class(name)
        inside = ((key, sub) for key, sub in kind.sub_configs.items() if key in config and hasattr(sub, "model_type"))
        for within, one in (((), kind), *(((key,), sub) for key, sub in inside)):
            held = config[within[0]] if within else config
            for other, key in one.attribute_map.items():
                # Of these names DBRX's experts and Zamba2's adapters in transformers 5.23 know nothing.
                unknown = (name, other) in {("dbrx", "hidden_size"), ("zamba2", "layer_types")}
                if key in held and other not in held and not unknown:
                    yield name, (*within, key), other


@pytest.mark.parametrize(("name", "path", "other"), [*other_names()], ids=lambda v: v if isinstance(v, str) else v[-1])
def test_a_key_may_have_each_of_its_names(name, path, other):
    assert check_reading(changed(fixture(name), path, called=other))


@pytest.mark.parametrize("family", BUILT, ids=lambda family: family.name)
def test_the_default_config_says_the_same_whole_and_sparse(family):
    kind = getattr(transformers, next(iter(family.classes)))
    default = kind.config_class()
    whole, sparse = (
        json.loads(json.dumps({**said, "architectures": [kind.__name__]}, default=str))
        for said in (default.to_dict(), default.to_diff_dict())
    )
    found = describe_model(whole).state()
    assert describe_model(sparse).state() == found
    assert describe_model({"model_type": family.name}).state() == found
    # By default, transformers 5.23 cannot compute the rotary embeddings of these, count heads, tell layers apart, or
    # make an indexer without sizes.
    if family.name not in {
        *UNBUILDABLE,
        "dbrx",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "lfm2_moe",
        "ministral",
        "nemotron",
    }:
        assert found == state(build_on_meta(kind, kind.config_class()))


@pytest.mark.parametrize(
    "name", [name for name in FIXTURES if getattr(config_class(name)().get_text_config(), "layer_types", None)]
)
def test_a_window_is_on_the_layers_where_the_class_has_it(name):
    config = {key: value for key, value in fixture(name).items() if key != "layer_types"}
    text = config_class(name).from_dict(config).get_text_config()
    windowed = [
        one.attention is not None and one.attention.window is not None for one in build_layer_graph(config).layers
    ]
    kinds = {"sliding_attention", "chunked_attention", "compressed_sparse_attention", "heavily_compressed_attention"}
    assert windowed == [kind in kinds for kind in text.layer_types]


def test_what_is_assumed_is_said(tmp_path):
    config = fixture("qwen3_moe")
    del config["vocab_size"], config["num_experts"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path, SourceOptions(described=True)) as checkpoint:
        said = [warning for warning in checkpoint.manifest.warnings if "assumed" in warning]
    values = "vocab_size = 151936, num_experts = 128"
    assert said == [f"config.json lacks some keys; {values} is assumed, as by its class in transformers"]
    config["num_local_experts"] = 4
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 64}))
    with open_checkpoint(tmp_path, SourceOptions(described=True)) as checkpoint:
        assert not [warning for warning in checkpoint.manifest.warnings if "assumed" in warning]
