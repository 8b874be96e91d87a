"""Plans every generative class of the installed transformers: python docs/benchmarks/any_model.py WORKDIR.

Each class that builds from its default config, with four layers and on the meta device, becomes the headers of a
checkpoint under the names that `save_pretrained` would write; its file is a hole. Then it is planned for one device and
for meshes. The page has what share works, by which rules tp cuts, and every failure with its reason. WORKDIR keeps the
headers and results.jsonl, from which the next run goes on; `--again` plans the headers again, `--only NAME ...` does
some classes and prints what was said of them. A class takes 0.2 s of processor time, and no space on disk.
"""

import argparse
import gc
import json
import logging
import math
import re
import textwrap
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from shardctl.api import Mesh, ReshardOptions, ShardctlError, plan
from shardctl.base.dtype import BY_TORCH
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.models import load_rules
from shardctl.models.derived import format_rule_file

LAYERS = 4
COUNTS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"} | {
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
}
"""The keys of configs that count layers."""
TP = Mesh.of(tp=2)
CUT = "--tp 2"
CASES = {
    "--to hf": ReshardOptions(to="hf"),
    "--fsdp 2": ReshardOptions(mesh=Mesh.of(fsdp=2)),
    "--pp 2": ReshardOptions(mesh=Mesh.of(pp=2)),
    CUT: ReshardOptions(mesh=TP),
}
REASONS = {r"the architecture \w+ is not known": "nothing of a layer is recognised as what can be cut"}
"""What reasons of many classes have in common, by a pattern."""


def list_generative_classes():
    """List the names of the classes that can generate, bases left out."""
    for name in sorted(dir(transformers)):
        kind = getattr(transformers, name, None) if not name.endswith("PreTrainedModel") else None
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and kind.can_generate():
            yield name


def shorten_config(config):
    """Leave `LAYERS` layers in a config and in those inside, and as many entries in lists of one for each layer."""
    counts = {key: value for key, value in vars(config).items() if key in COUNTS and isinstance(value, int)}
    for key, value in list(vars(config).items()):
        if counts.get(key, 0) > LAYERS:
            setattr(config, key, LAYERS)
        elif isinstance(value, list) and len(value) > LAYERS and len(value) in counts.values():
            setattr(config, key, value[:LAYERS])
        elif isinstance(value, transformers.PreTrainedConfig):
            shorten_config(value)


def build_model(name):
    """Build the model of a class without memory; with as many layers as its default has where four do not do."""
    kind = getattr(transformers, name)
    problem = None
    for short in (True, False):
        try:
            config = kind.config_class()
            if short:
                shorten_config(config)
            with torch.device("meta"):
                return kind(config)
        except Exception as error:  # noqa: BLE001 - whatever a default config makes of a class
            problem = error
    raise RuntimeError(f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem) else ''}")


def write_headers(name, folder):
    """Write a checkpoint of a class whose elements are a hole in its file, unless it is there."""
    if (folder / "config.json").exists():
        return
    model = build_model(name)
    model.config.architectures = [name]
    state, names = dict(model.state_dict()), set(getattr(model, "all_tied_weights_keys", None) or ())
    saved = revert_weight_conversion(model, {n: t for n, t in state.items() if n not in names})
    header, size = {}, 0
    for key, tensor in saved.items():
        dtype = BY_TORCH[str(tensor.dtype).removeprefix("torch.")]
        end = size + dtype.nbytes(tuple(tensor.shape))
        header[key] = {"dtype": dtype.name, "shape": list(tensor.shape), "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    (folder / "config.json").write_text(model.config.to_json_string())


def try_case(folder, reshard_options):
    """Plan a case; return why it is refused, nothing if it is not, and what was warned of."""
    try:
        found = plan(folder, reshard_options)
    except ShardctlError as error:
        return error.message, ()
    except Exception as error:  # noqa: BLE001 - a fault of ours, and a finding
        return f"{type(error).__name__}: {error}", ()
    return "", found.warnings


def try_class(name, folder):
    """Try every case of a class."""
    try:
        write_headers(name, folder)
    except RuntimeError as error:
        return {"name": name, "unbuilt": str(error)}
    result = {"name": name, "cases": {}, "warnings": {}}
    for case, options in CASES.items():
        why, said = try_case(folder, options)
        result["cases"][case], result["warnings"][case] = why, list(said)
    try:
        return result | describe_cuts(folder)
    except ShardctlError:  # which the cases have said
        return result | {"rules": "none"}


def describe_cuts(folder):
    """Describe what tp cuts, what stays whole as it is not known, and what the printed rules place elsewhere."""
    with open_checkpoint(folder) as checkpoint:
        model = checkpoint.find_placement(TP)
        if model is None:
            return {"rules": "none"}
        cut = {name for name, tensor in model.tensors.items() if not {"tp", "etp"}.isdisjoint(tensor.spec.axes)}
        shares = [sum(math.prod(model.tensors[n].shape) for n in names) for names in (cut, model.tensors)]
        share = shares[0] / max(shares[1], 1)
        if model.derivation is None:
            return {"rules": "table", "share": share}
        printed = folder / "rules.toml"
        printed.write_text(format_rule_file(model.derivation))
        read = load_rules(printed).model(checkpoint.stored)
        unprinted = [n for n, t in model.tensors.items() if list_cuts(t) != list_cuts(read.tensors[n])]
        whole = [[each.pattern, each.reason] for each in model.derivation.uncut]
        return {"rules": "derived", "share": share, "whole": whole, "unprinted": unprinted}


def list_cuts(tensor):
    """List how each dim of a tensor is cut, and of which expert it is."""
    cuts = [[(cut.axis, [(s.size, s.unit) for s in cut.sections]) for cut in dim] for dim in tensor.spec.cuts]
    return cuts, tensor.spec.member


def format_page(results, every):
    """Format the table of shares, and what failed and why; `every` is how many classes there are."""
    built = [result for result in results if "cases" in result]
    unbuilt = [result for result in results if "unbuilt" in result]
    what = (
        f"`python docs/benchmarks/any_model.py WORKDIR`, with transformers {transformers.__version__}. Of {every} "
        f"classes that can\ngenerate, {len(results)} were tried; {len(built)} build from their default config with "
        "four layers. Of each, a checkpoint\nof headers over a hole, under the names that `save_pretrained` writes, "
        "was planned."
    )
    lines = ["# Any model", "", what, "", "| `shardctl plan MODEL` | classes | share |", "|---|---|---|"]

    def add_row(label, good):
        lines.append(f"| {label} | {good} of {len(built)} | {good / max(len(built), 1):.1%} |")

    for case in CASES:
        good = [one for one in built if not one["cases"][case]]
        add_row(f"`{case}`", len(good))
        if case == CUT:
            add_row(f"`{case}`, by a table", sum(one["rules"] == "table" for one in good))
            add_row(f"`{case}`, by derived rules", sum(one["rules"] == "derived" for one in good))
    derived = [one for one in built if one["rules"] == "derived"]
    unprinted = sum(len(one["unprinted"]) for one in derived)
    lines += ["", "## What derived rules cut", "", "| share of the elements that tp cuts | classes |", "|---|---|"]
    for low, high in ((0.95, 1.01), (0.8, 0.95), (0.5, 0.8), (0.0, 0.5)):
        count = sum(low <= one["share"] < high for one in derived)
        lines.append(f"| {low:.0%} or more | {count} |")
    lines += ["", f"Tensors that the printed rule file places in another way than the plan: {unprinted}.", ""]
    reasons = Counter(shorten_whole(why) for one in derived for why in {why for _, why in one["whole"]})
    lines += ["| why tensors stay whole | classes |", "|---|---|"]
    lines += [f"| {reason} | {count} |" for reason, count in reasons.most_common(30)]
    for case in CASES:
        failed = [(one["name"], one["cases"][case]) for one in built if one["cases"][case]]
        if not failed:
            continue
        lines += ["", f"## What `{case}` refuses", ""]
        reasons = Counter(shorten_reason(why) for _, why in failed)
        for reason, count in reasons.most_common():
            names = ", ".join(name for name, why in failed if shorten_reason(why) == reason)
            lines += textwrap.wrap(f"- {count}: {reason}: {names}", 130, subsequent_indent="  ")
    lines += ["", "## What does not build", ""]
    lines += [f"- {one['name']}: {one['unbuilt']}" for one in unbuilt]
    return "\n".join(lines) + "\n"


def shorten_whole(why):
    """Return why tensors stay whole without the sizes that only one class has."""
    return re.sub(r"\[[0-9, ]*\]", "N", why)


def shorten_reason(why):
    """Return a reason without the names that only one class has."""
    first = why.split(", and a mesh of")[0]
    for pattern, said in REASONS.items():
        if re.search(pattern, first):
            return said
    return first[:200].replace("\n", " ")


def main():
    """Run what is missing, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--again", action="store_true", help="plan again what was planned")
    parser.add_argument("--only", nargs="+", help="classes to do again")
    parser.add_argument("--page", action="store_true", help="print the page of what was done, and do nothing")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    asked.workdir.mkdir(parents=True, exist_ok=True)
    kept = asked.workdir / "results.jsonl"
    results = {}
    if kept.exists():
        results = {one["name"]: one for one in map(json.loads, kept.read_text().splitlines())}
    done = {name for name, one in results.items() if "unbuilt" in one or not asked.again}
    names = list(list_generative_classes())
    for name in asked.only or [name for name in names if name not in done and not asked.page]:
        results[name] = try_class(name, asked.workdir / name)
        with kept.open("a") as file:
            file.write(json.dumps(results[name]) + "\n")
        gc.collect()
        if asked.only:
            print(json.dumps(results[name], indent=1))
    if not asked.only:
        print(format_page([results[name] for name in sorted(results)], len(names)), end="")


if __name__ == "__main__":
    main()
