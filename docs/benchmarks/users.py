"""Writes `docs/benchmarks/users.md`: what five new users type, and the first line that each command answers.

Run from the root: ``python docs/benchmarks/users.py``. Models are tiny checkpoints of `fixtures`, and public configs
for plans, which read no weights. A command that ends with another exit code than the table says stops the script.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import shlex
import shutil
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/benchmarks/users.md"
PICTURE = ROOT / "docs/pictures/terminal-80.svg"
FIXTURES = {
    "llama": "peft/hf/llama",
    "megatron-run": "megatron/llama-tp2-pp2",
    "original": "megatron/hf/llama",
    "llama-3.1-8b.json": "configs_public/llama-3.1-8b.json",
    "llama-3.1-70b.json": "configs_public/llama-3.1-70b.json",
}
"""What the users call a checkpoint or a config, and the fixture that is one."""
DAMAGE = "printf '\\377' | dd of=damaged/model.safetensors bs=1 seek=9000 conv=notrunc status=none"
ZERO_PLAN = "shardctl plan llama-3.1-8b.json --for train --profile deepspeed --zero 3 --dp 8 --gpu h100"
USERS = {
    "An operator with two H100s and vLLM": (
        ("shardctl inspect llama-3.1-70b.json", 0),
        ("shardctl plan llama-3.1-70b.json --for vllm --gpu 2xh100 --max-model-len 8192 --users 16", 3),
        ("shardctl plan llama-3.1-70b.json --for vllm --gpu 2xh100 --max-model-len 8192 --users 16 --dtype fp8", 0),
        ("shardctl plan llama-3.1-8b.json --for vllm --gpu 2xh100 --max-model-len 32k --max-num-seqs 64", 0),
        ("shardctl reshard llama llama-vllm --to vllm --tp 2", 0),
        ("shardctl verify llama-vllm --level full --against llama", 0),
    ),
    "A finetuner with ZeRO-3": (
        (ZERO_PLAN, 3),
        (f"{ZERO_PLAN} --gradient-checkpointing", 0),
        ("shardctl inspect zero-llama --config zero-config", 0),
        ("shardctl reshard zero-llama model --for transformers --config zero-config --dtype bf16", 0),
        ("shardctl verify model --level full --against zero-llama --config zero-config", 0),
        ("shardctl push model me/model", 2),
    ),
    "A CI author": (
        ("shardctl reshard llama llama-tp2 --tp 2 --dry-run", 0),
        ("shardctl reshard llama llama-tp2 --tp 2", 0),
        ("shardctl verify llama-tp2 --level full --junit verify.xml", 0),
        ("shardctl digest llama-tp2 --expect shardctl1:b50f2b45deb05ba053feb189cebd21c2", 0),
        ("shardctl verify damaged --level full --against llama", 3),
        ("shardctl diff llama damaged", 3),
        ("shardctl verify lamma", 4),
    ),
    "A Megatron researcher": (
        ("shardctl inspect megatron-run", 0),
        ("shardctl reshard megatron-run model-hf --to hf", 4),
        ("shardctl reshard megatron-run model-hf --to hf --config original", 0),
        ("shardctl verify model-hf --level full --against original", 0),
        ("shardctl reshard original megatron-tp2 --to megatron --tp 2", 0),
        ("shardctl diff megatron-tp2 megatron-run --config original", 0),
    ),
    "Someone who plans pretraining on 64 GPUs": (
        ("shardctl plan llama-3.1-70b.json --for train --gpu 64xh100 --tokens 1T --global-batch 1024", 0),
        ("shardctl plan llama-3.1-70b.json --for train --gpu 64xh100 --pp 4 --tp 8 --dp 2 --profile megatron", 0),
        ("shardctl plan llama-3.1-405b.json --for train --gpu 64xh100", 4),
        ("shardctl plan llama-3.1-8b.json --for train --gpu 64xh100 --seq-len 32k --recompute full", 0),
    ),
}
"""What each user types, with the exit code that it should end with."""
SHOWN = (
    "shardctl plan llama-3.1-70b.json --for vllm --gpu 2xh100 --max-model-len 8192 --users 16 --dtype fp8",
    "shardctl verify damaged --level full --against llama",
)
"""The commands whose whole output is drawn."""


def make_checkpoints(folder: Path) -> None:
    """Put what the users have into a folder."""
    import torch
    import transformers

    sys.path[:0] = [str(ROOT), str(ROOT / "tests/formats")]
    from deepspeed_builder import scattered

    for name, fixture in FIXTURES.items():
        (folder / name).symlink_to(ROOT / "fixtures" / fixture)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    scattered(folder / "zero-llama", transformers.LlamaForCausalLM(config).state_dict(), 3)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "zero-config")
    shutil.copytree(folder / "llama", folder / "damaged")
    subprocess.run(["bash", "-c", DAMAGE], cwd=folder, check=True)


def run_command(command: str, folder: Path, code: int) -> str:
    """Run a command; returns the first line of its answer: of stdout, or of stderr where it says nothing there."""
    arguments = [sys.executable, "-m", "shardctl", *shlex.split(command)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise SystemExit(f"{command}: exit {done.returncode}, not {code}\n{done.stdout}{done.stderr}")
    answer = (done.stdout or done.stderr).splitlines()[0] + f"  [exit {code}]" * bool(code)
    hint = ""
    if not done.stdout and "\nhint:" in done.stderr:
        hint = "\n" + next(line for line in done.stderr.splitlines() if line.startswith("hint:"))
    return answer + hint


def draw_terminal(folder: Path) -> str:
    """Draw what some commands print on a terminal of 80 columns, as an SVG."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    for name in ("NO_COLOR", "COLUMNS", "CI"):
        environment.pop(name, None)
    for command in SHOWN:
        console.print(Text(f"$ {command}", "bold"))
        arguments = [sys.executable, "-m", "shardctl", *shlex.split(command)[1:]]
        here, there = pty.openpty()
        termios.tcsetwinsize(there, (50, 80))
        process = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=there, stderr=subprocess.DEVNULL)
        os.close(there)
        said = b""
        with contextlib.suppress(OSError):  # how a terminal ends on Linux
            while part := os.read(here, 1 << 16):
                said += part
        process.wait()
        os.close(here)
        console.print(Text.from_ansi(said.decode().replace("\r\n", "\n")))
    return console.export_svg(title="shardctl", unique_id="terminal")


def main() -> None:
    """Run all commands, and write the page and the picture."""
    lines = [
        "# What five users type",
        "",
        "`python docs/benchmarks/users.py` runs these commands on tiny checkpoints of `fixtures` and writes this page.",
        "Each command stands with the first line that it answered, and with the hint of an error. An exit code",
        "other than 0 stands behind the line.",
    ]
    with tempfile.TemporaryDirectory() as name:
        make_checkpoints(Path(name))
        for user, commands in USERS.items():
            lines += ["", f"## {user}", "", "```text"]
            for command, code in commands:
                answer = run_command(command, Path(name), code)
                lines += [f"$ {command}", answer, ""]
                print(lines[-3:], flush=True)
            lines[-1] = "```"
        PICTURE.write_text(draw_terminal(Path(name)), encoding="utf-8")
    lines += [
        "",
        "## A terminal of 80 columns",
        "",
        "![Output of two commands](../pictures/terminal-80.svg)",
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
