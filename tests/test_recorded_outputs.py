"""Conversions and plans give the bytes that they gave before: a set of them was recorded, through the command line.

What is meant to change is recorded again: python tests/test_recorded_outputs.py, and the difference is looked at.
"""

import hashlib
import io
import json
import shutil
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from shardctl.cli.program import run

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED = FIXTURES / "recorded_outputs.json"
LLAMA = "trtllm/llama_pp3/source"
DEEPSEEK = "deepseek_mp/bf16/source"
MIXTRAL = "trtllm/mixtral_tp2/source"
CUT = ("ranks", "dcp", "meta", "megatron", "torch_dist", "vllm", "trtllm")
DCP = ("--config", "dcp/config.json")

CONVERSIONS = {
    **{f"llama to {to}": (LLAMA, "--to", to, "--tp", "2") for to in CUT},
    "llama to hf": (LLAMA, "--to", "hf", "--max-shard-size", "20kB"),
    "llama to universal": (LLAMA, "--to", "universal"),
    "llama to dcp fsdp3": (LLAMA, "--to", "dcp", "--fsdp", "3"),
    "llama to ranks pp2 tp2": (LLAMA, "--pp", "2", "--tp", "2"),
    "llama in bf16": (LLAMA, "--dtype", "bf16", "--keep-fp32", "norm"),
    "deepseek to deepseek": (DEEPSEEK, "--to", "deepseek", "--tp", "2"),
    "deepseek to ranks": (DEEPSEEK, "--dp", "2", "--ep", "2"),
    "mixtral to ranks": (MIXTRAL, "--tp", "2", "--experts", "split"),
    "mixtral to megatron": (MIXTRAL, "--to", "megatron", "--dp", "2", "--ep", "2"),
    **{f"dcp {name} to hf": (f"dcp/{name}", *DCP) for name in ("fsdp2", "fsdp-tp", "hf", "tp")},
    **{f"dcp {name} to universal": (f"dcp/{name}", *DCP, "--to", "universal") for name in ("fsdp2", "fsdp-tp")},
    **{f"deepspeed {name} to hf": (f"deepspeed/{name}",) for name in ("z1", "z2", "z3", "tp-z1", "universal-z3")},
    "deepspeed z2 to dcp": ("deepspeed/z2", "--to", "dcp"),
    "megatron llama to hf": ("megatron/llama-tp2-pp2", "--config", "megatron/hf/llama"),
    "megatron qwen3-moe to hf": ("megatron/qwen3-moe-ep2-etp2", "--config", "megatron/hf/qwen3-moe"),
    **{
        f"torch_dist {name} to hf": (f"torch_dist/{name}/iter", "--config", f"torch_dist/hf/{of}")
        for name, of in (("qwen3", "qwen3-bf16"), ("moe", "mixtral"), ("trained", "llama-bf16"))
    },
    **{f"vllm {name} to hf": (f"vllm/{name}/0.25-tp2",) for name in ("gemma2", "qwen3_moe")},
    "trtllm llama to hf": ("trtllm/llama_tp2_pp2/exported",),
}
"""By name, the options of `reshard` after the destination; paths are below `fixtures`."""
PLANS = {
    "llama serving": ("configs_public/llama-3.1-70b.json", "--tp", "8", "--gpu", "h100-80g"),
    "llama training": ("configs_public/llama-3.1-70b.json", "--for", "train", "--mesh", "pp=2,fsdp=4,tp=4"),
    "llama search": ("configs_public/llama-3.1-70b.json", "--search", "--gpus", "8", "--gpu", "h100-80g"),
    "deepseek": ("configs_public/deepseek-v3.json", "--dp", "16", "--ep", "16", "--gpu", "h200"),
    "bert": ("configs_public/bert-base.json", "--tp", "2"),
    "checkpoint": (LLAMA, "--tp", "2", "--detail", "tensor"),
}
VOLATILE = ("version", "free_bytes", "free_space_bytes")


def said(*options: str) -> str:
    """What the program prints; it runs in `fixtures`, so that no output has a path of this machine."""
    out, err = io.StringIO(), io.StringIO()
    with chdir(FIXTURES), redirect_stdout(out), redirect_stderr(err):
        code = run([*options])
    return out.getvalue() if code in {0, 3} else f"exit {code}: {err.getvalue()}"


def hash_tree(folder: Path) -> str:
    """One hash of every file's path and bytes."""
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            state.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return state.hexdigest()[:24]


def convert(options: tuple[str, ...], folder: Path) -> str:
    source, *rest = options
    found = said("reshard", source, str(folder), *rest)
    return hash_tree(folder) if folder.is_dir() else found


def plan(options: tuple[str, ...]) -> str:
    found = said("plan", *options, "--json")
    if not found.startswith("{"):
        return found
    return hashlib.sha256(json.dumps(stable(json.loads(found)), sort_keys=True).encode()).hexdigest()[:24]


def stable(value: object) -> object:
    """A document without what depends on the machine or on the day."""
    if isinstance(value, dict):
        return {key: stable(part) for key, part in value.items() if key not in VOLATILE}
    return [stable(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_gives_the_bytes_that_were_recorded(name, tmp_path):
    assert convert(CONVERSIONS[name], tmp_path / "made") == json.loads(RECORDED.read_text())["conversions"][name]


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_gives_the_numbers_that_were_recorded(name):
    assert plan(PLANS[name]) == json.loads(RECORDED.read_text())["plans"][name]


def record() -> None:
    work = Path(tempfile.mkdtemp())
    made = {
        "conversions": {name: convert(options, work / str(n)) for n, (name, options) in enumerate(CONVERSIONS.items())},
        "plans": {name: plan(options) for name, options in PLANS.items()},
    }
    shutil.rmtree(work)
    RECORDED.write_text(json.dumps(made, indent=1) + "\n")
    sys.stdout.write(f"{len(CONVERSIONS)} conversions and {len(PLANS)} plans\n")


if __name__ == "__main__":
    record()
