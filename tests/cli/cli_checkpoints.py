"""Tiny checkpoints on disk, and the program run as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from shardctl.models import describe_model

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
_WATCHED = ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TERM", "COLUMNS", "SHARDCTL_DEBUG")


def told(config: str = "llama", **changes: object) -> dict[str, object]:
    """A tiny config of float32, with some keys changed."""
    return {**json.loads((CONFIGS / f"{config}.json").read_text()), "dtype": "float32", **changes}


def llama(place: Path, config: str = "llama", **changes: object) -> Path:
    """A checkpoint with random float32 weights, a config and a tokenizer file."""
    random = np.random.default_rng(7)
    said = told(config, **changes)
    tensors = {t.name: random.standard_normal(t.shape, np.float32) for t in describe_model(said).own()}
    place.mkdir(parents=True)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "model.safetensors").chmod(0o644)
    (place / "config.json").write_text(json.dumps(said))
    (place / "tokenizer.json").write_text("{}")
    return place


def large(place: Path) -> Path:
    """A checkpoint of about 430 MB of zeros, made without writing them."""
    said = told(vocab_size=80_000, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=12)
    header: dict[str, object] = {}
    end = 0
    for tensor in describe_model(said).own():
        size = int(np.prod(tensor.shape)) * 4
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    place.mkdir(parents=True)
    with (place / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (place / "config.json").write_text(json.dumps(said))
    return place


def environment(**extra: str) -> dict[str, str]:
    """The environment without what steers colour and width."""
    return {**{k: v for k, v in os.environ.items() if k not in _WATCHED}, "COLUMNS": "80", **extra}


def start(*args: object, **options: object) -> subprocess.Popen[str]:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "shardctl", *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), "text": True, **options}
    return subprocess.Popen(command, **pipes)


def shardctl(*args: object, **extra: str) -> subprocess.CompletedProcess[str]:
    """The program, run to its end; `extra` are environment variables."""
    with start(*args, env=environment(**extra)) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
