"""Faults of many kinds are found, at the levels that docs/benchmarks/verify_faults.md says; it has all of them."""

from __future__ import annotations

import pytest
from fault_files import BESIDE_KINDS, FILE_KINDS
from fault_kinds import CAST_KINDS, HEADER_KINDS, PLACE_KINDS, VALUE_KINDS
from fault_models import LIBRARIES, TRAINED
from fault_states import ARGS_KINDS, NAME_KINDS, PARAMS_KINDS, STATE_KINDS, TRAINER_KINDS
from fault_trials import MISSED, SEVERAL, FaultBench

OF_THE_MESH = {
    "a norm missing on one rank",
    "the vocabulary on each other's ranks",
    "all of an expert on another's rank",
    "a layer on the other stage",
    "a norm on the other stage",
    "files of two ranks exchanged",
    "the file of a rank renamed",
}
"""Kinds that only a mesh can tell from another cut, where there is no record."""
OWN_KINDS = (PARAMS_KINDS, ARGS_KINDS, ARGS_KINDS)
"""Faults in the settings of each library."""
GRID = [
    ("Mixtral", "ep2 tp2", PLACE_KINDS),
    ("Bamba, Mamba 2 and attention", "pp2 tp2", PLACE_KINDS),
    ("Llama in fp8 blocks", "tp2", PLACE_KINDS),
    ("DeepSeek-V3, latent attention", "tp2", {**VALUE_KINDS, **HEADER_KINDS}),
    ("Llama in GPTQ", "tp2", VALUE_KINDS),
    ("Phi-3, fused q|k|v and gate|up", "tp2", {**FILE_KINDS, **BESIDE_KINDS}),
    ("Mixtral, experts one by one", SEVERAL, {**FILE_KINDS, **BESIDE_KINDS}),
    (TRAINED, "tp2", {**STATE_KINDS, **CAST_KINDS, **TRAINER_KINDS}),
    (TRAINED, "pp2 tp2", PLACE_KINDS),
    *(("Llama", library, {**kinds, **NAME_KINDS}) for library, kinds in zip(LIBRARIES, OWN_KINDS, strict=True)),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return FaultBench(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(("model", "mesh", "kinds"), GRID, ids=lambda value: value if isinstance(value, str) else "")
def test_no_fault_is_missed_and_what_is_sound_passes(bench, model, mesh, kinds):
    assert bench.try_sound(model, mesh).level == MISSED
    trials = list(bench.list_trials(model, mesh, tuple(kinds)))
    assert len(trials) > len(kinds), "half of the kinds have something to change, with and without a record"
    for trial in trials:
        expected = {"structure", "full"}
        if not trial.recorded:
            by_mesh = trial.kind in OF_THE_MESH or (model == TRAINED and kinds is PLACE_KINDS)  # of states
            expected |= {"--against"} | ({"--mesh"} if by_mesh else set())
        assert trial.level in expected, trial
