"""Signs a finished directory with the library model-signing, and checks such a signature against trusted signers.

The library hashes, signs and verifies: shardctl has no cryptography of its own. What a signature does not cover is a
finding here, and so is a statement of provenance that does not fit the files that were signed with it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
import time
from base64 import b64decode
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import (
    AccessError,
    DestinationError,
    SourceError,
    TransientError,
    UnsupportedError,
    UsageError,
    format_first_few,
)
from shardctl.base.extras import format_install_command
from shardctl.base.value import value_class
from shardctl.storage.bounded_text import RECORD_TEXT, parse_json, read_file
from shardctl.storage.durable import sync_directory, translate_os_errors, write_file
from shardctl.tensors.record import SIGNATURE, STATEMENT
from shardctl.verify.finding import CheckFinding
from shardctl.verify.level import ATTESTATION, LevelResult, SignatureCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardctl.tensors.record import CheckpointRecord

_UNSIGNED_PATHS: Final = (SIGNATURE, ".cache/huggingface")
"""What a signature leaves out: itself, and what `hf download --local-dir` notes."""
_GIT_PATHS: Final = (".git", ".gitattributes", ".github", ".gitignore")
"""What model-signing leaves out by default: no loader reads them, and the Hub adds some."""
_STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
_BUILD_TYPE: Final = "urn:shardctl:reshard:1"
"""The meaning of a statement's parameters, which `docs/verifying.md` gives."""
_BUILDER: Final = "urn:shardctl"
_TENSORS: Final = "tensors"
"""The subject of a statement that is no file: all elements, whatever the layout."""
_OTHER_FILES: Final = "Signature mismatch"
"""How the library's message begins if the signature holds, and the files are others."""
_SHARD_PATTERN: Final = re.compile(r":[0-9]+:[0-9]+$")
"""What follows the name of a file that was signed in pieces."""
_MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What parsers raise for a signature that is none."""


@value_class
class TrustedSigner:
    """Whose signature counts: the owner of a key, or an identity for which an issuer vouches (Sigstore)."""

    public_key: Path | None = None
    identity: str = ""
    issuer: str = ""

    def __str__(self) -> str:
        return f"the key {self.public_key}" if self.public_key is not None else f"{self.identity} ({self.issuer})"


@value_class
class SignedDirectory:
    """What was signed."""

    files: int
    """Files, the statement included."""
    nbytes: int
    """Of those files."""
    key_hash: str
    """SHA-256 of the public key in PEM, as the signature has it; empty for an identity."""


def build_statement(record: CheckpointRecord, sha256: Mapping[str, str]) -> dict[str, Any]:
    """Build the in-toto statement of a finished directory, with a predicate of SLSA provenance.

    `sha256` are the hashes of its files. https://slsa.dev/spec/v1.0/provenance says what the fields mean.
    """
    mesh = str(record.mesh) if record.mesh is not None else ""
    address = {"uri": record.source["address"]} if "address" in record.source else {}
    return {
        "_type": _STATEMENT_TYPE,
        "subject": [
            {"name": _TENSORS, "digest": _split_digest(record.digest)},
            *({"name": path, "digest": {"sha256": value}} for path, value in sorted(sha256.items())),
        ],
        "predicateType": _PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {
                    "format": record.source["format"],
                    "layout": record.layout,
                    "mesh": mesh,
                    "options": dict(record.options),
                },
                "internalParameters": {"plan": record.plan},
                "resolvedDependencies": [{"name": "source", "digest": _split_digest(record.source_digest)} | address],
            },
            "runDetails": {"builder": {"id": _BUILDER, "version": {"shardctl": record.version}}},
        },
    }


def _split_digest(digest: str) -> dict[str, str]:
    """Write a digest as in-toto has it: by the name of its algorithm."""
    algorithm, _, value = digest.partition(":")
    return {algorithm: value}


def _join_digest(digests: Mapping[str, str]) -> str:
    ((algorithm, value),) = digests.items()
    return f"{algorithm}:{value}"


def require_unsigned(directory: Path) -> None:
    """Raise DestinationError for a directory that has a signature, or a statement that shardctl did not write."""
    if os.path.lexists(directory / SIGNATURE):
        raise DestinationError(f"{directory} already has a {SIGNATURE}", hint="remove it to sign the directory again")
    statement = directory / STATEMENT
    if not os.path.lexists(statement):
        return
    try:
        said = parse_json(read_file(statement, RECORD_TEXT), str(statement), RECORD_TEXT)
        own = said["predicate"]["buildDefinition"]["buildType"] == _BUILD_TYPE and not statement.is_symlink()
    except (SourceError, *_MALFORMED):
        own = False
    if not own:
        raise DestinationError(f"{statement} was not written by shardctl", hint="move it away first")


def load_signer(key: Path | None) -> Any:  # noqa: ANN401 - the library's
    """Load the private key that signs, or without one what signs with an identity through Sigstore.

    Raises UsageError for a key that cannot sign.
    """
    signing = _import_library().signing
    if key is None:
        with _translate_sigstore_errors():
            return signing.Config().use_sigstore_signer(use_ambient_credentials=True)
    hint = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out key.pem makes one"
    return _load_key(lambda: signing.Config().use_elliptic_key_signer(private_key=key), key, "private", hint)


def list_file_states(directory: Path) -> dict[str, tuple[int, ...]]:
    """List what changes when a file of a directory is written or replaced; raises SourceError for what is not a file.

    It is compared after the files were verified and signed, which takes long.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in _list_files(directory):
        if path == STATEMENT:
            continue
        with translate_os_errors(directory, "listing"):
            state = (directory / path).lstat()
        if not stat.S_ISREG(state.st_mode):
            raise SourceError(
                f"{directory} cannot be signed: {path} is a link or a special file",
                hint="put a copy of it in its place",
            )
        if not _is_utf8(path):
            raise SourceError(f"{directory} cannot be signed: the name of {path} is not UTF-8", hint="rename it")
        found[path] = (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return found


def sign_directory(
    directory: Path,
    record: CheckpointRecord,
    signer: Any,  # noqa: ANN401 - the library's
    threads: int,
    states: Mapping[str, tuple[int, ...]],
) -> SignedDirectory:
    """Write the statement, sign all files with it, and write the signature.

    `states` are those of the files before they were verified. Raises SourceError for a directory with links or special
    files, and if files change meanwhile: then it holds neither statement nor signature.
    """
    require_unsigned(directory)
    library = _import_library()
    hashing = library.hashing.Config().use_file_serialization(max_workers=threads)
    hashing.set_ignored_paths(paths=(*_UNSIGNED_PATHS, STATEMENT))
    try:
        found = {row.identifier: row.digest.digest_hex for row in hashing.hash(directory).resource_descriptors()}
    except ValueError as error:
        raise SourceError(f"{directory} cannot be signed: {error}", hint="sign a directory of files") from error
    content = (json.dumps(build_statement(record, found), indent=1) + "\n").encode()
    try:
        with translate_os_errors(directory, "writing"):
            write_file(directory / STATEMENT, content)
        hashing.set_ignored_paths(paths=_UNSIGNED_PATHS)
        signer.set_hashing_config(hashing)
        with tempfile.TemporaryDirectory() as folder, _translate_sigstore_errors():
            signer.sign(directory, Path(folder, SIGNATURE))
            signature = Path(folder, SIGNATURE).read_bytes()
        payload, bundle = _read_payload(signature)
        signed = _list_resources(payload)
        _require_same_files(directory, states, signed, found)
        with translate_os_errors(directory, "writing"):
            write_file(directory / SIGNATURE, signature)
            sync_directory(directory)
    except BaseException:
        for name in (SIGNATURE, STATEMENT):
            with suppress(OSError):  # the first error says why
                (directory / name).unlink(missing_ok=True)
        raise
    key = bundle["verificationMaterial"].get("publicKey") or {}
    nbytes = sum((directory / path).stat().st_size for path in signed)
    return SignedDirectory(len(signed), nbytes, key.get("hint") or "")


def _list_resources(payload: Mapping[str, Any]) -> dict[str, str]:
    """List the hashes of files, or of their pieces, that a signature is of."""
    return {str(row["name"]): str(row["digest"]) for row in payload["predicate"]["resources"]}


def _require_same_files(
    directory: Path, states: Mapping[str, tuple[int, ...]], signed: Mapping[str, str], stated: Mapping[str, str]
) -> None:
    """Raise SourceError if a signature is of other files than were verified, or than the statement, which is one."""
    same = {path: value for path, value in signed.items() if path != STATEMENT} == stated
    if not same or list_file_states(directory) != states:
        raise SourceError(
            f"files of {directory} changed while they were verified and signed", hint="run the same command again"
        )


def _find_file(name: str, payload: Mapping[str, Any]) -> str:
    """Return the file of a resource, which may be a piece of it."""
    pieces = payload["predicate"]["serialization"]["method"] == "shards"
    return _SHARD_PATTERN.sub("", name) if pieces else name


def check_signature(directory: Path, signers: Sequence[TrustedSigner], threads: int) -> LevelResult:
    """Check every file of a directory against the signature in it, which has to be of one of the `signers`.

    Raises SourceError if there is no signature, UsageError for a public key that is none.
    """
    if not os.path.lexists(directory / SIGNATURE):
        raise SourceError(
            f"{directory} has no {SIGNATURE}, so nobody signed it", hint=f"shardctl attest {directory} signs it"
        )
    level, began = LevelResult(ATTESTATION), time.monotonic()
    try:
        with _translate_sigstore_errors():
            level.add(_check_signature(directory, load_verifiers(signers), threads, level))
    except TransientError as error:
        level.give_up(error)
    except OSError as error:
        kind = AccessError if isinstance(error, PermissionError) else SourceError
        raise kind(f"{error.filename or directory} cannot be read: {error.strerror}") from error
    level.seconds = time.monotonic() - began
    return level


def _check_signature(
    directory: Path, verifiers: Sequence[tuple[TrustedSigner, Any]], threads: int, level: LevelResult
) -> Iterator[CheckFinding]:
    """Yield why a signature does not hold; otherwise say in `level` what it covers, and yield what it does not."""
    try:
        data = read_file(directory / SIGNATURE, RECORD_TEXT)
        payload, _ = _read_payload(data)
        signed = _list_resources(payload)
        _configure_hashing(payload, threads)
    except (SourceError, *_MALFORMED) as error:
        yield CheckFinding("error", ATTESTATION, f"{SIGNATURE} is not a signature of files: {error}", file=SIGNATURE)
        return
    special = [path for path in _list_files(directory) if not _is_signable(directory, path)]
    for path in special:  # the library would refuse the whole directory
        message = f"{path} is not a file with a name in UTF-8, so no signature covers it"
        yield CheckFinding("error", ATTESTATION, message, file=path)
    if special:
        return
    reasons = list[str]()
    for signer, verifier in verifiers:
        verifier.set_hashing_config(_configure_hashing(payload, threads))
        reason = _verify(verifier, directory, data)
        if reason is None:
            break
        if reason.startswith(_OTHER_FILES):  # the signature holds, so that what it lists is to be trusted
            yield from _list_changes(directory, payload, _configure_hashing(payload, threads), str(signer), reason)
            return
        reasons.append(f"it is not of {signer}: {reason}")
    else:
        message = f"the signature in {SIGNATURE} does not hold: {format_first_few(reasons)}"
        yield CheckFinding("error", ATTESTATION, message, file=SIGNATURE)
        return
    covered = {_find_file(name, payload): digest for name, digest in signed.items()}
    level.nbytes = sum((directory / path).stat().st_size for path in covered)
    level.attestation = SignatureCheck(str(signer), len(covered))
    for path in _list_files(directory):
        if path not in covered:
            yield CheckFinding("error", ATTESTATION, f"the signature does not cover {path}", file=path)
    if STATEMENT in covered:
        yield from _check_statement(directory, covered, level)
    else:
        level.notes.append(f"the signature covers no {STATEMENT}: where the files come from is not said")


def _verify(verifier: Any, directory: Path, signature: bytes) -> str | None:  # noqa: ANN401 - the library's
    """Return why the library refuses a signature; None if it holds for the files of the directory."""
    from cryptography.exceptions import InvalidSignature
    from sigstore.dsse import InvalidEnvelope
    from sigstore.errors import VerificationError
    from sigstore.models import InvalidBundle

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):  # it prints warnings of old formats
        copy = Path(folder, SIGNATURE)
        copy.write_bytes(signature)  # the bytes that are understood here are those that are verified
        try:
            verifier.verify(directory, copy)
        except InvalidSignature:
            return "what was signed was changed, or signed with another key"
        except (VerificationError, InvalidBundle, InvalidEnvelope, *_MALFORMED) as error:
            return str(error) or type(error).__name__
    return None


def _list_changes(
    directory: Path,
    payload: Mapping[str, Any],
    hashing: Any,  # noqa: ANN401 - the library's
    signer: str,
    reason: str,
) -> Iterator[CheckFinding]:
    """Yield the files that are not as they were signed."""
    signed = _list_resources(payload)
    try:
        found = {row.identifier: row.digest.digest_hex for row in hashing.hash(directory).resource_descriptors()}
    except ValueError as error:
        yield CheckFinding("error", ATTESTATION, str(error))
        return
    if found == signed:
        yield CheckFinding("error", ATTESTATION, f"files changed while they were read: {reason}")
    for name in sorted(found.keys() | signed.keys()):
        path = _find_file(name, payload)
        if name not in signed:
            yield CheckFinding("error", ATTESTATION, f"{path} was added after {signer} signed", file=path)
        elif name not in found:
            yield CheckFinding("error", ATTESTATION, f"{path} is missing; {signer} signed it", file=path)
        elif found[name] != signed[name]:
            yield CheckFinding("error", ATTESTATION, f"{path} is not the file that {signer} signed", file=path)


def _is_signable(directory: Path, path: str) -> bool:
    return _is_utf8(path) and ((directory / path).is_file() or (directory / path).is_dir())


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _list_files(directory: Path) -> Iterator[str]:
    """List the files that a signature has to cover, and links to directories, which the library does not follow."""
    ignored = {*_UNSIGNED_PATHS, *_GIT_PATHS}
    for folder, folders, files in os.walk(directory):
        here = Path(folder).relative_to(directory)
        folders[:] = [name for name in folders if (here / name).as_posix() not in ignored]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted((*files, *links)):
            path = (here / name).as_posix()
            if path not in ignored:
                yield path


def _check_statement(directory: Path, covered: Mapping[str, str], level: LevelResult) -> Iterator[CheckFinding]:
    """Yield where a signed statement contradicts the files that were signed with it; note its digests in `level`."""
    try:
        said = parse_json(read_file(directory / STATEMENT, RECORD_TEXT), STATEMENT, RECORD_TEXT)
        if said["predicate"]["buildDefinition"]["buildType"] != _BUILD_TYPE:
            level.notes.append(f"{STATEMENT} is not one of shardctl: it was not compared with the files")
            return
        hashes = {row["name"]: row["digest"] for row in said["subject"]}
        digest = _join_digest(hashes.pop(_TENSORS))
        source_digest = _join_digest(said["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"])
        files = {path: row["sha256"] for path, row in hashes.items()}
    except (SourceError, *_MALFORMED) as error:
        yield CheckFinding("error", ATTESTATION, f"{STATEMENT} is malformed: {error}", file=STATEMENT)
        return
    for path in sorted({path for path, _ in files.items() ^ covered.items()} - {STATEMENT}):
        yield CheckFinding(
            "error", ATTESTATION, f"{STATEMENT} and {SIGNATURE} do not say the same of {path}", file=path
        )
    assert level.attestation is not None  # noqa: S101 - the caller has set it
    level.attestation = replace(level.attestation, digest=digest, source_digest=source_digest)


def _read_payload(signature: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what a Sigstore bundle says of files, whether or not it is signed, and the bundle."""
    bundle = parse_json(signature, SIGNATURE, RECORD_TEXT)
    payload = b64decode(bundle["dsseEnvelope"]["payload"], validate=True)
    return parse_json(payload, SIGNATURE, RECORD_TEXT), bundle


def _configure_hashing(payload: Mapping[str, Any], threads: int) -> Any:  # noqa: ANN401 - the library's
    """Configure how files are hashed, as the signature says; links of a cache of the Hub count as what they lead to."""
    config, how = _import_library().hashing.Config(), payload["predicate"]["serialization"]
    if how["method"] == "shards":
        config.use_shard_serialization(
            hashing_algorithm=how["hash_type"], shard_size=int(how["shard_size"]), max_workers=threads
        )
    else:
        config.use_file_serialization(hashing_algorithm=how["hash_type"], max_workers=threads)
    return config.set_ignored_paths(paths=_UNSIGNED_PATHS).set_allow_symlinks(True)


def load_verifiers(signers: Sequence[TrustedSigner]) -> list[tuple[TrustedSigner, Any]]:
    """Load what checks the signatures of each signer.

    Raises UsageError for a key that is none, TransientError where Sigstore cannot be reached.
    """
    with _translate_sigstore_errors():
        return [(signer, _load_verifier(signer)) for signer in signers]


def _load_verifier(signer: TrustedSigner) -> Any:  # noqa: ANN401 - the library's
    """Load what checks the signatures of a signer; raises UsageError for a key that is none."""
    verifying = _import_library().verifying
    key = signer.public_key
    if key is None:
        return verifying.Config().use_sigstore_verifier(identity=signer.identity, oidc_issuer=signer.issuer)
    hint = "openssl pkey -in key.pem -pubout -out key.pub writes the public key of a private one"
    return _load_key(lambda: verifying.Config().use_elliptic_key_verifier(public_key=key), key, "public", hint)


def _load_key(load: Callable[[], Any], key: Path, kind: str, hint: str) -> Any:  # noqa: ANN401 - the library's
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load()
    except OSError as error:
        raise UsageError(f"{key} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{key} is not a {kind} key of P-256, P-384 or P-521 in PEM, without a password", hint=hint
        ) from error


def _import_library() -> Any:  # noqa: ANN401 - a module
    try:
        import model_signing
    except ImportError as error:
        raise UnsupportedError(
            f"signatures need model-signing: {error}", hint=format_install_command("sign")
        ) from error
    return model_signing


@contextmanager
def _translate_sigstore_errors() -> Iterator[None]:
    """Turn failures of Sigstore's services, and of who signs there, into errors that a user can act on."""
    _import_library()
    from requests import RequestException
    from sigstore import errors, oidc

    try:
        yield
    except (errors.NetworkError, errors.TUFError, errors.MetadataError, errors.RootError, RequestException) as error:
        raise TransientError(f"Sigstore cannot be reached: {error}", hint="run the same command again") from error
    except (oidc.IdentityError, oidc.IssuerError, oidc.ExpiredIdentity) as error:
        raise AccessError(f"Sigstore does not accept the identity: {error}") from error
