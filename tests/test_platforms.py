"""Windows is refused, and macOS is claimed because of the fallbacks that these tests run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

WINDOWS = """
import sys
sys.platform = "win32"
try:
    import shardctl
except ImportError as error:
    print(error)
"""

MACOS = """
import builtins, ctypes, fcntl, io, os, sys, sysconfig
sysconfig.get_config_vars()  # Python describes itself while it still knows where it is
sys.platform = "darwin"
os.uname = lambda: os.uname_result(("Darwin", "mac", "24.0.0", "", "arm64"))
for name in (
    "O_DIRECT", "O_TMPFILE", "RWF_NOWAIT", "RWF_HIPRI", "RWF_DSYNC", "RWF_SYNC", "RWF_APPEND", "copy_file_range",
    "eventfd", "getrandom", "memfd_create", "posix_fadvise", "posix_fallocate", "sched_getaffinity",
    "sched_setaffinity", "splice", "fdatasync", "process_cpu_count", {more}
):
    if hasattr(os, name):
        delattr(os, name)
fcntl.F_FULLFSYNC = fcntl.F_GETFD  # harmless, where the real one is not known
class Libc:
    def __init__(self, *given, **named): pass
    def __getattr__(self, name): raise AttributeError(name)
ctypes.CDLL = Libc
opened = []
def refuse(real):
    def open_(path, *given, **named):
        if str(path).startswith(("/proc/", "/sys/")):
            opened.append(path)
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *given, **named)
    return open_
builtins.open, io.open, os.open = refuse(open), refuse(io.open), refuse(os.open)
from shardctl.cli.program import run
source, into = sys.argv[1:]
codes = [
    run(["inspect", source]),
    run(["plan", source, "--tp", "2"]),
    run(["reshard", source, into, "--tp", "2", "--pp", "2"]),
    run(["reshard", source, into, "--tp", "2", "--pp", "2"]),
    run(["verify", into, "--level", "full", "--against", source]),
    run(["diff", into, source]),
    run(["digest", into]),
]
assert opened, "nobody asked Linux for anything: this test replaces the wrong functions"
sys.exit(any(codes))
"""
"""Takes from Python what macOS does not have, and runs every verb. (It cannot stand for macOS's own file systems.)"""


def test_windows_is_refused_in_one_sentence():
    done = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.count("\n") == 1
    assert "WSL" in done.stdout


def run_without(more, minilm, tmp_path):
    code = MACOS.replace("{more}", more)
    command = [sys.executable, "-c", code, minilm, tmp_path / "cut"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_verb_works_without_what_only_linux_has(minilm, tmp_path):
    run_without("", minilm, tmp_path)


def test_every_verb_works_without_what_macos_before_11_lacks(minilm, tmp_path):
    run_without("'preadv', 'pwritev'", minilm, tmp_path)
