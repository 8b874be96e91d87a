"""What all tests share."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("shardctl", deadline=None)  # a busy machine is not a failure
settings.load_profile("shardctl")

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    # A shell's background job ignores Ctrl-C, and one under nohup the end of its terminal; so would every program that
    # a test starts and interrupts.
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

WRONG_ON_PURPOSE: list[str] = []
"""The test that now makes wrong results, if it is marked so."""
SLOW = Path(__file__).with_name("slow_tests.txt")
"""Files and tests that took more than five seconds on a quiet machine, one a line; what follows `[` may be left out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, so that `-m "not slow"` leaves them out."""
    slow = {line for line in SLOW.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}
    for item in items:
        if item.nodeid in slow or item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def _every_result_passes_its_own_verify() -> Iterator[None]:
    """Fail the test in which this process writes a directory or a prefix that `verify` finds wrong, from headers alone.

    `wrong_result` marks tests that do so on purpose.
    """
    from shardctl.conversion import bucket_output
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

    assemble, convert = reshard.assemble_result, bucket_output.convert_into_bucket
    with pytest.MonkeyPatch.context() as patch:
        for verb in (reshard, finish):
            patch.setattr(verb, "assemble_result", assemble_and_verify)
        patch.setattr(bucket_output, "convert_into_bucket", convert_and_verify)
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
