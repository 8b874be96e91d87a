"""Writes the tables and pictures of `speed.md`, and `versions.md`, from the figures in `speed.json`.

A table stands in `speed.md` between two comments; what is written by hand around it stays.
"""

import itertools
import re
import statistics
from pathlib import Path

from speed_pictures import draw_bars, draw_curve

FOLDER = Path(__file__).parent
PICTURES = FOLDER.parent / "pictures"
RESULTS = FOLDER / "speed.json"
PLACE = re.compile(r"(<!-- run_all\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MIB = 2**20
_LITTLE = 0.1
"""GB up to which a run is start-up rather than moving bytes."""
INTRODUCTION = """
`python docs/benchmarks/run_all.py` keeps the figures of each state of the program in `speed.json`. Each table compares
a state with the one measured before it. If both were measured in one run, in turn (they have the same time), the ratio
is that of the programs; else it is also that of what the machine did beside them.
""".strip()


class CaseFigures:
    """The medians of the runs of one case."""

    def __init__(self, rows):
        self.rows = rows
        self.why = next((row["why"] for row in rows if "why" in row), "")

    def median(self, compute):
        """Median of what is computed of each run."""
        return statistics.median(compute(row) for row in self.rows)

    @property
    def wall(self):
        """Seconds."""
        return self.median(lambda row: row["wall"])

    @property
    def processor(self):
        """Processor seconds of the program and of the kernel for it."""
        return self.median(lambda row: row["user"] + row["system"])

    @property
    def gigabytes(self):
        """Of 10^9 bytes."""
        return self.rows[0].get("nbytes", 0) / 1e9

    @property
    def peak(self):
        """Largest anonymous memory of all runs, in MiB."""
        return max(row["peak"] for row in self.rows) / MIB


def gather_cases(entry, group):
    """The cases of a group by name, in their order."""
    cases = {}
    for row in entry["rows"]:
        if row["group"] == group:
            cases.setdefault((row["case"], row.get("tensors", 0)), []).append(row)
    return {key: CaseFigures(rows) for key, rows in cases.items()}


def list_left_out(cases):
    """Lines that name what was not measured, and why."""
    return [f"\nNot measured: {case or 'this table'}: {found.why}" for (case, _), found in cases.items() if found.why]


def write_machine(entry):
    """What was measured, when, where."""
    machine, runs = entry["machine"], "sizes of --quick" if entry["quick"] else "full sizes"
    return (
        f"shardctl {entry['version']} at {entry['commit']} ({entry['committed']}), "
        f"measured {entry['measured']}, {runs}; "
        f"{machine['processor']}, {machine['memory']}, {machine['file_system']}, Linux {machine['kernel']}, "
        f"Python {machine['python']}, NumPy {machine['numpy']}; load average {machine['load']} before it began"
    )


def write_conversions(entry, group):
    """Conversions, with the disk's own time just before each."""
    cases = gather_cases(entry, group)
    lines = [
        "| | GB | seconds | direct write | ratio | processor seconds a GB | user, system | peak memory |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (case, _), found in cases.items():
        if found.why:
            continue
        size = found.gigabytes
        user, system = (found.median(lambda row, n=name: row[n]) / size for name in ("user", "system"))
        disk = ratio = ""
        if "disk" in found.rows[0]:
            disk = f"{found.median(lambda row: row['disk']):.2f}"
            ratio = f"{found.median(lambda row: row['wall'] / row['disk']):.2f}"
        lines.append(
            f"| {case} | {size:.2f} | {found.wall:.2f} | {disk} | {ratio} | {found.processor / size:.2f} "
            f"| {user:.2f}, {system:.2f} | {found.peak:,.0f} MiB |"
        )
    return "\n".join([*lines, *list_left_out(cases)])


def write_checking(entry):
    """GB/s of a core by type."""
    cases = gather_cases(entry, "checking")
    kernel = gather_cases(entry, "kernel")
    verbs = list(dict.fromkeys(case.rpartition(", ")[0] for (case, _), found in cases.items() if not found.why))
    kinds = list(dict.fromkeys(case for case, _ in kernel))
    start = {verb: cases.get((f"{verb}, start-up", 0)) for verb in verbs}
    lines = [
        f"| GB/s of a core | the sums alone | {' | '.join(f'{verb} | start-up left out' for verb in verbs)} |",
        f"|---|--:|{'--:|--:|' * len(verbs)}",
    ]
    for kind in kinds:
        alone = kernel[kind, 0]
        cells = [f"{alone.gigabytes / alone.processor:.2f}"]
        for verb in verbs:
            found = cases.get((f"{verb}, {kind}", 0))
            if found is None or found.why:
                cells += ["", ""]
                continue
            base = start[verb]
            rest = (found.gigabytes - base.gigabytes) / (found.processor - base.processor)
            cells += [f"{found.gigabytes / found.processor:.2f}", f"{rest:.2f}"]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join([*lines, *list_left_out(cases)])


def write_growth(entry):
    """The curve and its points."""
    points = [(found.gigabytes, found) for found in gather_cases(entry, "growth").values() if not found.why]
    if points:
        draw_curve(
            PICTURES / "speed-growth.svg",
            "seconds a GB, by size of the checkpoint",
            {
                "reshard --tp 4": [(size, found.wall / size) for size, found in points],
                "direct write": [(size, found.median(lambda row: row["disk"]) / size) for size, found in points],
                "processor seconds": [(size, found.processor / size) for size, found in points],
            },
            " GB",
        )
    return write_conversions(entry, "growth")


def write_many(entry):
    """What a tensor costs."""
    cases = gather_cases(entry, "many")
    lines = ["| tensors | verb | processor seconds | microseconds a tensor | peak memory |", "|--:|---|--:|--:|--:|"]
    curves = {}
    for (case, tensors), found in cases.items():
        if found.why:
            continue
        each = found.processor / tensors * 1e6
        curves.setdefault(case, []).append((tensors, each))
        lines.append(f"| {tensors:,} | `{case}` | {found.processor:.2f} | {each:.0f} | {found.peak:,.0f} MiB |")
    if curves:
        draw_curve(PICTURES / "speed-tensors.svg", "microseconds a tensor, by number of tensors", curves, "")
    return "\n".join([*lines, *list_left_out(cases)])


def write_effort(entry):
    """Starting and planning."""
    cases = gather_cases(entry, "effort")
    lines = ["| | processor seconds | peak anonymous memory |", "|---|--:|--:|"]
    lines += [
        f"| {case} | {found.processor:.2f} | {found.peak:,.0f} MiB |"
        for (case, _), found in cases.items()
        if not found.why
    ]
    return "\n".join([*lines, *list_left_out(cases)])


def write_loading(entry):
    """`shardctl.load` beside others."""
    cases = gather_cases(entry, "loading")
    lines = [
        "| | seconds | GB/s | ratio to `load_file` | processor seconds | anonymous memory |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    usual = next((found.wall for (case, _), found in cases.items() if "`load_file`" in case), None)
    lines += [
        f"| {case} | {found.wall:.2f} | {found.gigabytes / found.wall:.2f} | {found.wall / usual:.2f} "
        f"| {found.processor:.2f} | {found.peak:,.0f} MiB |"
        for (case, _), found in cases.items()
        if not found.why
    ]
    return "\n".join([*lines, *list_left_out(cases)])


def write_timeline(entry):
    """The tables of `timeline.py`."""
    found = gather_cases(entry, "timeline").values()
    return "\n\n".join(row["text"].strip() if "text" in row else row["why"] for each in found for row in each.rows)


def write_reshard(entry):
    """The table of conversions, and bars of their ratios to the disk."""
    bars = [
        (case, found.median(lambda row: row["wall"] / row["disk"]))
        for group in ("reshard", "sources")
        for (case, _), found in gather_cases(entry, group).items()
        if not found.why and "disk" in found.rows[0]
    ]
    if bars:
        title = "seconds of a conversion / seconds of a direct write of the same bytes"
        draw_bars(PICTURES / "speed-reshard.svg", title, bars, 1.15)
    return write_conversions(entry, "reshard")


SECTIONS = {
    "machine": write_machine,
    "reshard": write_reshard,
    "sources": lambda entry: write_conversions(entry, "sources"),
    "growth": write_growth,
    "checking": write_checking,
    "timeline": write_timeline,
    "loading": write_loading,
    "effort": write_effort,
    "many": write_many,
}


def write_versions(entries):
    """The page that compares each state with the one before it: figures of both, and the ratio."""
    parts = [
        "# Speed of each state\n",
        INTRODUCTION,
    ]
    for before, now in reversed(list(itertools.pairwise(entries))):
        lines = []
        groups = dict.fromkeys(row["group"] for row in now["rows"] if row["group"] != "kernel")
        for group in groups:
            old, new = gather_cases(before, group), gather_cases(now, group)
            for key, found in new.items():
                if key not in old or found.why or old[key].why or "user" not in found.rows[0]:
                    continue
                name = f"{key[0]}{f', {key[1]:,} tensors' if key[1] else ''}"
                sizes = [found.gigabytes if found.gigabytes > _LITTLE else 1 for found in (old[key], found)]
                then, this = (each.processor / size for each, size in zip((old[key], found), sizes, strict=True))
                cells = [f"{then:.2f}", f"{this:.2f}", f"{this / then:.2f}"]
                for each in (old[key], found):
                    disk = "disk" in each.rows[0]
                    cells.append(f"{each.median(lambda row: row['wall'] / row['disk']):.2f}" if disk else "")
                lines.append(f"| {group} | {name} | {' | '.join(cells)} |")
        if lines:
            parts += [
                f"\n## {now['version']} at {now['commit']} beside {before['commit']}\n",
                f"{write_machine(now)}.\n\nBefore: {write_machine(before)}.\n",
                "Processor seconds are those of a GB where bytes are moved, else of the run.\n",
                "| group | case | processor seconds before | now | ratio | beside the disk before | now |",
                "|---|---|--:|--:|--:|--:|--:|",
                *lines,
            ]
    return "\n".join(parts) + "\n"


def write_section(name, entries):
    """The tables of the last state that has figures of a group; another state than the last is named."""
    groups = {"machine": entries[-1]["rows"][0]["group"]}
    group = groups.get(name, name)
    entry = next((each for each in reversed(entries) if group in each["times"]), None)
    if entry is None:
        return "Not measured."
    text = SECTIONS[name](entry)
    measured = entry["times"][group]
    if name == "machine" or (entry is entries[-1] and measured == entry["measured"]):
        return text
    return f"{text}\n\nThese figures are of {entry['commit']}, {measured}."


def write_pages(entries):
    """Put the tables of the last entry into `speed.md`, and all entries into `versions.md`."""
    page = FOLDER / "speed.md"
    sections = {name: write_section(name, entries) for name in SECTIONS}
    page.write_text(PLACE.sub(lambda found: f"{found[1]}\n{sections[found[2]]}\n\n{found[3]}", page.read_text()))
    (FOLDER / "versions.md").write_text(write_versions(entries))
