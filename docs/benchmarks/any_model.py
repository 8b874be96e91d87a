"""Plans every generative class of the installed transformers: python docs/benchmarks/any_model.py WORKDIR.

Each class that builds from its default config, with four layers and on the meta device, becomes the headers of a
checkpoint under the names that `save_pretrained` would write; its file is a hole. Then it is planned for one device and
for meshes. The page has what share works, and every failure with its reason. Results are kept in WORKDIR/results.jsonl,
from which the next run goes on; `--only NAME ...` does some classes again and prints what was said of them. It takes
half an hour on two busy cores, and no space on disk.
"""

import argparse
import gc
import json
import logging
import re
import shutil
import textwrap
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from shardctl.api import Mesh, ReshardOptions, ShardctlError, SourceOptions, plan
from shardctl.dtype import BY_TORCH

LAYERS = 4
COUNTS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"} | {
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
}
"""The keys of configs that count layers."""
PLAIN = "--tp 2"
BORROWED = "--tp 2 --rules-from transformers"
"""Only tried where the one before is refused: for what no table knows."""
CASES = {
    "--to hf": (ReshardOptions(to="hf"), None),
    "--fsdp 2": (ReshardOptions(mesh=Mesh.of(fsdp=2)), None),
    "--pp 2": (ReshardOptions(mesh=Mesh.of(pp=2)), None),
    PLAIN: (ReshardOptions(mesh=Mesh.of(tp=2)), None),
    BORROWED: (ReshardOptions(mesh=Mesh.of(tp=2)), SourceOptions(rules_from="transformers")),
}
REASONS = {
    r"the architecture \w+ is not known": "the architecture is not known",
    "has no tensor-parallel plan": "transformers has no tensor-parallel plan",
    "which the checkpoint has nowhere": "the plan of transformers speaks of arrays that files have in another form",
    "which the checkpoint has in several places": "the plan of transformers fits several parts of the model",
}
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


def write_headers(model, folder):
    """Write a checkpoint of the model whose elements are a hole in its file."""
    model.config.architectures = [type(model).__name__]
    state, names = dict(model.state_dict()), set(getattr(model, "all_tied_weights_keys", None) or ())
    saved = revert_weight_conversion(model, {n: t for n, t in state.items() if n not in names})
    header, size = {}, 0
    for name, tensor in saved.items():
        dtype = BY_TORCH[str(tensor.dtype).removeprefix("torch.")]
        end = size + dtype.nbytes(tuple(tensor.shape))
        header[name] = {"dtype": dtype.name, "shape": list(tensor.shape), "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    (folder / "config.json").write_text(model.config.to_json_string())
    return len(saved)


def try_case(folder, reshard_options, source_options):
    """Plan a case; return why it is refused, nothing if it is not, and what was warned of."""
    try:
        found = plan(folder, reshard_options, source_options=source_options)
    except ShardctlError as error:
        return error.message, ()
    except Exception as error:  # noqa: BLE001 - a fault of ours, and a finding
        return f"{type(error).__name__}: {error}", ()
    return "", found.warnings


def try_class(name, folder):
    """Try every case of a class."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        count = write_headers(build_model(name), folder)
    except RuntimeError as error:
        return {"name": name, "unbuilt": str(error)}
    result = {"name": name, "tensors": count, "cases": {}, "warnings": {}}
    for case, options in CASES.items():
        if case == BORROWED and not result["cases"][PLAIN]:
            continue
        why, said = try_case(folder, *options)
        result["cases"][case], result["warnings"][case] = why, list(said)
    shutil.rmtree(folder)
    return result


def format_page(results):
    """Format the table of shares, and what failed and why."""
    built = [result for result in results if "cases" in result]
    unbuilt = [result for result in results if "unbuilt" in result]
    tabled = sum(not any(line.startswith("no table") for line in one["warnings"]["--fsdp 2"]) for one in built)
    for one in built:
        if not one["cases"][PLAIN]:
            one["cases"][BORROWED] = ""
    what = (
        f"`python docs/benchmarks/any_model.py WORKDIR` with transformers {transformers.__version__}: {len(results)} "
        f"classes can\ngenerate; {len(built)} build from their default config with four layers. Of each, a checkpoint "
        f"of headers over a hole,\nunder the names that `save_pretrained` writes, was planned. {tabled} have "
        "a table, or a\ntext half that has one."
    )
    lines = [
        "# Any model",
        "",
        what,
        "",
        "| `shardctl plan MODEL` | classes | share |",
        "|---|---|---|",
    ]
    for case in CASES:
        good = sum(not one["cases"][case] for one in built)
        label = f"`{PLAIN}`, or with `--rules-from transformers`" if case == BORROWED else f"`{case}`"
        lines.append(f"| {label} | {good} of {len(built)} | {good / max(len(built), 1):.1%} |")
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
    parser.add_argument("--only", nargs="+", help="classes to do again")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    asked.workdir.mkdir(parents=True, exist_ok=True)
    kept = asked.workdir / "results.jsonl"
    results = {}
    if kept.exists():
        results = {one["name"]: one for one in map(json.loads, kept.read_text().splitlines())}
    for name in asked.only or [name for name in list_generative_classes() if name not in results]:
        results[name] = try_class(name, asked.workdir / "model")
        with kept.open("a") as file:
            file.write(json.dumps(results[name]) + "\n")
        gc.collect()
        if asked.only:
            print(json.dumps(results[name], indent=1))
    if not asked.only:
        print(format_page([results[name] for name in sorted(results)]), end="")


if __name__ == "__main__":
    main()
