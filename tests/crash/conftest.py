"""The runner, and a fresh site for each test."""

import os
import tempfile
from pathlib import Path

import pytest
from crash_site import Runner, Site, checkpoint


@pytest.fixture(scope="session")
def runner():
    runner = Runner()
    yield runner
    runner.close()


@pytest.fixture
def site(tmp_path, runner):
    """In memory where that can be: only the order of the calls matters, and thousands of syncs would take minutes."""
    memory = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it
    if not os.access(memory, os.W_OK):
        checkpoint(tmp_path / "source")
        yield Site(tmp_path, runner)
        return
    with tempfile.TemporaryDirectory(dir=memory) as place:
        checkpoint(Path(place, "source"))
        yield Site(Path(place), runner)
