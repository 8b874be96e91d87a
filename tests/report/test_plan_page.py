"""The page of a plan: its pictures say what the plan says, and it depends on nothing but its input."""

import html
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from shardctl.cli.program import run
from shardctl.conversion.file_flows import count_file_flows
from shardctl.estimate.training.schedule import compute_bubble
from shardctl.options import PlanOptions, ReshardOptions
from shardctl.planning.needs_table import tabulate_needs
from shardctl.report.pages.pipeline import draw_pipeline, simulate_pipeline
from shardctl.report.pages.plan_page import render_plan_page
from shardctl.report.pages.treemap import lay_out_areas, list_areas_by_name
from shardctl.verbs.plan import plan

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "fixtures/configs_public/llama-3.1-8b.json"
STORED = ROOT / "fixtures/peft/hf/llama"


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_a_simulated_pipeline_waits_as_long_as_the_formula_says(stages, rounds, schedule, virtual):
    microbatches = stages * rounds
    passes = simulate_pipeline(stages, microbatches, schedule, virtual)
    assert len(passes) == 2 * stages * microbatches * virtual
    works = 3.0 * microbatches
    assert max(one.end for one in passes) / works - 1 == pytest.approx(
        compute_bubble(stages, microbatches, schedule, virtual)
    )
    for stage in range(stages):
        own = sorted((one.start, one.end) for one in passes if one.stage == stage)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(own))


def test_a_pass_waits_for_the_one_before_it():
    done = {(p.stage, p.microbatch, p.chunk, p.backward): p for p in simulate_pipeline(4, 8, "interleaved", 2)}
    for (stage, microbatch, chunk, backward), one in done.items():
        if not backward and stage:
            assert done[stage - 1, microbatch, chunk, False].end <= one.start + 1e-9
        if backward:
            assert done[stage, microbatch, chunk, False].end <= one.start + 1e-9


def test_a_picture_of_too_many_passes_is_left_out():
    assert draw_pipeline(16, 512, "1f1b") is None
    assert draw_pipeline(4, 8, "1f1b").count("<title>") == 2 * 4 * 8


def test_areas_fill_their_place():
    areas = [40.0, 20.0, 20.0, 10.0, 5.0, 5.0]
    cells = lay_out_areas(areas, (0.0, 0.0, 20.0, 5.0))
    assert [width * height for _, _, width, height in cells] == pytest.approx(areas)
    assert max(left + width for left, _, width, _ in cells) == pytest.approx(20)
    assert max(top + height for _, top, _, height in cells) == pytest.approx(5)


def test_the_treemap_has_every_byte():
    planned = plan(LLAMA, ReshardOptions())
    assert sum(nbytes for *_, nbytes in list_areas_by_name(planned.model.inventory)) == planned.weight_bytes


@pytest.mark.parametrize("options", [PlanOptions(), PlanOptions(use="train", recompute="full")])
def test_the_table_of_context_and_batch_has_what_was_asked_for(options):
    planned = plan(LLAMA, ReshardOptions(), plan_options=options)
    table, work = tabulate_needs(planned), planned.forecast.work
    asked = (work.context, work.batch) if hasattr(work, "context") else (work.sequence, work.micro_batch)
    cell = table.rows[table.contexts.index(asked[0])][table.batches.index(asked[1])]
    assert cell == planned.forecast.estimate.binding.total().nbytes
    assert all(a <= b for row in table.rows for a, b in pairwise(row))


def test_what_goes_where_has_every_byte_that_is_written():
    planned = plan(STORED, ReshardOptions(mesh=None))
    flows = count_file_flows(planned.copy_plan)
    assert {source for source, _ in flows} == {"model.safetensors"}
    assert sum(flows.values()) == sum(copy.write_bytes for copy in planned.copy_plan.copies)


def make_page(path, *options, code=0):
    assert run(["plan", *map(str, options), "--report", str(path)]) == code
    return path.read_text()


def test_a_page_is_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    options = (LLAMA, "--gpu", "h100", "--mesh", "pp=2,tp=2")
    page = make_page(tmp_path / "a.html", *options)
    assert page == make_page(tmp_path / "a.html", *options)
    assert "2023-11-14 22:13 UTC" in page
    assert f"plan {shlex.quote(str(LLAMA))} --gpu h100" in page


def test_a_page_has_the_pictures_of_its_purpose(tmp_path):
    train = ("--for", "train", "--mesh", "pp=2,fsdp=8", "--gpu", "h200", "--recompute", "full")
    page = make_page(
        tmp_path / "a.html", LLAMA, *train, "--microbatches", "4", "--schedule", "interleaved", "--vp", "2"
    )
    assert "The pipeline: interleaved, 2 stages, 4 microbatches, 2 chunks a stage" in page
    assert page.count('class="forward chunk1"') == 8
    limit = re.search(r'class="limit"[^>]*y1="([\d.]+)"[^>]*/><text[^>]*>limit of the device: [\d.]+ GiB</text>', page)
    ticks = re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+) GiB</text>', page)
    budget = float(re.search(r"limit of the device: ([\d.]+) GiB", page)[1])
    (first, low), (last, high) = [(float(y) - 4, float(size)) for y, size in (ticks[0], ticks[-1])]
    assert float(limit[1]) == pytest.approx(first + (last - first) * (budget - low) / (high - low), abs=0.2)
    assert "moments of a step, in order of time" in page
    search = make_page(tmp_path / "b.html", LLAMA, "--gpu", "h100", "--search", "--gpus", "8")
    assert 'class="dot best"' in search
    assert 'class="frontier"' in search
    assert "The pipeline" not in search


def test_a_page_that_no_command_made_names_none():
    text = render_plan_page(plan(STORED, ReshardOptions()), ())
    assert "UTC</p>" in text
    assert "<pre></pre>" not in text
    assert "--out plan.json" not in text


def test_what_to_do_next_can_be_done(tmp_path):
    """The first two commands of the page make the conversion that it shows."""
    source = tmp_path / "a model"
    source.symlink_to(STORED)
    page = make_page(tmp_path / "a.html", source, "--tp", "2")
    steps = re.findall(r"<li>[^<]*<pre>(.*?)</pre>", page)
    assert len(steps) == 4
    write_to = tmp_path / "shardctl"
    write_to.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m shardctl "$@"\n')
    write_to.chmod(0o755)
    for step in steps[:3]:
        command = f"PATH={tmp_path}:$PATH; {html.unescape(step)}"
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "identity   passed" in done.stdout


def test_the_wheel_has_the_templates():
    folder = Path(find_spec("shardctl.report.pages").submodule_search_locations[0])
    assert {"page.html.jinja", "plan.html.jinja"} <= {path.name for path in folder.glob("*.jinja")}
