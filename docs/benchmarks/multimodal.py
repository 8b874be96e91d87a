"""Tries every multimodal class of transformers, and prints what of each works: see multimodal.md.

    python docs/benchmarks/multimodal.py [--results FILE] [--only CLASS ...] [--share I N]

A class is multimodal if its config has others inside or it takes more than texts. Each is made from its own config with
small sizes (`small_classes.py`), saved by transformers, cut for tp=2, pp=2 and fsdp=2, brought back and compared by
digest, and run beside its source part by part. Then it is inspected, planned, from its files and from its config alone,
and split into the half that reads and the half that sees. FILE keeps the results, from which the next run goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import shutil
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from derived import EQUAL
from small_classes import list_generative_classes, save_tiny_model

from shardctl.api import Mesh, PlanOptions, ReshardOptions, ShardctlError, VerifyOptions, inspect, plan, reshard, verify
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.options.plan_options import find_device
from shardctl.verbs.digest import digest

TP = Mesh.of(tp=2)
MESHES = {"tp2": TP, "pp2": Mesh.of(pp=2), "fsdp2": Mesh.of(fsdp=2)}
YES = "yes"
CLOSE = 1e-5
"""How far, relative to their norm, logits may be that two forms of the same sums give."""
KNOWN = {"tp2": "tp2 and back", "forward": "tp2 forward"}
"""Columns that another page has under another name."""
COLUMNS = ("rules", "hf", *MESHES, "forward", "inspect", "plan", "config alone", "only text", "only vision")


def list_multimodal_classes():
    """List the names of the generative classes that have other configs inside or take more than texts."""
    for name in list_generative_classes():
        kind = getattr(transformers, name)
        if getattr(kind.config_class, "sub_configs", None) or kind.input_modalities not in ("text", ("text",)):
            yield name


def try_class(architecture: str, folder: Path, known: dict[str, str] | None = None) -> dict[str, str]:
    """Try one class; returns what came of it by column, or why it is not small.

    `known` is what `derived.try_class` found of the same class in the same folder; its source and ranks are not made
    again.
    """
    source = folder / "source"
    if known is not None and "not built" in known:
        return known
    try:
        if known is None:
            save_tiny_model(architecture, source)
    except Exception as error:  # noqa: BLE001 - whatever a class raises that these sizes do not suit
        return {"not built": shorten(f"{type(error).__name__}: {error}")}
    found = {"rules": attempt(lambda: describe_rules(source)), "hf": attempt(lambda: try_hf(source, folder / "hf"))}
    if known is not None and "tp2 forward" in known:
        found |= {new: YES if known[old] == EQUAL else known[old] for new, old in KNOWN.items() if known[old]}
    for label, mesh in MESHES.items():
        if label not in found:
            found[label] = attempt(lambda mesh=mesh, label=label: try_mesh(source, folder / label, mesh))
    if found["tp2"] == YES and "forward" not in found:
        found["forward"] = attempt(lambda: try_forward(source, folder / "tp2"))
    found["inspect"] = attempt(lambda: YES if inspect(source) else "nothing")
    found["plan"] = attempt(lambda: try_plan(source))
    (folder / "config").mkdir()
    shutil.copy(source / "config.json", folder / "config")
    found["config alone"] = attempt(lambda: try_plan(folder / "config"))
    for half in ("text", "vision"):
        found[f"only {half}"] = attempt(lambda half=half: try_half(source, folder / half, half))
    return found


def attempt(function) -> str:
    """Return what a function says, or why it did not."""
    try:
        return function()
    except ShardctlError as error:
        return f"refused: {shorten(error.message)}"
    except Exception as error:  # noqa: BLE001 - a fault of ours, and a finding
        return f"FAILED: {shorten(f'{type(error).__name__}: {error}')}"


def describe_rules(source: Path) -> str:
    """Say by which rules tp cuts, and what share of the elements."""
    with open_checkpoint(source) as checkpoint:
        model = checkpoint.find_placement(TP)
        if model is None:
            return "none"
        tensors = model.tensors.values()
        cut = sum(math.prod(t.shape) for t in tensors if not {"tp", "etp"}.isdisjoint(t.spec.axes))
        kind = "derived" if model.derivation else "table" if model.family else "text half"
        return f"{kind}, {cut / max(1, sum(math.prod(t.shape) for t in tensors)):.0%} cut"


def try_hf(source: Path, folder: Path) -> str:
    """Write the files again."""
    reshard(source, folder, ReshardOptions(to="hf"))
    return YES if digest(source).digest == digest(folder).digest else "another digest"


def try_mesh(source: Path, ranks: Path, mesh: Mesh) -> str:
    """Cut a model for a mesh and bring it back."""
    done = reshard(source, ranks, ReshardOptions(mesh=mesh))
    back = ranks.with_name(f"{ranks.name}-back")
    reshard(ranks, back, ReshardOptions(to="hf"))
    same = len({digest(source).digest, done.record.digest, digest(back).digest}) == 1
    return YES if same else "another digest"


def try_forward(source: Path, ranks: Path) -> str:
    """Run what the ranks hold beside the source."""
    result = verify(ranks, VerifyOptions(against=source, forward=True))
    level = next(each for each in result.levels if each.name == "forward")
    if level.status == "passed":
        return YES
    return f"{level.status}: {shorten(level.errors[0].message if level.errors else level.reason)}"


def try_plan(place: Path) -> str:
    """Plan serving, and say whether the cache of the text model is counted."""
    found = plan(place, ReshardOptions(mesh=TP), plan_options=PlanOptions(device=find_device("h200")))
    return f"weights only: {shorten(found.forecast.unmodelled)}" if found.forecast.unmodelled else YES


def try_half(source: Path, folder: Path, half: str) -> str:
    """Split a half off and load it with the class that its config names, where there is one."""
    reshard(source, folder, ReshardOptions(to="hf", only=half))
    config = json.loads((folder / "config.json").read_text())
    said = "transformers has no class for it"
    for kind in list_classes(config):
        try:
            model, info = kind.from_pretrained(folder, output_loading_info=True)
        except Exception as error:  # noqa: BLE001 - not every half is a model by itself
            said = shorten(f"{type(error).__name__}: {error}")
            continue
        wrong = [f"{key} {sorted(map(str, info[key]))[:2]}" for key in info if key != "error_msgs" and info[key]]
        if wrong:
            said = f"loads with {', '.join(wrong)}"
            continue
        return YES if half != "text" else compare_with_whole(source, model)
    return f"written, not loaded: {said}"


def list_classes(config):
    """List the classes that may load a half: the one that its config names, else those of its `model_type`."""
    if config.get("architectures"):
        named = getattr(transformers, config["architectures"][0], None)
        return [named] if named else []
    waiting, found = [transformers.PreTrainedModel], []
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if (
            getattr(kind.config_class, "model_type", "") == config.get("model_type")
            and "PreTrained" not in kind.__name__
        ):
            found.append(kind)
    return sorted(dict.fromkeys(found), key=lambda kind: len(kind.__name__))


def compare_with_whole(source, alone) -> str:
    """Say whether a text model alone computes of tokens what it does inside the model that transformers saved.

    Inside, positions may begin at one, which a rotary embedding turns into rounding (PaliGemma), and some wrappers do
    not scale the logits as the class alone does.
    """
    name = json.loads((source / "config.json").read_text())["architectures"][0]
    tokens = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = getattr(transformers, name).from_pretrained(source)
        try:
            inside = whole(input_ids=tokens).logits
        except TypeError:  # it wants pictures
            inside = whole.language_model(input_ids=tokens).logits
        mine = alone(input_ids=tokens).logits
    if (mine - inside).norm() <= CLOSE * inside.norm():
        return YES
    times = float((mine / inside).median())
    scaled = (mine - times * inside).norm() <= CLOSE * mine.norm()
    return f"{YES}, with logits {times:.4g} times those inside" if scaled else "computes something else"


def shorten(text: str) -> str:
    """Return the first line, fit for a cell of a table."""
    return re.sub(r"/\S*/tmp\w+(/\w+)?", "FOLDER", (text.strip().splitlines() or [""])[0])[:170].replace("|", "/")


def format_page(results: dict[str, dict[str, str]]) -> str:
    """Format what was found, with counts in front."""
    built = {name: one for name, one in results.items() if "not built" not in one}
    kinds = Counter(one["rules"].partition(",")[0] for one in built.values())
    lines = [
        f"{len(results)} classes, of which {len(built)} were made small. tp cuts "
        + ", ".join(f"{count} by {kind}" for kind, count in kinds.most_common())
        + ".",
        "",
        "| | works |",
        "|---|---:|",
        *(
            f"| {column} | {sum(one.get(column, '').startswith(YES) for one in built.values())} |"
            for column in COLUMNS[1:]
        ),
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
    mine = list(list_multimodal_classes())[number::count]
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
