"""Compares a search with the meshes that others trained and served on, and writes the page known_meshes.md.

python docs/benchmarks/known_meshes.py           # prints the tables
python docs/benchmarks/known_meshes.py --write   # writes the page, too
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from estimates import plan_row

from shardctl.estimate.search.mesh_comparison import SERVING_SPARE_SHARE
from shardctl.hardware.devices import get_device
from shardctl.tensors.mesh import Mesh

HERE = Path(__file__).parent
ROWS, PAGE = HERE / "known_meshes.json", HERE / "known_meshes.md"
TP_DEGREES = (1, 2, 4, 8)
INTRODUCTION = """\
# How a search ranks meshes that others used

`python docs/benchmarks/known_meshes.py --write` writes this page. For nine published training runs it asks
`shardctl plan --search` for all meshes of as many devices and of the same step, and looks up where the published mesh
is. Then it plans that mesh with the published settings and compares the time of a step with what was measured. Models,
options and sources of every row are in [known_meshes.json](known_meshes.json). No constant is fitted to these rows. A
test compares two of them with the program.

A rank counts the meshes whose upper bound fits before those that may not fit, so a fast mesh that is tight comes late.
Its time over the best one's says more: 1.10 is a mesh that the model takes for 10 % slower than the best, each with the
settings that the search chose. Modelled times of the published settings are in the last columns.
"""
READING = """\
## What the rows say

- Dense models: three of four times are within 6 % of the measured one. Nemotron-4's is 24 % too high: NeMo hides the
  exchange between tp ranks (11 % of the modelled step) behind computation, and gradients and parameters with it, which
  no option says here. What that run recomputes is not published; without recomputation the plan says that it does not
  fit by 3 GiB.
- Llama-3 405B: the published mesh needs 1.1 GiB more than there are, without recomputation and with ZeRO-2, as it ran;
  the measured run fits inside the interval of 69 to 104 GiB. Because of that interval the search prefers to recompute.
- Mixtures: a step of Qwen3-235B without overlapped all-to-alls is modelled at 18.0 s, where 19.7 s were measured. With
  them, 11.4 s are modelled and 17.6 s were measured: the plan hides all of the exchange, and the run gained 2.1 s of
  the 6.5 s that it is modelled to take. Kernels that exchange tokens take processors from those that compute. One pair
  of runs says nothing general, so nothing is fitted to it; the search overrates `--overlap-all-to-all`.
- DeepSeek-V3: the published mesh comes late because its upper bound of 89 GiB does not fit, and meshes that keep the
  exchange of tokens within two nodes do. With its published settings it takes 9.2 s, 1.14 times the best one's. It
  showed that routing limited to groups of experts (four of eight, so at most four nodes) sends less than free routing;
  with that the modelled time fell from 10.7 s, so this row is no independent test of it.
- gpt-oss-120b: with the loss of FSDP2's profile, logits of 201,088 words in fp32 are 12 GiB that the run may not have
  had (its loss keeps bf16), and its attention was compiled (FlexAttention), so the plan says that it does not fit.

Sources, and what is not known of each run:
"""
SERVERS = """\
## Servers

For each published recipe of vLLM, the fewest devices that leave 5 % of the memory free: for tp alone, which is how the
recipes divide a model, and for any mesh. Numbers of devices that are no power of two need pipeline stages. Llama-70B in
FP8 leaves 1.5 % free on one H100 with 512 sequences at once, so two are recommended, where the recipe has one.
"""


@dataclass(frozen=True)
class KnownMesh:
    """A published training run next to what the search and the plan of its mesh say."""

    name: str
    devices: str
    mesh: str
    rank: int | None
    """Of the published mesh among those that the search ranks; None if it does not fit there."""
    ranked: int
    ratio: float | None
    """The published mesh's modelled time over the best mesh's, each with the settings that the search chose."""
    best: str
    measured: float
    """Seconds of a step."""
    ours: float
    """The same of the published mesh with the published settings, as modelled."""
    needed: float
    """GiB of the fullest device with these settings."""
    room: float


@dataclass(frozen=True)
class KnownServer:
    """A published recipe next to the fewest devices that the search recommends."""

    name: str
    device: str
    published: int
    ours: int | None
    """The fewest devices that leave 5 % free, by any mesh; None if the search found none."""
    by_tp: int | None
    """The same for tp alone, as recipes divide a model."""
    mesh: str
    needed: float
    """GiB of the fullest of these devices."""
    source: str


def compare_training(row: dict, folder: Path) -> KnownMesh:
    """Compare one run: where its mesh is in the ranking, and how long a step takes."""
    asked = f"--gpu {row['gpu']} {row['options']}"
    found = plan_row(row["model"], "train", f"{asked} --gpus {row['devices']} --search", folder)["search"]
    plan = plan_row(row["model"], "train", f"{asked} --mesh {row['mesh']} {row['run']}", folder)
    cost = plan["cost"]
    tokens = cost["tokens"]
    if "seconds" in row:
        measured = row["seconds"]
    elif "tokens" in row:
        measured = tokens / row["tokens"] / row["devices"]
    else:
        measured = cost["seconds"] * cost["model_flops_utilization"] * get_device(row["gpu"]).flops_bf16 / 1e12
        measured /= row["tflops"]
    published = Mesh.of(**{axis: int(n) for axis, n in (one.split("=") for one in row["mesh"].split(","))})
    ranked = found["ranked"]
    places = {describe_mesh(one["mesh"]): number for number, one in enumerate(ranked, 1)}
    rank = places.get(str(published))
    best = ranked[0]
    ratio = ranked[rank - 1]["cost"]["seconds"] / best["cost"]["seconds"] if rank else None
    chosen = " ".join(filter(None, (describe_mesh(best["mesh"]), best["settings"])))
    verdict = plan["verdict"]
    return KnownMesh(
        row["name"],
        f"{row['devices']:,} {cost['device']}",
        f"{published} {row['run']}",
        rank,
        len(ranked),
        ratio,
        f"{chosen}: {best['cost']['seconds']:.2f} s",
        measured,
        cost["seconds"],
        verdict["total_bytes"] / 2**30,
        verdict["budget_bytes"] / 2**30,
    )


def describe_mesh(mesh: dict) -> str:
    """Describe a mesh of a JSON document as plans do."""
    return str(Mesh.of(**mesh["axes"]))


def compare_serving(row: dict, folder: Path) -> KnownServer:
    """Compare one recipe: the fewest devices that the search recommends for vLLM."""
    plan = plan_row(row["model"], "vllm", f"--gpu {row['gpu']} {row['options']} --search", folder)
    fewest = plan["search"]["fewest"]
    device = plan["device"]["name"]
    by_tp = next((tp for tp in TP_DEGREES if fits_tp(row, tp, folder)), None)
    if fewest is None:
        return KnownServer(row["name"], device, row["devices"], None, by_tp, "", 0.0, row["source"])
    needed = fewest["peak_bytes"] / 2**30
    mesh = describe_mesh(fewest["mesh"])
    ours = fewest["mesh"]["ranks"]
    return KnownServer(row["name"], device, row["devices"], ours, by_tp, mesh, needed, row["source"])


def fits_tp(row: dict, tp: int, folder: Path) -> bool:
    """Return whether a model fits so many tp ranks with 5 % to spare."""
    verdict = plan_row(row["model"], "vllm", f"--gpu {row['gpu']} {row['options']} --tp {tp}", folder)["verdict"]
    return verdict["total_bytes"] <= (1 - SERVING_SPARE_SHARE) * verdict["budget_bytes"]


def format_training(rows: list[KnownMesh]) -> list[str]:
    """Format the table of training."""
    columns = ("model", "devices", "published mesh", "rank", "its time over the best", "the best", "measured")
    lines = [
        f"| {' | '.join((*columns, 'modelled', 'ratio', 'needs'))} |",
        "| --- | --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for one in rows:
        place = f"{one.rank} of {one.ranked}" if one.rank else f"not among {one.ranked}"
        over = f"{one.ratio:.2f}" if one.ratio else "-"
        fits = "" if one.needed <= one.room else ", too much"
        lines.append(
            f"| {one.name} | {one.devices} | {one.mesh} | {place} | {over} | {one.best} | {one.measured:.2f} s "
            f"| {one.ours:.2f} s | {one.ours / one.measured:.2f} | {one.needed:.1f} of {one.room:.1f} GiB{fits} |"
        )
    return lines


def format_serving(rows: list[KnownServer]) -> list[str]:
    """Format the table of serving."""
    lines = ["| model | device | recipe | with tp alone | by any mesh | which | needs | source |"]
    lines.append("| --- | --- | ---: | ---: | ---: | --- | ---: | --- |")
    lines += [
        f"| {one.name} | {one.device} | {one.published} | {one.by_tp or 'none'} | {one.ours or 'none'} "
        f"| {one.mesh or '-'} "
        f"| {one.needed:.1f} GiB | {one.source} |"
        for one in rows
    ]
    return lines


def format_page(known: dict, training: list[KnownMesh], servers: list[KnownServer]) -> str:
    """Format the page."""
    sources = [
        f"- {row['name']}: {row['source']}" + (f". Not known: {row['unknown']}" if row["unknown"] else "")
        for row in known["training"]
    ]
    parts = [INTRODUCTION, *format_training(training), "", READING, *sources, "", SERVERS, *format_serving(servers), ""]
    return "\n".join(parts)


def main(arguments: list[str]) -> None:
    """Print the tables, and write the page if that is asked."""
    known = json.loads(ROWS.read_text())
    with tempfile.TemporaryDirectory() as folder:
        training = [compare_training(row, Path(folder)) for row in known["training"]]
        servers = [compare_serving(row, Path(folder)) for row in known["serving"]]
    print("\n".join([*format_training(training), *format_serving(servers)]))
    if "--write" in arguments:
        PAGE.write_text(format_page(known, training, servers))


if __name__ == "__main__":
    main(sys.argv[1:])
