"""Compares `reshard --to hf` with `save_pretrained`, for every class of transformers that can be made small.

    OMP_NUM_THREADS=1 python docs/benchmarks/hub_names.py WORKDIR [--only CLASS ...] [--again] [--json FILE]

Each class is made small (`small_classes.py`), its state gets random values, and `model.state_dict()` is saved with
torch.distributed.checkpoint, as a training run does. `shardctl reshard --to hf` of that, with the model's config, must
write the same names, types, shapes and bits as the model's own `save_pretrained`. Classes with a config in
`fixtures/configs` are also made from that. WORKDIR/results.jsonl keeps what was done, from which the next run goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from shardctl.api import ReshardOptions, ShardctlError, SourceOptions, reshard
from shardctl.running.small_model import build_small_model

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
SECONDS = 120
"""Of processor time that a class may take."""


def list_cases():
    """List the cases: a class of every family, every class with a mapping of its own, and every small config."""
    kinds = [kind for name in dir(transformers) if is_model_class(kind := getattr(transformers, name, None))]
    chosen = {
        kind.__name__
        for kind in kinds
        if kind.can_generate() or get_checkpoint_conversion_mapping(kind.__name__) is not None
    }
    types = {kind.config_class.model_type for kind in kinds if kind.__name__ in chosen}
    for kind in kinds:  # of families without a class that generates, those with a head, or else the base class
        family = [each for each in kinds if each.config_class is kind.config_class]
        heads = [each for each in family if "For" in each.__name__] or family
        if kind.config_class.model_type not in types and kind in heads:
            chosen.add(kind.__name__)
    return [*sorted(chosen), *(f"{path.stem}.json" for path in sorted(CONFIGS.glob("*.json")))]


def is_model_class(kind):
    """Return whether it is a class of models that can be built."""
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return is_model and not kind.__name__.endswith("PreTrainedModel") and kind.config_class is not None


def build_case(case):
    """Build the model of a case."""
    if not case.endswith(".json"):
        return build_small_model(getattr(transformers, case))
    config = json.loads((CONFIGS / case).read_text())
    kind = getattr(transformers, config["architectures"][0])
    return kind(kind.config_class.from_dict(config))


def try_case(case):
    """Try a case; returns `equal`, why it could not be built, why it was refused, or how the result differs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_case(case, Path(folder))
        except Exception as error:  # noqa: BLE001 - whatever a class raises that these sizes do not suit
            return {"case": case, "unbuilt": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        return {"case": case, **compare_case(Path(folder))}


def write_case(case, folder):
    """Write a model's state as a training run does, its config, and what `save_pretrained` writes."""
    model = build_case(case)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.numel():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(folder / "saved")
    (folder / "config").mkdir()
    shutil.copy(folder / "saved" / "config.json", folder / "config")
    dcp.save(model.state_dict(), checkpoint_id=str(folder / "dcp"), no_dist=True)


def compare_case(folder):
    """Convert what was written, and compare it."""
    saved = load_folder(folder / "saved")
    try:
        done = reshard(
            folder / "dcp",
            folder / "out",
            ReshardOptions(to="hf"),
            source_options=SourceOptions(config=folder / "config"),
        )
    except ShardctlError as error:
        return {"result": "refused", "why": error.message[:300], "tensors": len(saved)}
    except Exception as error:  # noqa: BLE001 - a fault of ours, and a finding
        return {"result": "failed", "why": f"{type(error).__name__}: {error}"[:300], "tensors": len(saved)}
    found = load_folder(folder / "out")
    again = reshard(folder / "saved", folder / "again", ReshardOptions(to="hf"))
    kept = load_folder(folder / "again").keys() == saved.keys() and "names" not in again.record.options
    lost, extra = sorted(saved.keys() - found.keys()), sorted(found.keys() - saved.keys())
    other = sorted(name for name in saved.keys() & found.keys() if not is_same(saved[name], found[name]))
    names = done.record.options.get("names", "")
    result = "differs" if lost or extra or other else "equal" if kept else "not kept"
    said = {"result": result, "names": names, "tensors": len(saved)}
    lists = {"lost": lost, "extra": extra, "other": other}
    return said | {key: [len(value), *value[:4]] for key, value in lists.items() if value}


def load_folder(folder):
    """Load the tensors of every safetensors file of a folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def is_same(one, other):
    """Return whether two tensors are equal bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def call_in_fork(function, *arguments):
    """Return what a function returns in a fork of this process; raises TimeoutError if the fork ends without it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(function(*arguments)))
            pipe.flush()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if not said:
        raise TimeoutError(f"ended with status {status}; {SECONDS} s of processor time are allowed")
    return json.loads(said)


def main() -> None:
    """Try what is missing, and count what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--again", action="store_true", help="try again what was built and is not equal")
    parser.add_argument("--json", type=Path, help="write the results there")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    asked.workdir.mkdir(parents=True, exist_ok=True)
    kept = asked.workdir / "results.jsonl"
    results = {}
    if kept.exists():
        results = {one["case"]: one for one in map(json.loads, kept.read_text().splitlines())}
    done = {name for name, one in results.items() if not asked.again or "unbuilt" in one or one["result"] == "equal"}
    try_case("gpt2.json")  # what every fork would import again
    for case in asked.only or [case for case in list_cases() if case not in done]:
        try:
            results[case] = call_in_fork(try_case, case)
        except TimeoutError as error:
            results[case] = {"case": case, "unbuilt": str(error)}
        with kept.open("a") as file:
            file.write(json.dumps(results[case]) + "\n")
        if asked.only:
            print(json.dumps(results[case], indent=1))
    counts = Counter("unbuilt" if "unbuilt" in one else one["result"] for one in results.values())
    print(json.dumps(counts), file=sys.stderr)
    if asked.json:
        asked.json.write_text(format_document(results, counts))


def format_document(results, counts):
    """Format the results as JSON, a line for each case."""
    head = {"transformers": transformers.__version__, "counts": dict(counts)}
    lines = ",\n".join(json.dumps(results[name]) for name in sorted(results))
    return f'{json.dumps(head)[:-1]}, "results": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    main()
