"""A trainer saves, another goes on from what shardctl makes of it, and the losses are those of the first.

The trainers of `docs/engines_resumed.py` that are installed beside each other.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from docs.engines_resumed import BF16, KEPT, RESUMERS, SAVERS, TrainerCase, run_detours

MODULES = {"Megatron-LM": "megatron", "Automodel": "nemo_automodel", "Megatron-FSDP": "megatron.training"}
"""What is imported of a trainer, where that is not its name."""
CONTROL = "torch, weights alone"


def is_installed(case: TrainerCase) -> bool:
    name = case.name.split()[0].strip(",")
    module = MODULES.get(name, name.lower())
    return all(importlib.util.find_spec(part) for part in dict.fromkeys((module.split(".")[0], module)))


@pytest.mark.engine
def test_other_trainers_go_on_with_the_same_losses(tmp_path):
    savers, resumers = (tuple(filter(is_installed, cases)) for cases in (SAVERS, RESUMERS))
    found = run_detours(savers, resumers, {}, tmp_path)
    rounded = {case.name for case in (*savers, *resumers) if case.dtype == BF16}
    for saver in savers:
        assert found[saver.name]["losses"], found[saver.name]["said"]
        for name, cell in found[saver.name]["resumed"].items():
            assert "apart" in cell, f"{saver.name} to {name}: {cell}"
            if name == CONTROL:
                assert cell["apart"] > 1e-3, f"{saver.name}: the losses do not tell whether there are states"
            else:
                coarse = {saver.name, name} & rounded or name == "DeepSpeed ZeRO-3"  # which docs/engines.md explains
                allowed = 2e-3 if coarse else 6e-6
                assert cell["apart"] <= allowed, f"{saver.name} to {name}"


def test_every_cell_was_run():
    kept = json.loads(KEPT.read_text())
    assert list(kept["found"]) == [case.name for case in SAVERS]
    assert all(list(entry["resumed"]) == [case.name for case in RESUMERS] for entry in kept["found"].values())
