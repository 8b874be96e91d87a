"""Defines the command line of `shardctl finish`."""

import shlex
import time
from typing import Annotated

from shardctl.cli import arguments, streams
from shardctl.cli.signature import DESTINATION

COMMON = ("--json",)
"""What -h and --help show."""
PAGE = "docs/scale.md"
"""Where it is explained."""

EXAMPLES = """
Examples:
  shardctl finish ./llama-tp8
  shardctl finish ./llama-tp8 --json
"""


def finish(
    dst: Annotated[str, arguments.declare_place(DESTINATION, "The destination that the workers write to.")],
    *,
    json: arguments.Json = False,
) -> None:
    """Check that all workers of reshard --worker are done, write shardctl.json, and publish the result.

    Exits with 3 and names the workers if some are missing, with 4 if none has begun, and with 6 if one is running.
    """
    from shardctl.report import documents
    from shardctl.report.conversion import render_finished
    from shardctl.verbs.finish import finish as verb

    began = time.monotonic()
    done = verb(dst)
    seconds = time.monotonic() - began
    streams.print_warnings(done.warnings)
    if json:
        streams.print_document(documents.build_finish_document(done, seconds))
    else:
        streams.print_view(render_finished(done, seconds))
        streams.print_progress(f"next: shardctl verify {shlex.quote(dst)} --level full\n")
