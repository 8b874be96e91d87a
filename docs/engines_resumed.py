"""Writes the section of `docs/engines.md` that says which trainer goes on from which, as `tests` run it, too.

Run by hand, from the root: ``python -m docs.engines_resumed [TRAINER=PYTHON ...] [SAVER ...]``, where TRAINER is the
first word of a trainer's name below and PYTHON has it; without one, this Python has. Each saver trains a small Llama
and saves, shardctl converts, and each resumer goes on; what was found is kept in `docs/engines_resumed.json`, so that
some savers can be run again.
"""

# ruff: noqa: E501 - lines of a table
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardctl.api import Mesh, ReshardOptions, SourceOptions, reshard
from shardctl.base.errors import ShardctlError

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).with_suffix(".json")
TORCH = "torch.distributed.checkpoint,transformers.models.llama"
CORE = "megatron.core.models.gpt.gpt_model,transformers.models.llama"
PACKAGES = {
    "torch": "torch",
    "Accelerate": "accelerate",
    "transformers": "transformers",
    "DeepSpeed": "deepspeed",
    "Megatron-LM": "megatron-core",
    "Megatron-FSDP": "megatron-core",
    "torchtitan": "torchtitan",
    "Automodel": "nemo_automodel",
    "VeOmni": "veomni",
    "verl": "verl",
}
"""The package that a trainer is, by the first word of its name."""


@dataclass(frozen=True)
class TrainerCase:
    """A trainer, and how it is run."""

    name: str
    module: str
    """Of `fixtures`."""
    words: tuple[str, ...] = ()
    """What its program is told besides."""
    preloaded: str = TORCH
    options: tuple[tuple[str, Any], ...] = ()
    """Those of the conversion for it."""
    dtype: str = "float32"

    @property
    def package(self) -> str:
        """What it is installed as."""
        return PACKAGES[self.name.split()[0].strip(",")]


FSDP, DEEPSPEED = "torch_dist.resume_fsdp", "torch_dist.resume_deepspeed"
DIST, RANKS = "torch_dist.resume", "megatron.resume"
DCP = (("to", "dcp"),)
UNIVERSAL = (("to", "universal"),)
TP2 = ("mesh", Mesh.of(tp=2))
BF16 = "bfloat16"
SAVERS = (
    TrainerCase("torch FSDP2", FSDP, ("fsdp2",)),
    TrainerCase("torch FSDP1", FSDP, ("fsdp1",)),
    TrainerCase("torch, one file", "torch_dist.resume_torch", ("file",)),
    TrainerCase("Accelerate FSDP2", FSDP, ("accelerate",)),
    TrainerCase("Accelerate FSDP1", FSDP, ("accelerate1",)),
    TrainerCase("transformers FSDP2", FSDP, ("transformers",)),
    TrainerCase("verl FSDP2", FSDP, ("verl",)),
    TrainerCase("VeOmni", "veomni.resume"),
    TrainerCase("torchtitan", "torchtitan.resume"),
    TrainerCase("Automodel", "automodel.resume"),
    *(TrainerCase(f"DeepSpeed ZeRO-{n}", DEEPSPEED, (str(n),), "deepspeed," + TORCH) for n in (1, 2, 3)),
    TrainerCase("DeepSpeed universal", DEEPSPEED, ("1", "universal"), "deepspeed," + TORCH),
    TrainerCase("Megatron-LM dp_reshardable", DIST, ("tp=2", "dp=2"), CORE),
    TrainerCase("Megatron-LM fully_reshardable", DIST, ("fully_reshardable", "tp=2", "dp=2"), CORE),
    TrainerCase("Megatron-LM ranks", RANKS, ("tp=2",), CORE),
    TrainerCase("Megatron-LM ranks, replicated", RANKS, ("replicated", "tp=2"), CORE),
    TrainerCase("Megatron-FSDP (bf16)", "fsdp_dtensor.resume", ("dp=2",), dtype=BF16),
)
RESUMERS = (
    TrainerCase("torch FSDP2", FSDP, ("fsdp2",), options=DCP),
    TrainerCase("torch FSDP1", FSDP, ("fsdp1",), options=DCP),
    TrainerCase("VeOmni", "veomni.resume", options=(*DCP, ("names", "veomni"))),
    TrainerCase("torchtitan", "torchtitan.resume", options=(*DCP, ("names", "torchtitan"))),
    TrainerCase("Automodel", "automodel.resume", options=(*DCP, ("names", "automodel"))),
    TrainerCase("Accelerate FSDP2", FSDP, ("accelerate",), options=(*DCP, ("names", "accelerate"))),
    TrainerCase("Accelerate FSDP1", FSDP, ("accelerate1",), options=(*DCP, ("names", "accelerate"))),
    *(TrainerCase(f"DeepSpeed ZeRO-{n}", DEEPSPEED, (str(n),), "deepspeed," + TORCH, UNIVERSAL) for n in (1, 3)),
    TrainerCase("Megatron-LM torch_dist", DIST, ("tp=2", "dp=2"), CORE, (("to", "torch_dist"), TP2)),
    TrainerCase("Megatron-LM ranks", RANKS, ("tp=2",), CORE, (("to", "megatron"), ("megatron", "layers=local"), TP2)),
    TrainerCase(
        "Megatron-FSDP (bf16)",
        "fsdp_dtensor.resume",
        ("dp=2",),
        options=(("to", "fsdp_dtensor"), ("megatron", "layers=local"), ("dtype", "bf16")),
        dtype=BF16,
    ),
    TrainerCase("torch, weights alone", FSDP, ("weights",), options=DCP),
)


def run_trainers(jobs: list[tuple[TrainerCase, list[str]]], pythons: dict[str, str]) -> list[dict[str, Any]]:
    """Run every trainer's program with its words; each is how it ended and what it said.

    Those of one program share a process that loads its libraries once.
    """
    programs: dict[tuple[str, str, str], list[int]] = {}
    for number, (case, _) in enumerate(jobs):
        python = pythons.get(case.name.split()[0], sys.executable)
        programs.setdefault((python, case.module, case.preloaded), []).append(number)
    settings = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    found: dict[int, dict[str, Any]] = {}
    for (python, module, preloaded), numbers in programs.items():
        given = json.dumps([[*jobs[number][1], *jobs[number][0].words] for number in numbers])
        command = [python, "-m", "fixtures.several", f"fixtures.{module}", preloaded]
        done = subprocess.run(
            command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True, check=True, env=settings
        )
        found |= zip(numbers, json.loads(done.stdout.splitlines()[-1]), strict=True)
        print(module, [found[number]["said"] for number in numbers], flush=True)
    return [found[number] for number in range(len(jobs))]


def ask_version(case: TrainerCase, python: str) -> str:
    """The version of what a Python has of a trainer."""
    code = f"import importlib.metadata as m; print(m.version({case.package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def convert(saver: TrainerCase, resumer: TrainerCase, model: Path, place: Path) -> dict[str, Any]:
    """Convert what a trainer saved beside `place` for another; says what was left behind or refused."""
    asked = ReshardOptions(optimizer_states="keep", **dict(resumer.options))
    source = place.parent / saver.name.replace(" ", "-")
    try:
        done = reshard(source, place, asked, source_options=SourceOptions(config=model))
    except ShardctlError as error:
        return {"said": f"shardctl refuses: {error.message}"}
    left = [text for text in done.warnings if "left behind" in text and "state" in text]
    return {"left": left} if left else {}


def run_detours(
    savers: tuple[TrainerCase, ...], resumers: tuple[TrainerCase, ...], pythons: dict[str, str], folder: Path
) -> dict[str, dict[str, Any]]:
    """Save with each of the savers, convert, and go on with each of the resumers, all in `folder`.

    Returns for every saver its three losses, and for every resumer how far apart its losses are, or what went wrong.
    """
    from fixtures.torch_dist.resume import make_model

    models = {dtype: folder / dtype for dtype in {case.dtype for case in (*savers, *resumers)}}
    for dtype, place in models.items():
        make_model(place, "llama", dtype)
    jobs = []
    for saver in savers:
        place = folder / saver.name.replace(" ", "-")
        jobs.append((saver, ["train", str(models[saver.dtype]), str(place), f"{place}.json"]))
    found: dict[str, dict[str, Any]] = {}
    for (saver, job), ended in zip(jobs, run_trainers(jobs, pythons), strict=True):
        losses = None if ended["ended"] else json.loads(Path(job[-1]).read_text())
        found[saver.name] = {"losses": losses, "said": ended["said"], "resumed": {}}
    converted, jobs = [], []
    for saver in (each for each in savers if found[each.name]["losses"] is not None):
        for resumer in resumers:
            place = folder / f"{saver.name} to {resumer.name}".replace(" ", "-")
            cell = convert(saver, resumer, models[saver.dtype], place)
            found[saver.name]["resumed"][resumer.name] = cell
            if "said" not in cell:
                converted.append((saver, resumer))
                jobs.append((resumer, ["resume", str(models[resumer.dtype]), str(place), f"{place}.json"]))
    for (saver, resumer), (_, job), ended in zip(converted, jobs, run_trainers(jobs, pythons), strict=True):
        cell = found[saver.name]["resumed"][resumer.name]
        if ended["ended"]:
            cell["said"] = f"{resumer.name} ends: {ended['said']}"
            continue
        losses = json.loads(Path(job[-1]).read_text())
        cell["apart"] = max(abs(a - b) for a, b in zip(losses, found[saver.name]["losses"], strict=True))
    return found


HEAD = """
## Which trainer goes on from which

`python -m docs.engines_resumed` has each of these trainers train the same small Llama with the same Adam on the same
batches, on CPUs with gloo. Each saves after two steps (rows); shardctl converts what it saved, and each goes on from that
for three steps (columns), every weight, learning rate and state being wrong before it is loaded. A number is the greatest
difference of the three losses, which are about 5.6, from those of the trainer that saved and went on itself. Kernels for
GPUs are stood in for, and trainers' own loops were run where `fixtures` says so. All computes in fp32, but for
Megatron-FSDP, which needs bf16: that rounds, in its row and its column. DeepSpeed's loader of stage 3 gives all
groups the settings of the first (0.19.8), so that weights which should not decay do. The last column shows what the losses are
without the states. `tests/formats/test_resumed_elsewhere.py` runs those that are installed.

"""


def build_section(kept: dict[str, Any]) -> str:
    """The table of what was run, and under it what was not and why."""
    found, said = kept["found"], list[str]()
    names = [case.name for case in RESUMERS]
    rows = [f"| saved by | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for saver in (case.name for case in SAVERS):
        cells = []
        for name in names:
            cell = found[saver]["resumed"].get(name, {"said": found[saver]["said"]})
            reason = cell.get("said") or "; ".join(cell.get("left", ()))
            if reason and reason not in said:
                said.append(reason)
            number = f" ({said.index(reason) + 1})" if reason else ""
            cells.append((f"{cell['apart']:.1e}" if cell.get("apart") else "0" if "apart" in cell else "no") + number)
        rows.append(f"| {saver} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(kept["versions"].items()))
    notes = "".join(f"{number}. {reason}\n" for number, reason in enumerate(said, 1))
    return HEAD + "\n".join(rows) + f"\n\nVersions: {versions}.\n" + (f"\n{notes}" if notes else "") + NOT_RUN


NOT_RUN = """
What is not in the table:

| trainer | why |
|---|---|
| Lightning | its `.ckpt` is one file of `torch.save`, whose states are read; its `Trainer` was not run |
| transformers' Trainer without FSDP (`optimizer.pt`) | parameters are numbered, and the weights beside them, in safetensors, have another order: weights are read, states are left behind |
| verl with FSDP1 | the optimizer's states are flat parts of each rank, without names or shapes |
| verl and transformers' `DistributedConfig` going on | neither layout is written: give the trainer `--to hf`, which has the weights |
| DeepSpeed going on from its own directories (`global_stepN`) | only Universal Checkpoints are written, which it loads with any number of ranks |
| NeMo 2 | its directories are Megatron-LM's `torch_dist` in `weights/`; NeMo itself was not installed |
| MaxText and Orbax | weights alone are written and read; their optimizer states have no reader here |
"""


def main(words: list[str]) -> None:
    """Run the savers that are named, or all, with all resumers."""
    pythons = dict(word.split("=", 1) for word in words if "=" in word)
    chosen = [word for word in words if "=" not in word]
    savers = tuple(each for each in SAVERS if not chosen or each.name in chosen)
    with tempfile.TemporaryDirectory(prefix="detours-") as folder:
        found = run_detours(savers, RESUMERS, pythons, Path(folder))
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {"versions": {}, "found": {}}
    kept["found"] |= found
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    cases = {case.name: case for case in (*savers, *RESUMERS)}
    kept["versions"] |= {
        case.package: ask_version(case, pythons.get(name.split()[0], sys.executable)) for name, case in cases.items()
    }
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    from docs import engines

    engines.PAGE.write_text(engines.build_page(json.loads(engines.KEPT.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
