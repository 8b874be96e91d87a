"""What the machine or the environment refuses ends in an exit code with a meaning, and a hint."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_checkpoints import environment
from cli_checkpoints import shardctl as shardctl_run

from shardctl.conversion.engine.journal import BandJournal

FIXTURES = Path(__file__).parents[2] / "fixtures"


def assert_refused(found, code, said):
    assert found.code == code, found
    assert said in found.err
    assert "hint:  " in found.err


def test_a_working_directory_that_was_removed(source, tmp_path):
    place = tmp_path / "gone"
    place.mkdir()
    command = [sys.executable, "-c", _RUN_IN_REMOVED_DIRECTORY, place, "inspect", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 2
    assert done.stderr == (
        "error: the working directory does not exist any more\nhint:  change to a directory that exists, with cd\n"
    )


_RUN_IN_REMOVED_DIRECTORY = """
import os, sys
from shardctl.cli.program import run
os.chdir(sys.argv[1])
os.rmdir(sys.argv[1])
sys.exit(run(sys.argv[2:]))
"""


def test_a_file_system_that_does_not_implement_statvfs(say, source, tmp_path, monkeypatch):
    def refuse(_path):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert say("plan", source, "--tp", 2).code == 0
    assert say("reshard", source, tmp_path / "out", "--tp", 2).code == 0


@pytest.mark.parametrize("epoch", ["9e29", "9" * 24, "-" + "9" * 24, "today", "9" * 5000])
def test_a_date_that_is_none(say, source, tmp_path, monkeypatch, epoch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    found = say("plan", source, "--tp", 2, "--report", tmp_path / "report.html")
    assert_refused(found, 2, f"SOURCE_DATE_EPOCH is {epoch[:80]!r}, which is not a date")


@pytest.mark.parametrize("name", ["XDG_CONFIG_HOME", "HOME"])
def test_a_folder_of_settings_whose_name_is_too_long(say, source, monkeypatch, name):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv(name, "/" + "x" * 400)
    assert_refused(say("inspect", source), 2, "File name too long")


@pytest.mark.parametrize("backend", [{}, [], 1, "zarr3"])
def test_a_backend_of_torch_dist_that_is_not_known(say, tmp_path, backend):
    shutil.copytree(FIXTURES / "torch_dist" / "core_0_15", tmp_path / "save")
    mark = next((tmp_path / "save").rglob("metadata.json"))
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "common_backend": backend}))
    assert_refused(say("inspect", mark.parent), 4, "which are not known")


@pytest.mark.parametrize("first", ["[[[[" * 20_000, '{"schema": ' * 20_000, "[[[["], ids=["deep", "deep too", "short"])
def test_a_journal_that_is_none_is_begun_anew(tmp_path, first):
    path = tmp_path / "journal"
    path.write_text(first)
    journal = BandJournal(path, {"plan": "1"})
    journal.close()
    assert len(journal) == 0
    assert BandJournal.header(path) == {"schema": BandJournal.SCHEMA, "plan": "1"}


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no limit on addresses")
@pytest.mark.parametrize("verb", ["verify", "digest", "reshard"])
def test_no_thread_can_be_started(source, tmp_path, verb):
    """Stacks of threads of this size do not fit below the limit on addresses; all that is loaded does."""
    more = {"verify": ["--level", "full"], "reshard": [tmp_path / "out"]}.get(verb, [])
    command = [sys.executable, "-c", _RUN_WITHOUT_THREADS, verb, source, *map(str, more)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(OPENBLAS_NUM_THREADS="1")
    )
    assert done.returncode == 7, done
    assert "error: this machine cannot start another thread" in done.stderr
    assert "ulimit" in done.stderr
    assert not (tmp_path / "out").exists()


_RUN_WITHOUT_THREADS = """
import resource, sys, threading
from shardctl.cli.program import run
threading.stack_size(1 << 40)
resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("s3", "AWS_ENDPOINT_URL"),
        ("s3", "AWS_ENDPOINT"),
        ("gs", "STORAGE_EMULATOR_HOST"),
        ("az", "AZURE_STORAGE_ENDPOINT"),
    ],
)
@pytest.mark.parametrize("value", ["http://[", "http://a b", "http://x:99999", "ftp://x", "http://caf\u00e9"])
def test_an_endpoint_of_a_bucket_that_is_no_address(say, monkeypatch, scheme, name, value):
    pytest.importorskip("obstore")
    monkeypatch.setenv(name, value)
    assert_refused(say("inspect", f"{scheme}://bucket/model"), 2, f"{name} is {value!r}")


@pytest.mark.parametrize("address", ["s3://[/x", "gs://b:x/x", "az://b c [/x", "s3://b:99999/x"])
def test_a_bucket_that_is_no_address(say, address):
    pytest.importorskip("obstore")
    assert_refused(say("inspect", address), 2, "is not the address of a bucket")


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"])
def test_credentials_that_no_header_can_hold(name):
    pytest.importorskip("obstore")
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    done = shardctl_run("inspect", "s3://bucket/model", **{**keys, name: "a\nb"})
    assert done.returncode == 2, done.stderr
    assert "obstore cannot make a request of the settings of the environment" in done.stderr
