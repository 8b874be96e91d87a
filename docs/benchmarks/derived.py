"""Cuts every generative class of transformers that can be made small, proves the cuts, and brings the model back.

    python docs/benchmarks/derived.py [--results FILE] [--only CLASS ...]

Each class is made from its own config with small sizes (`small_classes.py`), saved by transformers, cut for tp=2 (and
for ep=2 where something is cut by experts) by its table or by derived rules, brought back, compared by digest, and run
beside its source part by part, each rank by itself as well. The table says what came of each. FILE keeps the results,
from which the next run goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import transformers
from small_classes import list_generative_classes, save_tiny_model

from shardctl.api import Mesh, ReshardOptions, ShardctlError, VerifyOptions, reshard, verify
from shardctl.base.errors import UnsupportedError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.verbs.digest import digest

TP, EP = Mesh.of(tp=2), Mesh.of(dp=2, ep=2)
EQUAL = "equal"
COLUMNS = ("rules", "tp2 and back", "tp2 forward", "ep2 and back", "ep2 forward")


def try_class(architecture: str, folder: Path) -> dict[str, str]:
    """Try one class; returns what came of it by column, or why it is not small."""
    source = folder / "source"
    try:
        save_tiny_model(architecture, source)
    except Exception as error:  # noqa: BLE001 - whatever a class raises that these sizes do not suit
        return {"not built": shorten(f"{type(error).__name__}: {error}")}
    found = {"rules": "none"}
    try:
        with open_checkpoint(source) as checkpoint:
            model = checkpoint.find_placement(TP) or checkpoint.find_placement(EP)
    except ShardctlError as error:
        return {"rules": "table", "tp2 and back": f"refused: {shorten(error.message)}"}
    if model is None:
        return found | {"tp2 and back": "refused: nothing of a layer is recognised as what can be cut"}
    found["rules"] = "table" if model.derivation is None else "derived"
    if model.derivation is not None and model.derivation.uncut:
        found["rules"] += f", {len(model.derivation.uncut)} kinds whole"
    experts = any("ep" in t.spec.axes or t.spec.member is not None for t in model.tensors.values())
    for label, mesh in (("tp2", TP), *((("ep2", EP),) if experts else ())):
        found[f"{label} and back"], found[f"{label} forward"] = try_mesh(source, folder / label, mesh)
    return found


def try_mesh(source: Path, ranks: Path, mesh: Mesh) -> tuple[str, str]:
    """Cut a model for a mesh, bring it back, and run it; return what came of the way back and of running it."""
    try:
        done = reshard(source, ranks, ReshardOptions(mesh=mesh))
        back = ranks.with_name(f"{ranks.name}-back")
        reshard(ranks, back, ReshardOptions(to="hf"))
        same = len({digest(source).digest, done.record.digest, digest(back).digest}) == 1
        result = verify(ranks, VerifyOptions(against=source, forward=True))
    except UnsupportedError as error:
        return f"refused: {shorten(error.message)}", ""
    except ShardctlError as error:
        return f"failed: {shorten(error.message)}", ""
    except Exception as error:  # noqa: BLE001 - a fault of ours, and a finding
        return f"failed: {shorten(f'{type(error).__name__}: {error}')}", ""
    level = next(each for each in result.levels if each.name == "forward")
    if level.status == "passed":
        return EQUAL if same else "another digest", EQUAL
    why = level.errors[0].message if level.errors else level.reason
    return EQUAL if same else "another digest", f"{level.status}: {shorten(why)}"


def shorten(text: str) -> str:
    """Return the first line, fit for a cell of a table."""
    return (text.strip().splitlines() or [""])[0][:150].replace("|", "/")


def format_page(results: dict[str, dict[str, str]]) -> str:
    """Format what was found, with counts in front."""
    built = {name: one for name, one in results.items() if "not built" not in one}
    proved = [
        one for one in built.values() if all(one.get(c, EQUAL) == EQUAL for c in COLUMNS[1:]) and "tp2 forward" in one
    ]
    kinds = Counter("table" if one["rules"] == "table" else "derived" for one in proved)
    counts = (
        f"{len(results)} classes: {len(built)} made small; of these {len(proved)} come back bit for bit from every "
        f"mesh and compute the same on it ({kinds['table']} by a table, {kinds['derived']} by derived rules)."
    )
    lines = [
        counts,
        "",
        f"| class | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    lines += [f"| `{name}` | {' | '.join(one.get(c, '') for c in COLUMNS)} |" for name, one in sorted(built.items())]
    lines += ["", "Not made small:", ""]
    lines += [f"- `{name}`: {one['not built']}" for name, one in sorted(results.items()) if "not built" in one]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--share", type=int, nargs=2, metavar=("I", "N"), default=(0, 1), help="do every Nth class")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    results = {}
    if asked.results and asked.results.exists():
        results = dict(map(json.loads, asked.results.read_text().splitlines()))
    number, count = asked.share
    mine = list(list_generative_classes())[number::count]
    for name in asked.only or [name for name in mine if name not in results]:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = try_class(name, Path(folder))
        if asked.results:
            with asked.results.open("a") as file:
                file.write(json.dumps([name, results[name]]) + "\n")
        if asked.only:
            print(json.dumps({name: results[name]}, indent=1), flush=True)
    if not asked.only:
        print(format_page(results), end="")


if __name__ == "__main__":
    main()
