"""Defines the command line, one file per verb, which parses, calls one function, and renders its result."""

import gc
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the program: read `sys.argv`, talk on stderr, answer on stdout, end the process with the exit code."""
    gc.set_threshold(100_000)  # manifests are millions of objects without cycles; scanning them took a third of it
    try:
        from shardctl.cli.program import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    gc.freeze()  # the end of the process frees what it holds, so that Python need not look for cycles in it before
    sys.exit(code)
