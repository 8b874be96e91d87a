"""Classes of transformers that no table knows: cut by derived rules, proved, and brought back bit for bit.

`docs/benchmarks/derived.py` does this with every class that generates text.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from shardctl.models import FAMILIES

SCRIPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "derived.py"
CLASSES = ("MptForCausalLM", "BioGptForCausalLM", "Cohere2MoeForCausalLM", "AriaTextForCausalLM")
"""A decoder whose layers give attention weights too, one with biases, numbered experts, and experts in a stack."""
KNOWN = {name for family in FAMILIES for name in family.classes}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("derived_classes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("architecture", CLASSES)
def test_a_class_without_a_table_is_proved(script, architecture, tmp_path):
    if architecture in KNOWN:
        pytest.skip(f"{architecture} has a table now")
    result, how = script.prove_class(architecture, tmp_path)
    assert result == "proved", how
