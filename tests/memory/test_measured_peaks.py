"""Plans beside peaks that others measured: as close as the page says, and inside the intervals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def estimates():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import estimates
    finally:
        sys.path.remove(str(BENCHMARKS))
    return estimates


@pytest.fixture(scope="module")
def rows(estimates):
    return estimates.compare_rows(estimates.ROWS)


def test_the_page_has_what_the_program_says(estimates, rows):
    again = "python docs/benchmarks/estimates.py --write"
    assert estimates.PAGE.read_text() == estimates.format_page(rows), f"look at the difference of {again}"


def test_nine_of_ten_measured_peaks_are_inside_their_intervals(rows):
    known = [row for row in rows if not row.missing]
    assert len(known) > 50
    assert sum(row.inside for row in known) / len(known) > 0.9


def test_megatrons_peaks_are_within_a_hundredth(rows):
    errors = [abs(row.error) for row in rows if row.source == "SimuMax B200" and row.counter == "allocated"]
    assert len(errors) > 20
    assert sum(errors) / len(errors) < 0.002
    assert max(errors) < 0.01


def test_rows_that_were_fixed_before_are_met(estimates):
    """At most 2.5 % on average and 10 % at worst, in intervals that are at most 15 % wide on average."""
    rows = [row for row in estimates.compare_rows(estimates.HELD_OUT) if not row.missing]
    assert len(rows) == 36
    errors = [abs(row.error) for row in rows]
    assert sum(errors) / len(errors) < 0.01
    assert max(errors) < 0.05
    assert sum(row.inside for row in rows) / len(rows) >= 0.95
    assert sum(row.width for row in rows) / len(rows) < 0.10


def test_known_errors_are_no_more_wrong_than_before(estimates):
    text = "\n".join(estimates.format_known_errors())
    assert text.count("| right |") == 3
    assert "**wrong**" not in text


def test_the_page_of_known_meshes_has_what_the_program_says(tmp_path):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import known_meshes
    finally:
        sys.path.remove(str(BENCHMARKS))
    known, page = json.loads(known_meshes.ROWS.read_text()), known_meshes.PAGE.read_text()
    again = "look at the difference of python docs/benchmarks/known_meshes.py --write"
    lines = page.splitlines()
    assert [sum(line.startswith(f"| {row['name']} |") for line in lines) for row in known["training"]] == [
        2 if any(row["name"] == other["name"] for other in known["serving"]) else 1 for row in known["training"]
    ]
    (run,) = (row for row in known["training"] if row["name"] == "torchtitan 8B")
    assert known_meshes.format_training([known_meshes.compare_training(run, tmp_path)])[-1] in lines, again
    (server,) = (row for row in known["serving"] if row["name"] == "Gemma-4-26B-A4B")
    assert known_meshes.format_serving([known_meshes.compare_serving(server, tmp_path)])[-1] in lines, again
