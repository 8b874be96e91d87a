"""Says where a finished checkpoint comes from, and signs it: what makes its origin provable to somebody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.errors import Mismatch, SourceError, UsageError
from shardctl.base.result_view import ResultView
from shardctl.base.value import value_class
from shardctl.base.workers import ExecutionOptions
from shardctl.options import VerifyOptions
from shardctl.storage.bounded_text import RECORD_TEXT, read_file
from shardctl.storage.path_overlap import is_same_or_inside
from shardctl.tensors.record import RECORD, SIGNATURE, STATEMENT, parse_record
from shardctl.verbs.verify import find_signed_directory, verify
from shardctl.verify.attestation import list_file_states, load_signer, require_unsigned, sign_directory

if TYPE_CHECKING:
    from pathlib import Path


@value_class
class AttestResult(ResultView):
    """What was signed, and with which key."""

    path: str
    statement: str
    """The file that says where the checkpoint comes from."""
    signature: str
    """The file with the signature of all others."""
    files: int
    """Files that are signed, the statement included."""
    nbytes: int
    """Of these files."""
    key_hash: str
    """SHA-256 of the public key in PEM; empty for an identity."""
    digest: str
    """Of the elements, computed now."""
    source_digest: str
    """Of the source, as the record has it."""
    unchecked: tuple[str, ...]
    """What the verification before the signature left open."""
    warnings: tuple[str, ...] = ()
    """What that verification warned of, such as files that are signed and not part of the checkpoint."""


def attest(
    path: str | Path, *, key: Path | None = None, sigstore: bool = False, effort: ExecutionOptions | None = None
) -> AttestResult:
    """Verify the result of a conversion at `path`, write a statement of its origin, and sign all its files.

    Raises UsageError unless there is one signer, a key or an identity; Mismatch if the verification finds something;
    SourceError if it is no finished result; DestinationError if it is signed already.
    """
    if (key is not None) is sigstore:
        raise UsageError("one signer is needed: --key FILE or --sigstore", hint="name one of the two")
    effort = effort or ExecutionOptions()
    directory = find_signed_directory(path)
    if not (directory / RECORD).is_file():
        raise SourceError(
            f"{path} has no {RECORD}: attest signs what reshard wrote",
            hint="model_signing sign, of the library model-signing, signs any other directory",
        )
    require_unsigned(directory)
    if key is not None and is_same_or_inside(key, directory):
        raise UsageError(f"{key} is in {path}, so that others would get the private key", hint="move it elsewhere")
    states = list_file_states(directory)
    signer = load_signer(key)
    found = verify(path, VerifyOptions(level="full"), effort=effort)
    if found.trouble is not None:
        raise found.trouble
    if not found.ok:
        raise Mismatch(f"{path} is not signed: {found.verdict}", hint=f"shardctl verify {path} --level full says more")
    record = parse_record(read_file(directory / RECORD, RECORD_TEXT))
    signed = sign_directory(directory.resolve(), record, signer, effort.threads, states)
    return AttestResult(
        path=str(path),
        statement=str(directory / STATEMENT),
        signature=str(directory / SIGNATURE),
        files=signed.files,
        nbytes=signed.nbytes,
        key_hash=signed.key_hash,
        digest=found.digest,
        source_digest=record.source_digest,
        unchecked=found.unchecked,
        warnings=tuple(each.message for each in found.findings if each.severity == "warning"),
    )
