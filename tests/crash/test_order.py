"""The order of the calls: synced before renamed, recorded last, journalled only when synced, nothing else touched."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from crash_site import HERE, checkpoint

STRACE = shutil.which("strace")
CHANGING = {
    "pwrite64": "pwrite", "pwritev": "pwrite", "pwritev2": "pwrite", "write": "write", "writev": "write",
    "fsync": "fsync", "fdatasync": "fsync", "mkdir": "mkdir", "mkdirat": "mkdir", "rename": "rename",
    "renameat": "rename", "renameat2": "renameat2", "unlink": "unlink", "unlinkat": "unlink", "rmdir": "rmdir",
    "ftruncate": "ftruncate", "truncate": "truncate", "fallocate": "reserve", "link": "link", "symlink": "symlink",
    "copy_file_range": "copy", "sendfile": "copy", "chmod": "chmod", "fchmod": "chmod", "chown": "chown",
    "utimensat": "times",
}  # fmt: skip


class Trace:
    """The calls of one run, with paths relative to the tree that was published where they lie in it."""

    def __init__(self, site, **options):
        self.done = site.run(**options)
        assert self.done["code"] == 0
        self.calls = [(name, path) for name, path in self.done["calls"]]
        self.taken = next(n for n, (name, _) in enumerate(self.calls) if name in {"rename", "exchange"})
        self.tree = self.calls[self.taken][1]

    def at(self, name, path):
        return [n for n, call in enumerate(self.calls) if call == (name, str(path))]

    def writes(self, path):
        return sorted(self.at("pwrite", path) + self.at("write", path) + self.at("ftruncate", path))


def published(site):
    return [path.relative_to(site.destination) for path in site.destination.rglob("*")]


@pytest.mark.parametrize("overwrite", [False, True])
def test_everything_is_synced_before_it_takes_its_name(site, tmp_path, overwrite):
    if overwrite:
        site.runner(checkpoint(tmp_path / "before", seed=1), site.destination)
    trace = Trace(site, sha256=True, overwrite=overwrite)
    for path in published(site):
        staged = Path(trace.tree, path)
        if (site.destination / path).is_file():
            last = trace.writes(staged)[-1]
            assert any(last < n < trace.taken for n in trace.at("fsync", staged)), path
        made = max(trace.at("open", staged) + trace.at("mkdir", staged))
        assert any(made < n < trace.taken for n in trace.at("fsync", staged.parent)), f"the name {path}"


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_is_removed_before_the_new_name_is_durable(site, tmp_path, overwrite):
    if overwrite:
        site.runner(checkpoint(tmp_path / "before", seed=1), site.destination)
    trace = Trace(site, overwrite=overwrite)
    durable = [n for n in trace.at("fsync", site.root) if n > trace.taken]
    begun = [name for name, _ in trace.calls].index("reserve")
    removing = [n for n, (name, _) in enumerate(trace.calls) if n > begun and name in {"unlink", "rmdir", "remove"}]
    assert durable
    assert min(removing) > durable[0]
    note = site.staging / "publishing.json"
    assert trace.writes(note)[-1] < trace.at("fsync", note)[-1] < trace.taken


def test_the_record_is_written_when_all_else_is_synced(site):
    trace = Trace(site, sha256=True)
    record = Path(trace.tree, "shardctl.json")
    first = trace.at("open", record)[0]
    for name, path in trace.calls[first : trace.taken]:
        assert name == "fsync" or path in {str(record), str(site.staging / "publishing.json")}, (name, path)
    synced = {path for name, path in trace.calls[:first] if name == "fsync"}
    files = {str(Path(trace.tree, p)) for p in published(site) if (site.destination / p).is_file()}
    assert files - {str(record)} <= synced


def test_a_line_of_the_journal_comes_after_the_bytes_it_speaks_of(site):
    trace = Trace(site)
    lines = trace.at("write", site.staging / "journal.jsonl")[1:]
    assert len(lines) > 2
    dirty = set()
    for n, (name, path) in enumerate(trace.calls):
        if name == "pwrite":
            dirty.add(path)
        elif name == "fsync":
            dirty.discard(path)
        elif n in lines:
            assert not dirty


def test_only_the_destination_and_its_staging_area_are_touched_and_only_under_the_lock(site):
    trace = Trace(site)
    paths = [path for _, path in trace.calls]
    inside = [p for p in paths if Path(p).is_relative_to(site.staging)]
    assert set(paths) - set(inside) <= {str(site.root), *(p for p in paths if not Path(p).is_absolute())}
    lock = str(site.staging / "lock")
    assert paths.index(lock) <= 3
    assert ("unlink", lock) == trace.calls[-2]
    assert ("rmdir", str(site.staging)) == trace.calls[-1]


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
def test_the_wrappers_see_what_the_kernel_sees(site, tmp_path):
    """Every test here relies on no changing call going past the wrappers."""
    log = tmp_path / "strace"
    job = json.dumps({"source": str(site.source), "destination": str(site.destination), "sha256": True})
    command = [STRACE, "-f", "-y", "-o", log, "-e", f"trace={','.join(CHANGING)}", sys.executable, HERE / "runner.py"]
    traced = subprocess.run([*command, job], capture_output=True, text=True, check=False)
    if traced.returncode and not log.read_text():
        pytest.skip(f"strace may not trace here: {traced.stderr}")
    wanted = Counter(name for name, _ in json.loads(traced.stdout)["calls"] if name != "open")
    seen = Counter()
    for line in log.read_text().splitlines():
        call = re.match(r"\d+ +(\w+)\((.*)", line)
        if call and "<pipe:" not in line and (str(site.root) in call[2] or "AT_REMOVEDIR" in call[2]):
            seen[CHANGING[call[1]]] += 1
    assert seen == wanted
