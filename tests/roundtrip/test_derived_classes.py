"""Classes of transformers that no table knows: cut by derived rules, run on each rank, and brought back bit for bit.

`docs/benchmarks/derived.py` does this with every class that generates.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from shardctl.models import load_families

SCRIPTS = Path(__file__).parents[2] / "docs" / "benchmarks"
CLASSES = (
    "BioGptForCausalLM",
    "Cohere2MoeForCausalLM",
    "AriaTextForCausalLM",
    "CTRLLMHeadModel",
    "BarkCausalModel",
    "FlaubertWithLMHeadModel",
)
"""A decoder with biases, numbered experts, experts in a stack, names that few have, and
layers that fill a cache whatever the config says."""
KNOWN = {name for family in load_families() for name in family.classes}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("derived_classes", SCRIPTS / "derived.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


@pytest.mark.parametrize("architecture", CLASSES)
def test_a_class_without_a_table_is_proved(script, architecture, tmp_path):
    if architecture in KNOWN:
        pytest.skip(f"{architecture} has a table now")
    found = script.try_class(architecture, tmp_path)
    rules = found.pop("rules")
    assert rules.startswith("derived")
    assert set(found.values()) == {"equal"}, found
    assert {"tp2 and back", "tp2 forward"} <= set(found)
