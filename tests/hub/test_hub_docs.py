"""The page about the Hub shows what the program prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "remote.md"
VARIES = [
    (r"in [\d.]+ s, .*", "in N s"),
    (r"files, [\d.]+ s\)", "files, N s)"),
    (r"peak host memory.*", "peak host memory"),
    (r"^.*/minilm-tp2$", "minilm-tp2"),
]


def masked(line):
    for pattern, plain in VARIES:
        line = re.sub(pattern, plain, line)
    return line.strip()


def test_the_transcripts_are_what_the_program_says(hub, minilm, tmp_path):
    files = {path.relative_to(minilm).as_posix(): path.read_bytes() for path in minilm.rglob("*") if path.is_file()}
    hub.add("sentence-transformers/all-MiniLM-L6-v2", files)
    sessions = "".join(re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)).split("$ ")[1:]
    assert len(sessions) > 1
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    for session in sessions:
        command, *expected = session.rstrip("\n").split("\n")
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert [masked(line) for line in done.stdout.splitlines()] == [masked(line) for line in expected], command
