"""Tries every generative class of transformers for three pages at once: any_model.md, derived.md and multimodal.md.

    OMP_NUM_THREADS=1 python docs/benchmarks/every_class.py WORKDIR [--only CLASS ...]

All is done in one process, which imports everything and tries two classes first; each class is then tried in a fork of
it, which may take `SECONDS` of processor time and takes its memory with it. A class is made small and saved once, and
cut for tp=2 and run once, for both pages that tell of it. WORKDIR keeps the results by page, from which the next run
goes on, and the headers of `any_model.py`; the scripts of the pages print them (`--results WORKDIR/derived.jsonl`).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import tempfile
import warnings
from pathlib import Path

import any_model
import derived
import multimodal
import torch
import transformers
from small_classes import list_generative_classes

SECONDS = 90
"""Of processor time that a class may take."""


def call_in_fork(function, *arguments):
    """Return what a function returns in a fork of this process; raises TimeoutError if the fork ends without it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
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


def try_small(name, *, sees):
    """Try what two pages tell of a small model of a class."""
    with tempfile.TemporaryDirectory() as folder:
        found = {"derived": derived.try_class(name, Path(folder))}
        if sees:
            found["multimodal"] = multimodal.try_class(name, Path(folder), found["derived"])
    return found


def main() -> None:
    """Try what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--only", nargs="+")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    headers = asked.workdir / "any_model"
    headers.mkdir(parents=True, exist_ok=True)
    names, seeing = asked.only or list(list_generative_classes()), set(multimodal.list_multimodal_classes())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # what every fork would import and compile again
        any_model.try_class("ProphetNetForCausalLM", Path(folder))
    try_small("LlavaForConditionalGeneration", sees=True)
    planned = read_done(headers / "results.jsonl")
    for name in names:
        if name not in planned:
            try:
                result = call_in_fork(any_model.try_class, name, headers / name)
            except TimeoutError as error:
                result = {"name": name, "unbuilt": str(error)}
            add_line(headers / "results.jsonl", result)
    tried = read_done(asked.workdir / "derived.jsonl")
    for name in names:
        if name not in tried:
            try:
                found = call_in_fork(lambda name=name: try_small(name, sees=name in seeing))
            except TimeoutError as error:
                found = {page: {"not built": str(error)} for page in ("derived", *["multimodal"] * (name in seeing))}
            for page in reversed(found):  # derived.jsonl last, as it says what is done
                add_line(asked.workdir / f"{page}.jsonl", [name, found[page]])


def read_done(path):
    """The names of the classes of which a file has results."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {line["name"] if isinstance(line, dict) else line[0] for line in lines}


def add_line(path, result):
    """Add a result to a file."""
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
