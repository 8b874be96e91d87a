"""Freezes what transformers' `save_pretrained` writes: `shardctl/models/names/hub/conversions.json`.

    OMP_NUM_THREADS=1 python docs/benchmarks/freeze_conversions.py [--check]

Run it with the version of transformers that `constraints.txt` names. `--check` compares the file with what it would
write. The file has three tables:

- `conversions`: what `conversion_mapping.py` says of each model type or class, in both directions. `load` turns names
  of the Hub into those of the class, `save` is the reverse (`reverse_transform`), with its operations. What changes
  nothing when a model is saved that was not loaded is left out (`LayerPairCollapse`, and `PrefixChange` but for the
  one of `OLDER_PREFIXES`).
- `classes`: the models inside each class, as `named_modules` lists them, which weights it ties, and what it does not
  save, if there is something of this or something is converted.
- `plain`: the other classes.
- `auto`: the class that `AutoModel` and its like build for each model type, if something of it is converted.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN as SHARED
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    GroupWeightRename,
    Inkling2IndexOffsetWeightRename,
    LayerPairCollapse,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
)
from transformers.models.auto import modeling_auto

from shardctl.running.small_model import give_sizes, set_sizes

ROOT = Path(__file__).parents[2]
FROZEN = ROOT / "shardctl" / "models" / "hub" / "conversions.json"
CONFIGS = ROOT / "fixtures" / "configs"
AUTO = {
    "base": "MODEL_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "backbone": "MODEL_FOR_BACKBONE_MAPPING_NAMES",
    "text_encoding": "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
}
"""The mappings of transformers' auto classes that models inside others come from."""
ARRAYS = ("from", "operations")
"""What only saving needs."""
OLDER_PREFIXES = ("CLIPVisionModel", "CLIPTextModel")
"""Classes, and with them those that share their conversions, that had one more module in transformers 4."""
SIMPLE = (int, str, bool, list, type(None))


def describe_operation(operation):
    """Describe an operation by its name and its settings."""
    settings = {}
    for key, value in vars(operation).items():
        if isinstance(value, SIMPLE) and value is not None and value is not False:
            settings[key] = value
        elif not isinstance(value, SIMPLE):
            raise TypeError(f"{operation!r} has {key} = {value!r}")
    return [type(operation).__name__, settings] if settings else [type(operation).__name__]


def describe_direction(transform):
    """Describe a transform in one direction."""
    described = {"pattern": transform.compiled_sources.pattern, "to": list(transform.target_patterns)}
    if type(transform) is Inkling2IndexOffsetWeightRename:
        described["offset"] = transform.offset
    if type(transform) is WeightConverter:
        described["from"] = list(transform.source_patterns)
        described["operations"] = [describe_operation(each) for each in transform.operations]
    return described


def describe_transform(transform, name):
    """Describe a transform in both directions; nothing for one that saves names as they are."""
    kinds = {
        PrefixChange: "prefix",
        WeightRenaming: "rename",
        GroupWeightRename: "group",
        Inkling2IndexOffsetWeightRename: "rename",
        WeightConverter: "arrays",
    }
    unused = {LayerPairCollapse} if SHARED.get(name, name) in OLDER_PREFIXES else {LayerPairCollapse, PrefixChange}
    if type(transform) in unused:
        return None
    return {
        "kind": kinds[type(transform)],
        "load": {key: value for key, value in describe_direction(transform).items() if key not in ARRAYS},
        "save": describe_direction(transform.reverse_transform()),
    }


def list_conversions():
    """List the transforms of every model type and class; those that are another's are called by its name."""
    found, known = {}, {}
    mapping = _build_checkpoint_conversion_mapping()
    del mapping["legacy"]
    for name, transforms in mapping.items():
        described = [said for each in transforms if (said := describe_transform(each, name)) is not None]
        first = known.setdefault(json.dumps(described), name)
        found[name] = described if first == name else first
    return found


def list_model_classes():
    """List the classes of models that can be built."""
    for name in sorted(dir(transformers)):
        kind = getattr(transformers, name, None)
        is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if is_model and not name.endswith("PreTrainedModel") and kind.config_class is not None:
            yield kind


def build_on_meta(kind):
    """Build a class without memory, from the first config that it takes: small, its own, or one of `fixtures`."""
    makers = [lambda: give_sizes(kind.config_class), lambda: set_sizes(kind.config_class), kind.config_class]
    makers += [
        lambda config=config: kind.config_class.from_dict(config)
        for config in read_fixture_configs()
        if config["model_type"] == kind.config_class.model_type
    ]
    problem = None
    for make in makers:
        try:
            with torch.device("meta"):
                return kind(make())
        except Exception as error:  # noqa: BLE001 - whatever a class raises of a config that does not suit
            problem = error
    raise problem


@cache
def read_fixture_configs():
    """Read the small configs of the tests."""
    return [json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))]


def find_config_key(config, inner):
    """Find under which key of a config another one stands: `text_config`, or `thinker_config.text_config`."""
    if inner is config:
        return ""
    for key, value in vars(config).items():
        if value is inner:
            return key
    for key, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            below = find_config_key(value, inner) if value is not config else None
            if below:
                return f"{key}.{below}"
    return None


def find_auto_mapping(model):
    """Find the auto class that builds this class for its model type, if one does."""
    name = type(model).__name__
    return next((each for each, types in read_auto().items() if types.get(model.config.model_type) == name), "")


@cache
def read_auto():
    """Read the mappings of auto classes; those with more than one class for a type are of no use here."""
    return {key: dict(getattr(modeling_auto, name)) for key, name in AUTO.items()}


def describe_class(model):
    """Describe the models inside a model, each directly within it, and list them."""
    inner = [
        (name, module)
        for name, module in model.named_modules()
        if name and isinstance(module, transformers.PreTrainedModel)
    ]
    direct = [(name, one) for name, one in inner if not any(name.startswith(f"{outer}.") for outer, _ in inner)]
    parts = []
    for name, one in direct:
        part = {"path": name, "class": type(one).__name__, "type": one.config.model_type}
        key = find_config_key(model.config, one.config)
        auto = find_auto_mapping(one)
        parts.append(part | ({"config": key} if key is not None else {}) | ({"auto": auto} if auto else {}))
    described = {"prefix": model.base_model_prefix, "type": model.config.model_type, "parts": parts}
    return described | describe_ties(model), [module for _, module in direct]


def describe_ties(model):
    """Describe which weights a model or class ties if its config says so, what that says by default, and what it omits.

    Some models list their ties when they are built.
    """
    ties, unsaved = (getattr(model, key) for key in ("_tied_weights_keys", "_keys_to_ignore_on_save"))
    known = isinstance(ties, dict) and bool(ties)
    described = {"ties": ties, "tied": find_default_tie(model.config_class)} if known else {}
    return described | ({"unsaved": sorted(unsaved)} if unsaved else {})


@cache
def find_default_tie(kind):
    """Find whether a config class ties words' embeddings by default."""
    try:
        return bool(getattr(kind(), "tie_word_embeddings", False))
    except Exception:  # noqa: BLE001 - a config that cannot be silent
        return bool(getattr(kind, "tie_word_embeddings", False))


def list_classes(conversions):
    """List classes with something that is converted, tied or not saved; the others; and those that were not built."""
    found, unbuilt = find_classes()

    @cache
    def is_special(name, model_type):
        one = found.get(name, {"parts": ()})
        known = name in conversions or model_type in conversions or not {"ties", "unsaved"}.isdisjoint(one)
        return known or any(is_special(part["class"], part["type"]) for part in one["parts"])

    classes = {}
    for name, described in sorted(found.items()):
        if is_special(name, described["type"]):
            kept = [part for part in described["parts"] if is_special(part["class"], part["type"])]
            classes[name] = described | {"parts": kept}
    return classes, sorted(found.keys() - classes.keys()), unbuilt


def find_classes():
    """Describe every class; one that cannot be built without a library or settings of its own has no models inside."""
    found, unbuilt = {}, {}

    def visit(model):
        if type(model).__name__ not in found:
            found[type(model).__name__], inner = describe_class(model)
            for each in inner:
                visit(each)

    kinds = list(list_model_classes())
    for kind in kinds:
        try:
            if kind.__name__ not in found:
                visit(build_on_meta(kind))
        except Exception as error:  # noqa: BLE001 - whatever a class raises
            unbuilt[kind.__name__] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    for kind in kinds:
        plain = {"prefix": kind.base_model_prefix, "type": kind.config_class.model_type, "parts": []}
        found.setdefault(kind.__name__, plain | describe_ties(kind))
    return found, unbuilt


def list_auto_classes(classes):
    """List the class of each model type in the auto mappings, of those classes that the table has."""
    return {
        key: {kind: name for kind, name in sorted(types.items()) if isinstance(name, str) and name in classes}
        for key, types in read_auto().items()
    }


def main() -> None:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the file with what would be written")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    conversions = list_conversions()
    classes, plain, unbuilt = list_classes(conversions)
    tables = {"transformers": transformers.__version__, "conversions": conversions, "classes": classes}
    tables |= {"plain": plain, "auto": list_auto_classes(classes)}
    text = format_tables(tables)
    print(json.dumps(unbuilt, indent=1), file=sys.stderr)
    if not asked.check:
        FROZEN.write_text(text)
    elif FROZEN.read_text() != text:
        sys.exit(f"{FROZEN} differs")


def format_tables(tables):
    """Format the tables with one line for each transform, class and model type, so that a difference can be read."""
    lines = ["{", f' "transformers": {json.dumps(tables["transformers"])},', ' "conversions": {']
    for name, transforms in tables["conversions"].items():
        if isinstance(transforms, str):
            lines.append(f"  {json.dumps(name)}: {json.dumps(transforms)},")
            continue
        lines += [
            f"  {json.dumps(name)}: [",
            ",\n".join(f"   {json.dumps(each)}" for each in transforms),
            "  ],",
        ]
    lines = [*lines[:-1], lines[-1].rstrip(","), " },", ' "classes": {']
    rows = [f"  {json.dumps(name)}: {json.dumps(described)}" for name, described in tables["classes"].items()]
    lines += [",\n".join(rows), " },", f' "plain": {json.dumps(tables["plain"])},', ' "auto": {']
    rows = [f"  {json.dumps(key)}: {json.dumps(types)}" for key, types in tables["auto"].items()]
    return "\n".join([*lines, ",\n".join(rows), " }", "}"]) + "\n"


if __name__ == "__main__":
    main()
