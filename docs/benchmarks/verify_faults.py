"""Injects faults into checkpoints and asks which level of `verify` finds each.

python docs/benchmarks/verify_faults.py DIR injects every kind of fault into every family on every mesh where there is
something to change, and looks for it with the record that shardctl wrote and without. DIR keeps a line for each in
trials.jsonl; `--page` prints the page of an earlier run, and `--only TEXT` tries the families whose names have TEXT.
It takes half an hour on two busy cores.
"""

import argparse
import json
import platform
import shutil
import sys
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "verify"))
from fault_models import LIBRARIES, MODELS, list_meshes
from fault_states import NAME_KINDS, SETTING_KINDS
from fault_trials import FOUND, KINDS, MISSED, SEVERAL, FaultBench, FaultTrial

LEVELS = (*FOUND, MISSED)
TRIALS = "trials.jsonl"
READ_BY_ALL = "code that the source lacks"
"""Of the kinds of code and tokenizers, the one that is a fault in what a trainer loads, too."""
INTRODUCTION = """\
A case is one fault in one checkpoint. Each column counts the cases that its check finds and that no check to its left
finds. `structure` is plain `verify`, which reads headers; `full` is `--level full`, which reads every element; with
`--against` it compares with the source as well; `--mesh` names the mesh of files without a record; `--forward` runs the
model. Files with a record need no `--mesh`, because the record names the mesh, and there digests find what `--against`
finds without one.
"""
MORE = """\
Ranks that trade what they hold, and say so, have every element once, and the parts on each rank belong together. Only
the mesh says that a part is on the wrong rank. Without a record, some cases of these kinds need `--mesh`:
"""


def run_trials(base, only):
    """Inject everything into the families whose names have a text, and note each trial."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    bench = FaultBench(base)
    with (base / TRIALS).open("w") as lines:
        for model in (model for model in MODELS if only in model):
            for mesh in list_places(model):
                kinds = KINDS if mesh not in LIBRARIES else (*SETTING_KINDS, *NAME_KINDS, READ_BY_ALL)
                for trial in (bench.try_sound(model, mesh), *bench.list_trials(model, mesh, kinds)):
                    lines.write(json.dumps(asdict(trial)) + "\n")
                lines.flush()
                print(f"{datetime.now(UTC):%H:%M:%S} {model} {mesh}", file=sys.stderr, flush=True)


def list_places(model):
    """List where a model is tried: meshes, one device, and what other libraries load."""
    return (*list_meshes(model), SEVERAL, *(LIBRARIES if model == "Llama" else ()))


def read_trials(base):
    """Read what a run has noted."""
    return [FaultTrial(**json.loads(line)) for line in (base / TRIALS).read_text().splitlines()]


def format_table(head, rows):
    """Format a table whose first column is text and whose others are numbers; zeros are left out."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    for row in rows:
        cells = " | ".join(str(cell or "").replace("|", r"\|") for cell in row)
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def count_row(name, trials):
    """Count at which level trials were found, without a record and with one."""
    without = Counter(trial.level for trial in trials if not trial.recorded)
    recorded = Counter(trial.level for trial in trials if trial.recorded)
    late = sum(recorded[level] for level in LEVELS if level not in {"structure", "full"})
    return [name, without.total(), *(without[level] for level in LEVELS), recorded["structure"], recorded["full"], late]


def list_gaps(faults, models):
    """Say which meshes of which models an interrupted run did not reach, a sentence a paragraph."""
    for model in models:
        done = {trial.mesh for trial in faults if trial.model == model}
        left = [mesh for mesh in list_places(model) if mesh not in done]
        if left:
            yield f"The run ended before it came to {model} on {', '.join(left)}."


def format_page(trials):
    """Format the page of all trials."""
    sound = [trial for trial in trials if not trial.kind]
    faults = [trial for trial in trials if trial.kind]
    head = ["", "cases", *(f"`{level}`" for level in FOUND), MISSED, "with a record: `structure`", "`full`", "else"]
    kinds = [kind for kind in KINDS if any(trial.kind == kind for trial in faults)]
    models = [model for model in MODELS if any(trial.model == model for trial in faults)]
    places = list(dict.fromkeys(trial.mesh for trial in faults))
    missed = [trial for trial in faults if trial.level == MISSED]
    alarms = [trial for trial in sound if trial.level != MISSED]
    of_mesh = [kind for kind in kinds if any(t.level == "--mesh" for t in faults if t.kind == kind)]
    of_forward = [kind for kind in kinds if any(t.level == "--forward" for t in faults if t.kind == kind)]
    parts = [
        "# Faults that `verify` finds",
        (
            f"`python docs/benchmarks/verify_faults.py WORKDIR` on {datetime.now(UTC):%-d %B %Y}, with Python "
            f"{platform.python_version()}, torch {torch.__version__} and transformers {transformers.__version__}.\n"
            f"{len(kinds)} kinds of faults, {len(models)} models, {len(places)} meshes: {len(faults):,} faulty "
            f"checkpoints, of which {len(missed)} were missed. {len(sound)} checkpoints without a fault raised "
            f"{len(alarms)} alarms."
        ),
        INTRODUCTION.strip(),
        format_table(head, [count_row(kind, [t for t in faults if t.kind == kind]) for kind in kinds]),
        "## By model",
        format_table(head, [count_row(model, [t for t in faults if t.model == model]) for model in models]),
        *list_gaps(faults, models),
        "## By mesh",
        format_table(head, [count_row(place, [t for t in faults if t.mesh == place]) for place in places]),
        "## What needs more than `--level full --against`",
        MORE.strip(),
        "\n".join(f"- {kind}" for kind in of_mesh),
        "Found by `--forward` alone: " + (", ".join(of_forward) or "none") + ".",
        "## Missed",
        "\n".join(f"- {t.kind}: {t.model}, {t.mesh}" for t in missed) or "None.",
    ]
    return "\n\n".join(parts) + "\n"


def main():
    """Parse the command line, run, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--page", action="store_true", help="print the page of an earlier run")
    parser.add_argument("--only", default="", help="try only the families whose names have this text")
    asked = parser.parse_args()
    if not asked.page:
        run_trials(asked.workdir, asked.only)
    print(format_page(read_trials(asked.workdir)), end="")


if __name__ == "__main__":
    main()
