"""Whatever stands under a key of a config, a model is described or the config is refused."""

import json

import pytest
from model_oracle import CONFIGS

from shardctl.base.errors import ShardctlError
from shardctl.models import describe_model

FILES = [path for folder in (CONFIGS, CONFIGS.with_name("configs_hub")) for path in sorted(folder.glob("*.json"))]
VALUES = [[["x"]], [{}], {}, {"a": []}, "x", -1, 3.5, True, 10**30]
ENTRIES = [[], {}, None, "x", 1.5]


def list_changes(values):
    """List the values of one object, each changed in its turn; objects and lists in it likewise, one level deep."""
    for key, value in values.items():
        yield from ({**values, key: other} for other in VALUES)
        if isinstance(value, list) and value:
            yield from ({**values, key: [other, *value[1:]]} for other in ENTRIES)


def list_mutants(config):
    yield from list_changes(config)
    for key, value in config.items():
        if isinstance(value, dict):
            yield from ({**config, key: changed} for changed in list_changes(value))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_value_ends_in_a_bug(path):
    refused = 0
    for config in list_mutants(json.loads(path.read_text())):
        try:
            describe_model(config)
        except ShardctlError:
            refused += 1
    assert refused
