"""Defines the command line of `shardctl attest`."""

from pathlib import Path
from typing import Annotated

from shardctl.cli import arguments, streams
from shardctl.options.declaration import CommandOption, HelpPanel, PathAccess
from shardctl.options.reshard_options import Threads

COMMON = ("--key", "--sigstore", "--json")
"""What -h and --help show."""
PAGE = "docs/verifying.md"
"""Where it is explained."""

EXAMPLES = """
Examples:
  shardctl attest ./llama-tp4 --key key.pem
  shardctl attest ./llama-tp4 --sigstore --json
"""


def attest(
    src: Annotated[str, arguments.declare_place("DIR", "A local directory that reshard wrote.")],
    *,
    key: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Sign with this private key: elliptic curve, PEM, without a password.",
            brief="Sign with this private key",
            metavar="FILE",
            access=PathAccess.READ,
        ),
    ] = None,
    sigstore: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "Sign with an identity through Sigstore, online: that of the CI job, or of whoever logs in with a browser. "
            "The identity becomes public.",
            brief="Sign with an identity through Sigstore",
        ),
    ] = False,
    json: arguments.Json = False,
    threads: Threads = None,
) -> None:
    """Verify a finished checkpoint, state where it comes from, and sign all its files.

    Writes provenance.intoto.json and model.sig into the directory.
    """
    from shardctl.cli.progress import watch_effort
    from shardctl.report import documents
    from shardctl.report.digests import render_attestation
    from shardctl.verbs.attest import attest as verb

    with watch_effort("attest", threads) as work:
        done = verb(src, key=key, sigstore=sigstore, effort=work)
    streams.print_warnings(done.warnings)
    if json:
        streams.print_document(documents.build_attest_document(done))
    else:
        streams.print_view(render_attestation(done))
