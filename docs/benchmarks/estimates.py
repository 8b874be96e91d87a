"""Compares plans with what others measured and published, and writes the page estimates.md.

    python docs/benchmarks/estimates.py [--write]

Every row of estimates.json names a model, the options of `shardctl plan`, and what somebody measured. The options are
run as a user would run them, and the measured memory is compared with what the plan says that the same counter counts.
A row whose source leaves something open, or whose run has what no option says, is compared too, but counted apart.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from shardctl.cli.program import run

HERE = Path(__file__).parent
HELD_OUT = HERE / "estimates_held_out.json"
KNOWN_ERRORS = HERE / "estimates_known_errors.json"
CONFIGS = HERE.parents[1] / "fixtures" / "configs_public"
ROWS, PAGE = HERE / "estimates.json", HERE / "estimates.md"
COUNTERS = ("allocated", "reserved", "device", "cache")
GIB = 2**30
INTRODUCTION = """\
# How far plans are from what others measured

`python docs/benchmarks/estimates.py --write` writes this page. It runs `shardctl plan` for each published run, and
compares what the plan says that a counter sees with what it measured, in GiB. Models and options of every row are in
[estimates.json](estimates.json). A test compares this page with the program. Of engines that serve, it is the room for
caches that is compared, which logs say.

No coefficient is fitted to these runs: each term is from the source of the runtime. But the runs of SimuMax showed
which terms were missing (the gradients that nobody reads, what a layer of experts holds in its forward pass, the result
of attention that cp ranks exchange), so they are no independent test of those. The runs of Megatron-LM's CI were looked
at afterwards. The runs of torchtitan showed that reserved memory of FSDP2 lacked what the allocator keeps for other
streams and the hole that freed logits leave. The runs of transformers showed that autocast forgets the weights that it
has cast at the end of the forward pass only, also of layers that are computed again, and those of fms-acceleration that
nothing is in fp32 between the layers of a frozen base in 16 bits. SGLang's logs showed the blocks of weights.

A row is *used* if somebody looked at it while a term of its plan was added or changed; the others are independent of
that. *runtime of* is when the measured software was released or built, as far as the source says it.
"""
OTHERS = """\
Other tools on the same rows of allocated memory: SimuMax {simumax}. On rows of their own, LLMem publishes 1.6 % on one
GPU and 3.0 % on several (Kim et al. 2024, abstract).

Rooms for caches are what an engine's log says. Rows of vLLM are planned for their versions.
SGLang's rows showed that loading takes more than the weights, because torch's allocator gives out multiples of 2 MiB;
half a block for each matrix is counted now. What is left of them is mostly what NCCL and SGLang's own reductions take
before the weights, of which the log of Qwen3-235B does not say how much: on eight H200 others measured 1.8 to 2.0 GB.

Allocated memory of Megatron-LM lacked one of three workspaces of matrix kernels, which the bytes that its CI logs
between steps showed: one run of an H100 has 96 MiB besides its states, and on an A100 68 MiB. What is left, 16 MiB in
runs of 1 GiB, was not found. Reserved memory depends on the order of allocations, which is modelled for FSDP2's
largest blocks only: for Megatron-LM, the allocator kept 2 % to 9 % more than what was allocated. Buffers of
asynchronous TP are not known. The runs of transformers are of January 2022, when torch kept gradients from step to
step and the input of each softmax, and CUDA's context took 1.31 GiB, where the plan has 0.56 GiB; all three are
counted. What is left is slack of the allocator, of which the plan takes 5 %: its rules, followed through a step of
these runs, give 0.4 % to 8 %.

Six rows are off by more than 3 %: three of reserved memory, one of a device's and two of caches. Torch 2.13's own
FSDP2, followed at full size through two steps with fake tensors, was put through the rules of torch's caching
allocator: without expandable segments, torchtitan's four runs of 8B with selective recomputation in 16 bits need 82.6,
67.6, 76.9 and 61.9 GiB by that, where 82.4, 67.0, 77.0 and 62.0 were measured; with them 1 GiB to 3 GiB less.
[reserved.py](reserved.py) prints the first two, of uncompiled layers (the second with `--ranks 128`). So it seems that
these runs had none, and that what the plan takes as slack is blocks that nothing else fits into. Those with cp are met
the other way: 84.3 GiB with expandable segments and 80.8 without, in 16 bits, where 83.9 to 84.5 were measured in
float8. torchtitan's 70B on 256 devices needs 69.5 GiB in the same way if its layers are not compiled: two blocks of 2
GiB that tp ranks gathered or summed, and one that the logits leave, stay free. With all 80 layers compiled by torch
2.13's Inductor, 65.5 GiB are needed, in 16 bits as well as in float8, whose casts, gathers and products were written
out after torchao's: the peak is the loss's, at which a layer has left its input alone in either. So float8 is not what
is missing. The compiler of December 2024, and what it allocates while it times its kernels in the first step, were not
followed; with asynchronous TP, the same run took 4.3 GiB less, as the plan says. Of SimuMax's two rows and of
Adafactor's, the order of allocations was not followed, which Transformer Engine's and Adafactor's own code decide: what
is allocated is met within 0.2 % in the former, and the plan has 5 % of slack in all three. R1-Distill on two 4090 has
0.22 GiB less in the plan than vLLM found, and Qwen3-235B on four H100 0.93 GiB more than SGLang did: why was not found,
and what NCCL takes is an interval in the plan, inside which both lie.

The runs of fms-acceleration showed that weights which are not trained need none of their inputs, and those that PEFT or
TRL prepared that results of bitsandbytes' layers have the type of what they read. Those of PowerLM were looked at
afterwards. Llama-2-70B with QLoRA lacks 0.25 GiB, as much as the result of one layer, which torch's reentrant
checkpointing holds while it is computed again. Mixtral's that TRL prepared were 4 % to 5 % too low, because experts in
the modules of bitsandbytes return fp32 there and run one after another, so that the gradients of one are alive at a
time. Both are counted after the sources of transformers 4.48 and bitsandbytes, and transformers 4.48's own model,
followed with fake tensors, needs as much within 0.5 %.

## Runs of which something is not known, or cannot be said

They are planned without what the last column names, and are not counted above.
"""


@dataclass(frozen=True)
class MeasuredPeak:
    """One measured number next to the estimate, in GiB."""

    source: str
    name: str
    counter: str
    measured: float
    ours: float
    low: float
    high: float
    profile: str
    others: dict[str, float]
    """What other tools say of it, by their names."""
    missing: str
    """What is not known of the run, or what no option says; empty if the run is planned as it was."""
    used: bool
    """Whether somebody looked at the row while a term of its plan was added or changed."""

    @property
    def error(self) -> float:
        return self.ours / self.measured - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def width(self) -> float:
        """The interval's, as a part of the estimate."""
        return (self.high - self.low) / self.ours


def read_config(model: dict[str, object]) -> dict[str, object]:
    """The config of a row: its own, or that of a public model with what was changed of it."""
    base = model.get("base")
    known = json.loads((CONFIGS / f"{base}.json").read_text()) if base else {}
    merged = known | {key: value for key, value in model.items() if key != "base"}
    return {key: value for key, value in merged.items() if value is not None or not base}


def plan_row(model: dict[str, object], use: str, options: str, folder: Path) -> dict[str, object]:
    """What `shardctl plan --json` says."""
    path = folder / "config.json"
    path.write_text(json.dumps(read_config(model)))
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(["plan", str(path), "--for", use, *shlex.split(options), "--json"])
    if code not in {0, 3}:
        raise SystemExit(f"{options}: {err.getvalue()}{out.getvalue()}")
    return json.loads(out.getvalue())


def compare_rows(path: Path) -> list[MeasuredPeak]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for source in json.loads(path.read_text()):
            for row in source["rows"]:
                use = row.get("use", "serve" if "cache" in row else "train")
                said = plan_row(row["model"], use, f"{source['options']} {row['options']}", Path(folder))
                ranks = [r for r in said["ranks"] if row.get("stage") in {None, r["coordinate"]["pp"]}]
                for counter in COUNTERS:
                    if counter not in row:
                        continue
                    needs = [said["needs"][rank["needs"]] for rank in ranks]
                    if counter == "cache":
                        counted = count_cache_room(said, row.get("uncounted", []), row.get("within", []))
                    else:
                        most = max(needs, key=lambda one: one["counters"][counter]["total_bytes"])
                        counted = count_bytes(most, counter, source.get("context"))
                    sizes = [size / GIB + row.get("added", 0) for size in counted]
                    if "loss" in row:
                        sizes = add_to_loss(sizes, said["timeline"]["moments"], row["loss"])
                    others = row.get("others", {}) if counter == "allocated" else {}
                    profile = said["purpose"]["workload"].get("profile", "serving")
                    about = (profile, others, row.get("missing", ""), row.get("used", source["used"]))
                    found.append(MeasuredPeak(source["id"], row["name"], counter, row[counter], *sizes, *about))
    return found


def add_to_loss(sizes: list[float], moments: list[dict[str, object]], added: float) -> list[float]:
    """What a rank needs at most if its moment in the loss has so many GiB more, which may not be its largest."""
    loss = next(one["allocated_bytes"] for one in moments if one["name"] == "backward pass of the loss")
    more = max(0.0, loss / GIB + added - max(one["allocated_bytes"] for one in moments) / GIB)
    return [size + more for size in sizes]


def count_cache_room(said: dict[str, object], uncounted: list[str], within: list[str]) -> list[float]:
    """What the plan says that is left for caches, and at the least and at the most.

    `uncounted` and `within` are the names of terms that the run did not count in its part of the device, and of those
    that only it did.
    """
    room = said["purpose"]["room"]
    sizes = [room[key] for key in ("cache_bytes", "low_bytes", "high_bytes")]
    for term in said["needs"][0]["terms"]:
        amounts = [term[key] for key in ("term_bytes", "high_bytes", "low_bytes")]
        if term["name"] in uncounted:
            sizes = [size + amount for size, amount in zip(sizes, amounts, strict=True)]
        if term["name"] in within:
            sizes = [size - amount for size, amount in zip(sizes, amounts, strict=True)]
    return sizes


def count_bytes(needs: dict[str, object], counter: str, context: float | None) -> list[float]:
    """What a rank needs as a counter sees it, at the least and at the most.

    A CUDA context that the source measured, in GiB, replaces that of the plan.
    """
    seen = needs["counters"][counter]
    sizes = [seen[key] for key in ("total_bytes", "low_bytes", "high_bytes")]
    if context is None or counter != "device":
        return sizes
    planned = next(term for term in needs["terms"] if term["name"] == "CUDA context")
    return [
        size + context * GIB - planned[key]
        for size, key in zip(sizes, ("term_bytes", "low_bytes", "high_bytes"), strict=True)
    ]


def summarise(rows: list[MeasuredPeak]) -> list[str]:
    """Rows, mean and median absolute error, bias, the worst row, how many are inside, and how wide intervals are."""
    errors = [row.error for row in rows]
    worst = max(errors, key=abs)
    inside = sum(row.inside for row in rows)
    return [
        str(len(rows)),
        f"{sum(map(abs, errors)) / len(rows):.2%}",
        f"{median(map(abs, errors)):.2%}",
        f"{sum(errors) / len(rows):+.2%}",
        f"{worst:+.1%}",
        f"{inside} ({inside / len(rows):.0%})",
        f"{sum(row.width for row in rows) / len(rows):.0%}",
    ]


def count_used(rows: list[MeasuredPeak]) -> str:
    return f"{sum(row.used for row in rows)} of {len(rows)}"


def summarise_other(rows: list[MeasuredPeak], tool: str) -> str:
    errors = [abs(row.others[tool] / row.measured - 1) for row in rows if tool in row.others]
    return f"{sum(errors) / len(errors):.2%}, worst {max(errors):.1%} ({len(errors)} rows)" if errors else "-"


def format_table(rows: list[list[str]], right: int) -> list[str]:
    """A Markdown table, of which the columns from `right` on are numbers."""
    head, *body = rows
    rule = ["---" if n < right else "---:" for n in range(len(head))]
    return ["| " + " | ".join(line) + " |" for line in (head, rule, *body)]


def format_sources(group: list[MeasuredPeak], sources: list[dict[str, object]], head: list[str]) -> list[str]:
    table = [[*head, "runtime of", "used for tuning"]]
    for source in sources:
        for counter in COUNTERS:
            some = [row for row in group if (row.source, row.counter) == (source["id"], counter)]
            if some:
                table.append([source["id"], counter, *summarise(some), source["runtime"], count_used(some)])
    for name, used in (("used for tuning", {True}), ("not used for tuning", {False}), ("all", {True, False})):
        some = [row for row in group if row.used in used]
        if some:
            table.append([name, "", *summarise(some), "", count_used(some)])
    return format_table(table, 2)


def format_page(rows: list[MeasuredPeak]) -> str:
    sources = json.loads(ROWS.read_text())
    known = [row for row in rows if not row.missing]
    head = ["source", "counter", "rows", "MAPE", "median", "bias", "worst", "inside the interval", "mean width"]
    tables = [format_sources(group, sources, head) for group in (known, [row for row in rows if row.missing])]
    profiles = [["profile", "counter", *head[2:]]]
    for profile, counter in sorted({(row.profile, row.counter) for row in known}):
        some = [row for row in known if (row.profile, row.counter) == (profile, counter)]
        profiles.append([profile, counter, *summarise(some)])
    simumax = summarise_other(known, "SimuMax")
    lines = [
        INTRODUCTION,
        *tables[0],
        "",
        *format_table(profiles, 2),
        "",
        OTHERS.format(simumax=simumax),
        *tables[1],
        "",
        *format_held_out(),
        *format_known_errors(),
        "## Sources",
        "",
    ]
    lines += map(format_source, sources)
    for source in sources:
        lines += ["", f"## {source['id']}", ""]
        table = [
            [
                "run",
                "counter",
                "measured",
                "ours",
                "error",
                "interval",
                "width",
                "inside",
                "used",
                "other tools",
                "not known or not said",
            ]
        ]
        for row in rows:
            if row.source != source["id"]:
                continue
            others = ", ".join(
                f"{tool} {value:.2f} ({value / row.measured - 1:+.1%})" for tool, value in row.others.items()
            )
            interval = f"{row.low:.1f} to {row.high:.1f}"
            inside = "yes" if row.inside else "**no**"
            sizes = [f"{row.measured:.2f}", f"{row.ours:.2f}", f"{row.error:+.2%}"]
            used = "yes" if row.used else "no"
            measured = [row.name, row.counter, *sizes, interval, f"{row.width:.0%}", inside, used]
            table.append([*measured, others, row.missing])
        lines += format_table(table, len(table[0]))
    return "\n".join(lines) + "\n"


HELD_OUT_TEXT = """## Rows that were fixed before they were estimated

[estimates_held_out.json](estimates_held_out.json) was committed before any of its rows was planned. The first
estimates, without a change of the program, were off by 1.4 % on average and 5.2 % at worst, with 29 of 36 inside
their intervals; rows with tp were 3.3 % too high. They showed what vLLM counts outside of torch (0.25 GiB, and 2.1 GiB
with tp over NVLink), which is counted since: the rows with tp are no independent test of that, and the table is of
today's program. Of two models there are five rows each that differ in the length of a sequence alone.
"""
KNOWN_TEXT = """## Known errors, before and after

What public runs showed to be wrong, with the estimate before it was mended and that of today's program. Rows of
[estimates_known_errors.json](estimates_known_errors.json) were looked at while the program was changed.
"""


def format_source(one: dict[str, object]) -> str:
    about = f"{one['who']}. {one['source']}. {one['versions']}"
    return f"- **{one['id']}**: {about} (runtime of {one['runtime']}). Options: `{one['options']}`."


def format_held_out() -> list[str]:
    rows = compare_rows(HELD_OUT)
    known = [row for row in rows if not row.missing]
    head = ["run", "measured", "ours", "error", "interval", "width", "inside", "used", "not known"]
    table = [head]
    for row in rows:
        sizes = [f"{row.measured:.2f}", f"{row.ours:.2f}", f"{row.error:+.2%}", f"{row.low:.1f} to {row.high:.1f}"]
        marks = ["yes" if row.inside else "**no**", "yes" if row.used else "no"]
        table.append([row.name, *sizes, f"{row.width:.0%}", *marks, row.missing])
    total = ["rows", "MAPE", "median", "bias", "worst", "inside the interval", "mean width"]
    sources = map(format_source, json.loads(HELD_OUT.read_text()))
    return [
        HELD_OUT_TEXT,
        *format_table([total, summarise(known)], 0),
        "",
        *format_table(table, len(head)),
        "",
        *sources,
        "",
    ]


def format_known_errors() -> list[str]:
    table = [["error", "command", "what", "measured", "before", "now", "error before", "error now", "source"]]
    with tempfile.TemporaryDirectory() as folder:
        for row in json.loads(KNOWN_ERRORS.read_text()):
            said = plan_row(row["model"], row["use"], row["options"], Path(folder))
            now = find_value(said, row["what"])
            command = f"`plan config.json --for {row['use']} {row['options']}`"
            if isinstance(now, str):
                cells = [
                    row["measured"],
                    row["before"],
                    now,
                    "wrong",
                    "right" if now == row["measured"] else "**wrong**",
                ]
            else:
                errors = [f"{value / row['measured'] - 1:+.1%}" for value in (row["before"], now)]
                cells = [*(f"{value:.2f}" for value in (row["measured"], row["before"], now)), *errors]
            table.append([row["error"], command, row["what"], *cells, row["source"]])
    return [KNOWN_TEXT, *format_table(table, 9), ""]


def find_value(said: dict[str, object], what: str) -> float | str:
    """What a plan says of one rank, in GiB: terms of a category, the room for caches, a counter, or its verdict."""
    needs = said["needs"][0]
    if what == "verdict":
        return "fits" if needs["totals"]["device"]["total_bytes"] <= said["device"]["usable_bytes"] else "does not fit"
    if what == "room":
        return said["purpose"]["room"]["cache_bytes"] / GIB
    if what == "allocated on the last stage":
        last = said["needs"][said["ranks"][-1]["needs"]]
        return last["counters"]["allocated"]["total_bytes"] / GIB
    if what in COUNTERS:
        return max(one["counters"][what]["total_bytes"] for one in said["needs"]) / GIB
    return sum(term["term_bytes"] for term in needs["terms"] if term["category"] == what) / GIB


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    page = format_page(compare_rows(ROWS))
    if parser.parse_args().write:
        PAGE.write_text(page)
    print(page, end="")


if __name__ == "__main__":
    main()
