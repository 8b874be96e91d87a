"""Coefficients fitted to measured peaks: exact where the model is, never negative, and honest about what is left."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardctl.base.errors import SourceError, UsageError
from shardctl.estimate.term import MemoryTerm, sum_terms
from shardctl.estimate.training.calibrate import (
    PeakMeasurement,
    _solve_least_squares,
    fit_calibration,
    parse_measurements,
)
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.mesh import Mesh

GB = 10**9
WEIGHTS = 16 * GB


def terms(run: PeakMeasurement) -> list[MemoryTerm]:
    size = run.work.sequence * run.work.micro_batch * 10**6
    return [
        MemoryTerm("weights", "weights", WEIGHTS),
        MemoryTerm("kept", "activations", size, "n * 1e6", {"n": size / 10**6}, interval=(size // 2, size * 2)),
        MemoryTerm("worst moment", "workspace", size // 4, interval=(size // 8, size // 2)),
        MemoryTerm("slack", "runtime", GB // 8, interval=(0, GB // 4), counter="reserved"),
        MemoryTerm("CUDA context", "runtime", GB, interval=(GB // 2, 2 * GB), counter="device"),
        MemoryTerm("master weights", "optimizer", 99 * GB, tier="host"),
    ]


def run(sequence: int, peak: float, **options: object) -> PeakMeasurement:
    return PeakMeasurement(Mesh.of(), TrainingWorkload(sequence, **options), round(peak), 1)


def made(sequence: int, scale: float, overhead: float) -> PeakMeasurement:
    return run(sequence, WEIGHTS + scale * 1.25 * sequence * 10**6 + overhead)


@pytest.mark.parametrize(("scale", "overhead"), [(1.0, GB), (0.8, 2 * GB), (1.3, 0), (1.07, 0.3 * GB)])
def test_coefficients_that_made_the_peaks_are_found(scale, overhead):
    fit = fit_calibration([made(n, scale, overhead) for n in (1024, 2048, 8192)], terms)
    assert fit.scale == pytest.approx(scale, rel=1e-6)
    assert fit.overhead == pytest.approx(overhead, abs=1000)
    assert fit.worst_after < 1e-6


def test_errors_before_and_after_are_given_by_line():
    fit = fit_calibration([made(1024, 2.0, 0), made(4096, 2.0, 0)], terms)
    before = [WEIGHTS + 1.25 * n * 10**6 for n in (1024, 4096)]
    assert [line.before for line in fit.lines] == before
    assert [line.error_before for line in fit.lines] == [
        pytest.approx(b / line.measurement.peak - 1) for b, line in zip(before, fit.lines, strict=True)
    ]
    assert fit.worst_after < 1e-8 < fit.worst_before


def test_the_factor_and_the_overhead_are_put_in_their_terms_places():
    runs = [made(n, 1.5, 3 * GB) for n in (1024, 2048, 4096)]
    fit = fit_calibration(runs, terms)
    applied = fit.apply(terms(runs[1]))
    assert sum_terms(applied, counter="allocated").nbytes == pytest.approx(runs[1].peak, rel=1e-6)
    names = ["weights", "kept", "worst moment", "slack", "CUDA context", "master weights", "overhead"]
    assert [t.name for t in applied] == names
    grown = runs[1].peak / sum_terms(terms(runs[1]), counter="allocated").nbytes
    assert applied[3].nbytes == pytest.approx(GB / 8 * grown, rel=1e-6)
    assert applied[4].nbytes == GB
    assert applied[0].exact
    assert applied[1].formula == "1.5 * (n * 1e6)"
    assert "fitted to 3 measured peaks" in applied[1].source


def test_the_interval_holds_every_measured_peak():
    noise = (1.03, 0.96, 1.01, 0.99)
    runs = [run(n, made(n, 1.2, GB).peak * k) for n, k in zip((1024, 2048, 4096, 8192), noise, strict=True)]
    fit = fit_calibration(runs, terms)
    for one in runs:
        interval = sum_terms(fit.apply(terms(one)), counter="allocated")
        assert interval.low <= one.peak <= interval.high


def test_each_peak_is_compared_with_what_its_own_counter_counts():
    scale, more = 1.2, {"allocated": 0, "reserved": GB // 8, "device": GB // 8 + GB}
    runs = [
        replace(made(n, scale, GB), counter=counter, peak=made(n, scale, GB).peak + more[counter])
        for n, counter in zip((1024, 2048, 8192), more, strict=True)
    ]
    fit = fit_calibration(runs, terms)
    assert fit.scale == pytest.approx(scale, rel=1e-6)
    assert fit.overhead == pytest.approx(GB, abs=1000)
    assert [
        line.before - sum_terms(terms(run), counter="allocated").nbytes
        for line, run in zip(fit.lines, runs, strict=True)
    ] == [*more.values()]


def test_neither_coefficient_is_ever_negative():
    steep = fit_calibration([run(4096, WEIGHTS + GB), run(8192, WEIGHTS + 20 * GB)], terms)
    assert steep.overhead == 0
    assert steep.scale > 0


def test_peaks_by_which_activations_take_nothing_are_refused():
    with pytest.raises(UsageError, match="line 1 measured 1,000,000,000 bytes, less than the 16,000,000,000"):
        fit_calibration([run(1024, GB), run(8192, 2 * GB)], terms)
    with pytest.raises(UsageError, match="do not grow with the activations"):
        fit_calibration([run(1024, WEIGHTS + 9 * GB), run(8192, WEIGHTS + GB)], terms)


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(-10, 10)),
        min_size=2,
        max_size=8,
    ).filter(lambda rows: np.linalg.matrix_rank(np.array(rows)[:, :2], tol=1e-2) == 2)
)
def test_no_other_coefficients_near_by_are_better(rows):
    x, y = _solve_least_squares(rows)
    table = np.array(rows)

    def loss(at: tuple[float, float]) -> float:
        return float(((table[:, :2] @ at - table[:, 2]) ** 2).sum())

    best = loss((x, y))
    assert x >= 0
    assert y >= 0
    for factor in (1e-3, 1e-2, 0.1, 1.0):
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            at = (max(0.0, x + factor * dx), max(0.0, y + factor * dy))
            assert loss(at) >= best - 1e-6 * max(1, best)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_measurements_than_coefficients_are_refused(count):
    with pytest.raises(UsageError, match=f"^{count} measured peak"):
        fit_calibration([made(1024, 1, 0)] * count, terms)


def test_runs_that_do_not_differ_are_refused():
    with pytest.raises(UsageError, match="activations of one size"):
        fit_calibration([made(1024, 1, 0), made(1024, 1, GB)], terms)


def test_a_log_is_read_line_by_line():
    text = """# H100, torch 2.9
{"sequence": 4096, "peak": 20000000000}

{"sequence": 8192, "micro_batch": 2, "mesh": "fsdp=2,tp=4", "recompute": "full", "zero": 1, "peak": 31}
"""
    first, second = parse_measurements(text, TrainingWorkload(1024, profile="hf"), Mesh.of(tp=2))
    assert (first.line, first.work.sequence, first.work.profile, str(first.mesh)) == (2, 4096, "hf", "tp2")
    assert (second.line, second.peak, second.work.micro_batch, second.work.zero) == (4, 31, 2, 1)
    assert (second.work.recompute, str(second.mesh)) == ("full", "fsdp2 x tp4")
    (chunked,) = parse_measurements('{"mesh": "pp=4", "virtual_stages": 2, "peak": 9}', TrainingWorkload(1024))
    assert chunked.work.schedule == "interleaved"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sequence": 1}, "peak = None"),
        ({"peak": 0}, "peak = 0"),
        ({"peak": True}, "peak = True"),
        ({"peak": "20 GB"}, "peak = '20 GB'"),
        ({"peak": 1, "sequence": 0}, "sequence = 0 where a positive whole number"),
        ({"peak": 1, "sequence": 1.5}, "sequence = 1.5"),
        ({"peak": 1, "dropout": 1}, "dropout = 1 where true or false"),
        ({"peak": 1, "recompute": "some"}, "one of none, selective, full"),
        ({"peak": 1, "zero": True}, "zero = True"),
        ({"peak": 1, "zero": 4}, "zero = 4"),
        ({"peak": 1, "dtype": 16}, "dtype = 16 where a string"),
        ({"peak": 1, "mesh": 8}, "mesh = 8"),
        ({"peak": 1, "mesh": "xp=2"}, "xp=2"),
        ({"peak": 1, "batch": 8}, "unknown key 'batch'"),
        ({"peak": 1, "counter": "smi"}, "one of allocated, reserved, device"),
    ],
)
def test_a_line_that_is_not_as_it_should_be_is_named(values, message):
    text = '{"sequence": 1, "peak": 1}\n' + json.dumps(values)
    with pytest.raises(SourceError, match="line 2") as caught:
        parse_measurements(text, TrainingWorkload(1024))
    assert message in caught.value.message


@pytest.mark.parametrize("text", ["peak: 3", "[1]", "3", '{"peak": 1'])
def test_what_is_no_object_is_named(text):
    with pytest.raises(SourceError, match="line 1"):
        parse_measurements(text, TrainingWorkload(1024))


def test_a_log_may_say_which_modules_are_recomputed():
    line = {"recompute": "selective", "recompute_modules": ["moe_act", "layernorm"], "peak": GB}
    (parsed,) = parse_measurements(json.dumps(line), TrainingWorkload(8, profile="megatron"))
    assert parsed.work.recompute_modules == ("moe_act", "layernorm")
    for wrong in ("moe_act", [], ["attention"], [1]):
        with pytest.raises(SourceError, match="a list of core_attn"):
            parse_measurements(json.dumps(line | {"recompute_modules": wrong}), TrainingWorkload(8))


def test_a_log_may_say_the_types_of_both_moments():
    line = {"zero": 1, "moment_dtypes": ["BF16", "F32"], "peak": GB}
    (parsed,) = parse_measurements(json.dumps(line), TrainingWorkload(8, profile="megatron"))
    assert parsed.work.moment_dtypes == ("BF16", "F32")
    for wrong in ("BF16", [], ["BF16"], ["bf16", "F32"], [1, 2], ["BF16", "F32", "F32"], [["BF16"], "F32"]):
        with pytest.raises(SourceError, match="a list of two of F32"):
            parse_measurements(json.dumps(line | {"moment_dtypes": wrong}), TrainingWorkload(8))
