"""Verifies checkpoints without a fault, of every family on every mesh in three types, and prints what was said of them.

python docs/benchmarks/verify_sound.py DIR writes each small config of fixtures/configs as a checkpoint with random
values and a side file, cuts it, and verifies it with `--level full --against`: with its record, and without it and with
`--mesh`. An error is a false alarm. DIR keeps a line for each in outcomes.jsonl; `--page` prints the page of an earlier
run, and `--types fp32` tries one of the types. It takes about ten minutes.
"""

import argparse
import json
import platform
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import save_file

from shardctl.api import Mesh, ReshardOptions, ShardctlError, SourceOptions, VerifyOptions, reshard, verify
from shardctl.base.errors import Interrupted
from shardctl.models import describe_model
from shardctl.tensors.record import RECORD

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
MESHES = {"tp2": "tp=2", "pp2": "pp=2", "fsdp3": "fsdp=3", "ep2": "dp=2,ep=2"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OUTCOMES = "outcomes.jsonl"
SHARED = SourceOptions(kv_heads="replicate")
NO_RECORD = "digest"
"""The check whose warning every checkpoint without a record has."""


def write_model(name, dtype, place):
    """Write a model with random values; returns whether it has experts."""
    config = {**json.loads((CONFIGS / f"{name}.json").read_text()), "dtype": dtype}
    generator = torch.Generator().manual_seed(0)
    tensors, experts = {}, False
    for tensor in describe_model(config).own():
        values = torch.randn(tensor.shape, generator=generator) * 0.1
        tensors[tensor.name] = (values * 20).long() if tensor.dtype.torch.startswith("int") else values
        tensors[tensor.name] = tensors[tensor.name].to(getattr(torch, tensor.dtype.torch)).contiguous()
        experts |= tensor.spec.of_expert
    place.mkdir(parents=True)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "model.safetensors").chmod(0o644)
    (place / "config.json").write_text(json.dumps(config))
    (place / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return experts


def verify_cut(source, place, mesh):
    """Cut a checkpoint and verify it with a record and without; returns all findings of both."""
    mesh = Mesh.parse(mesh)
    reshard(source, place, ReshardOptions(mesh=mesh), source_options=SHARED)
    found = [verify(place, VerifyOptions(level="full", against=source))]
    (place / RECORD).unlink()
    found.append(verify(place, VerifyOptions(level="full", against=source, mesh=mesh)))
    return [finding for each in found for finding in each.findings]


def run_all(base, types):
    """Try every config in some types, and note each outcome: what was refused, or the findings."""
    base.mkdir(parents=True, exist_ok=True)
    with (base / OUTCOMES).open("a") as lines:
        for dtype in types:
            for path in sorted(CONFIGS.glob("*.json")):
                shutil.rmtree(base / "model", ignore_errors=True)
                experts = write_model(path.stem, DTYPES[dtype], base / "model" / "source")
                for mesh in (mesh for mesh in MESHES if experts or not mesh.startswith("ep")):
                    outcome = {"model": path.stem, "dtype": dtype, "mesh": mesh, "refused": "", "findings": []}
                    try:
                        outcome["findings"] = [
                            [each.severity, each.check, each.message]
                            for each in verify_cut(base / "model" / "source", base / "model" / mesh, MESHES[mesh])
                            if (each.severity, each.check) != ("warning", NO_RECORD)
                        ]
                    except Interrupted:
                        raise
                    except ShardctlError as error:
                        outcome["refused"] = error.message
                    lines.write(json.dumps(outcome) + "\n")
                lines.flush()
            print(f"{datetime.now(UTC):%H:%M:%S} {dtype}", file=sys.stderr, flush=True)
    shutil.rmtree(base / "model", ignore_errors=True)


def has_alarm(outcome):
    """Return whether something that is right was called wrong."""
    return any(severity == "error" for severity, *_ in outcome["findings"])


def format_page(outcomes):
    """Format the page of all outcomes."""
    verified = [each for each in outcomes if not each["refused"]]
    models = {each["model"] for each in outcomes}
    parts = [
        "# Checkpoints without a fault",
        (
            f"`python docs/benchmarks/verify_sound.py WORKDIR` on {datetime.now(UTC):%-d %B %Y}, with Python "
            f"{platform.python_version()} and torch {torch.__version__}.\n{len(models)} small configs of all families "
            f"gave {len(verified):,} cut checkpoints. Each was verified with `--level full --against`, once with its "
            f"record, and once without it and with `--mesh`.\n{sum(map(has_alarm, verified))} raised a false alarm."
        ),
    ]
    rows = ["| type | mesh | passed | false alarms | refused by `reshard` |", "|---|---|--:|--:|--:|"]
    for dtype in DTYPES:
        for mesh in MESHES:
            here = [each for each in outcomes if (each["dtype"], each["mesh"]) == (dtype, mesh)]
            alarms, refused = sum(map(has_alarm, here)), sum(bool(each["refused"]) for each in here)
            if here:
                rows.append(f"| {dtype} | {mesh} | {len(here) - alarms - refused} | {alarms} | {refused} |")
    parts.append("\n".join(rows))
    every = len(list(CONFIGS.glob("*.json")))
    for dtype in DTYPES:
        tried = len({each["model"] for each in outcomes if each["dtype"] == dtype})
        if tried < every:
            parts.append(f"The run ended when {tried} of the {every} configs had been tried in {dtype}.")
    refused = sorted({(each["refused"], each["mesh"], each["model"]) for each in outcomes if each["refused"]})
    parts += ["## Refused", "A dim or the layers of these small models cannot be divided in this way."]
    parts.append("\n".join(f"- {model}, {mesh}: {message}" for message, mesh, model in refused) or "None.")
    said = {}
    for each in verified:
        for finding in each["findings"]:
            said.setdefault(tuple(finding), []).append(f"{each['model']} {each['dtype']} {each['mesh']}")
    parts += ["## Findings", "All findings, but for the warning that there is no record to compare digests with."]
    parts.append(
        "\n".join(
            f"- {severity} [{check}] {message} ({len(where)} times, first {where[0]})"
            for (severity, check, message), where in sorted(said.items())
        )
        or "None."
    )
    return "\n\n".join(parts) + "\n"


def main():
    """Parse the command line, run, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--page", action="store_true", help="print the page of an earlier run")
    parser.add_argument("--types", nargs="+", choices=DTYPES, default=list(DTYPES))
    asked = parser.parse_args()
    if not asked.page:
        run_all(asked.workdir, asked.types)
    print(format_page([json.loads(line) for line in (asked.workdir / OUTCOMES).read_text().splitlines()]), end="")


if __name__ == "__main__":
    main()
