"""Defines the command line of `shardctl digest`."""

import re
from typing import Annotated, Final, Literal

from shardctl.base.errors import UsageError
from shardctl.cli import arguments, streams
from shardctl.options import SourceOptions
from shardctl.options.declaration import CommandOption, HelpPanel
from shardctl.options.reshard_options import HostMemory, Threads
from shardctl.tensors.mesh import Mesh

_DIGEST_PATTERN: Final = re.compile(r"shardctl1:[0-9a-f]{32}")

COMMON = ("--expect", "--tensors", "--as", "--tp", "--json")
"""What -h and --help show."""
PAGE = "docs/guide.md"
"""Where it is explained."""

EXAMPLES = """
Examples:
  shardctl digest ./llama --tensors
  shardctl digest ./llama --as vllm --tp 8 --json
  shardctl digest ./llama --expect shardctl1:5bd4ca5bed2343b650ea5dd61b1ee693
"""


def digest(
    src: arguments.Source,
    *,
    tensors: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "Print the digest of every tensor as well.",
            brief="Print the digest of every tensor as well",
        ),
    ] = False,
    expect: Annotated[
        str | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Exit with 3 unless this is the digest.",
            brief="Exit with 3 unless this is the digest",
            metavar="DIGEST",
        ),
    ] = None,
    json: arguments.Json = False,
    engine: Annotated[
        Literal["vllm"] | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Print the SHA-256 of the arrays that the ranks of this engine hold, as its weight checker has them.",
            brief="Print SHA-256 sums of the arrays of vLLM's ranks",
            flag="--as",
        ),
    ] = None,
    tp: Annotated[
        int,
        CommandOption(
            HelpPanel.GENERAL,
            "With --as, tensor-parallel ranks.",
            brief="Tensor-parallel ranks of --as",
            metavar="N",
            least=1,
        ),
    ] = 1,
    pp: Annotated[int, CommandOption(HelpPanel.GENERAL, "With --as, pipeline stages.", metavar="N", least=1)] = 1,
    host_memory: HostMemory = 1 << 30,
    threads: Threads = None,
    source_options: arguments.StoredSource,
) -> int:
    """Print the digest of a checkpoint, which is the same for every layout of the same tensors."""
    from shardctl.cli.progress import watch_effort
    from shardctl.report import documents
    from shardctl.report.digests import render_digests
    from shardctl.verbs.digest import digest as verb

    if engine is not None:
        if expect is not None:
            raise UsageError("--as prints sums of arrays, and --expect compares a digest", hint="leave one of them out")
        return _print_engine_sums(src, Mesh.of(pp=pp, tp=tp), threads, source_options, host_memory, json=json)
    if (tp, pp) != (1, 1):
        raise UsageError("--tp and --pp are for --as: a digest is the same for every mesh", hint="add --as vllm")
    if expect is not None:
        _require_digest(expect)
    with watch_effort("digest", threads) as work:
        found = verb(src, source_options=source_options, effort=work, host_memory=host_memory)
    streams.print_warnings((*found.warnings, *found.unverified))
    if json:
        streams.print_document(documents.build_digest_document(found, tensors=tensors, expected=expect))
    else:
        streams.print_view(render_digests(found, tensors=tensors, expected=expect))
    return 0 if expect in {None, found.digest} else 3


def _print_engine_sums(
    src: str, mesh: Mesh, threads: int | None, source_options: SourceOptions, host_memory: int, *, json: bool
) -> int:
    """Print a line for each array and rank."""
    from shardctl.cli.progress import watch_effort
    from shardctl.conversion.engine_sums import sum_engine_arrays
    from shardctl.report import documents
    from shardctl.report.digests import render_engine_sums

    with watch_effort("digest", threads) as work:
        found = sum_engine_arrays(src, mesh, source_options=source_options, effort=work, host_memory=host_memory)
    streams.print_warnings(found.warnings)
    if json:
        streams.print_document(documents.build_engine_sums_document(src, found))
    else:
        streams.print_view(render_engine_sums(found))
    return 0


def _require_digest(text: str) -> None:
    """Raise UsageError for what is no digest, such as the empty output of a command that failed."""
    if not _DIGEST_PATTERN.fullmatch(text):
        raise UsageError(
            f"--expect {text!r:.60} is not a digest", hint="a digest is shardctl1: and 32 hexadecimal digits"
        )
