"""A finished directory is signed with its provenance, and nothing in it changes unseen: `attest`, `--attestation`."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import model_signing
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1.statement import Statement

import shardctl
from shardctl.base.errors import DestinationError, SourceError
from shardctl.cli.program import run
from shardctl.tensors.record import RECORD, SIGNATURE, STATEMENT
from shardctl.verbs.verify import verify
from shardctl.verify import attestation

if TYPE_CHECKING:
    from pathlib import Path

SHARD = "shard-00002-model-00001-of-00001.safetensors"


def make_keys(folder: Path, name: str, key=None) -> None:
    """Write `name.pem` and `name.pub`."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / f"{name}.pem").write_bytes(private)
    (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


@pytest.fixture(scope="module")
def base(tmp_path_factory, source):
    """Holds a source, its result, a copy of that which is signed, and keys."""
    base = tmp_path_factory.mktemp("attestation")
    make_keys(base, "own")
    make_keys(base, "other")
    make_keys(base, "rsa", rsa.generate_private_key(65537, 2048))
    shutil.copytree(source, base / "source")
    shardctl.reshard(base / "source", base / "result", tp=2)
    shutil.copytree(base / "result", base / "signed")
    assert run(["attest", str(base / "signed"), "--key", str(base / "own.pem")]) == 0
    return base


@pytest.fixture
def signed(base, tmp_path):
    return shutil.copytree(base / "signed", tmp_path / "signed")


@pytest.fixture
def check(base, capsys):
    """Gives the exit code and the output of `verify --attestation`."""

    def call(directory, *options, key="own"):
        capsys.readouterr()
        code = run(["verify", str(directory), "--attestation", "--public-key", str(base / f"{key}.pub"), *options])
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def sign_by_library(directory: Path, base: Path) -> None:
    """Sign what is there as the library does by itself."""
    signer = model_signing.signing.Config().use_elliptic_key_signer(private_key=base / "own.pem")
    signer.set_hashing_config(model_signing.hashing.Config().set_ignored_paths(paths=[SIGNATURE]))
    signer.sign(directory, directory / SIGNATURE)


def test_the_statement_is_one_of_in_toto_with_slsa_provenance(base):
    said = json.loads((base / "signed" / STATEMENT).read_text())
    statement = Statement.copy_from_pb(json_format.ParseDict(said, Statement([], "", {}).pb))
    statement.validate()
    provenance = json_format.ParseDict(said["predicate"], provenance_pb2.Provenance())
    record = json.loads((base / "signed" / RECORD).read_text())
    assert said["predicateType"] == "https://slsa.dev/provenance/v1"
    assert provenance.run_details.builder.version["shardctl"] == shardctl.__version__
    (source,) = provenance.build_definition.resolved_dependencies
    assert source.digest == {"shardctl1": record["source_digest"].removeprefix("shardctl1:")}
    assert json_format.MessageToDict(provenance.build_definition.external_parameters)["mesh"] == "tp2"
    subjects = {each.name: dict(each.digest) for each in statement.pb.subject}
    digest = shardctl.digest(base / "source").digest
    assert subjects.pop("tensors") == {"shardctl1": digest.removeprefix("shardctl1:")}
    hashed = model_signing.hashing.hash(base / "result").resource_descriptors()
    assert subjects == {row.identifier: {"sha256": row.digest.digest_hex} for row in hashed}
    assert {RECORD, SHARD, "config.json"} < {*subjects}


def test_a_signed_result_is_verified_by_shardctl_and_by_the_library(base, check):
    directory = base / "signed"
    code, said = check(directory)
    assert (code, said.splitlines()[0][:14]) == (0, "ok: signed by ")
    code, said = check(directory, "--level", "full", "--against", str(base / "source"), "--json")
    document = json.loads(said)
    assert (code, document["unchecked"]) == (0, [])
    first = document["levels"][0]
    assert (first["name"], first["status"], first["attestation"]["files"]) == ("attestation", "passed", 6)
    assert first["attestation"]["digest"] == document["digest"]
    library = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=base / "own.pub")
    library.verify(directory, directory / SIGNATURE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda place: flip_byte(place / SHARD), f"{SHARD} is not the file that"),
        (lambda place: flip_byte(place / STATEMENT), f"{STATEMENT} is not the file that"),
        (lambda place: flip_byte(place / RECORD), f"{RECORD} is not the file that"),
        (lambda place: flip_byte(place / SIGNATURE), SIGNATURE),
        (lambda place: (place / SIGNATURE).write_text("[" * 100_000), "is not a signature of files"),
        (lambda place: (place / "modeling_x.py").write_text("x = 1\n"), "modeling_x.py was added after"),
        (lambda place: (place / "sub").mkdir() or (place / "sub/x").touch(), "sub/x was added after"),
        (lambda place: (place / "tail").symlink_to(place.parent), "the signature does not cover tail"),
        (lambda place: (place / "config.json").unlink(), "config.json is missing"),
        (lambda place: (place / STATEMENT).unlink(), f"{STATEMENT} is missing"),
    ],
)
def test_no_change_is_unseen_and_nothing_is_read_after_it(signed, check, change, message):
    change(signed)
    code, said = check(signed)
    assert code == 3
    assert message in said
    assert "structure    skipped" in said


def test_a_flipped_bit_of_the_signature_is_never_accepted(signed, check):
    path = signed / SIGNATURE
    data = path.read_bytes()
    for at in range(0, len(data), len(data) // 10):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        code, said = check(signed)
        assert code == 3, (at, said)


def test_what_the_hub_and_git_add_does_not_count(signed, check):
    for name in (".gitattributes", ".cache/huggingface/download/config.json.metadata"):
        (signed / name).parent.mkdir(parents=True, exist_ok=True)
        (signed / name).write_text("x\n")
    assert check(signed)[0] == 0


def test_links_of_a_cache_count_as_their_files(signed, tmp_path, check):
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(signed.iterdir()):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    assert check(snapshot)[0] == 0
    flip_byte(snapshot / SHARD)
    assert check(snapshot)[0] == 3


def test_whom_to_trust_must_be_named(base, signed, check, capsys):
    assert check(signed, key="other")[0] == 3
    key = ["--public-key", base / "own.pub"]
    for options, hint in (
        (["--attestation"], "does not say whom to trust"),
        (["--attestation", "--identity", "me"], "one key or of one identity"),
        (["--attestation", "--identity", "me", "--issuer", "https://x", *key], "one key or of one identity"),
        (key, "only with --attestation"),
        (["--attestation", "--public-key", base / "nothing.pub"], "cannot be read"),
        (["--attestation", "--public-key", base / "rsa.pub"], "is not a public key"),
        (["--attestation", "--public-key", base / "own.pem"], "is not a public key"),
    ):
        assert run(["verify", str(signed), *map(str, options)]) == 2
        assert hint in capsys.readouterr().err
    assert run(["verify", str(signed / SHARD), "--attestation", *map(str, key)]) == 2
    (signed / SIGNATURE).unlink()
    assert check(signed)[0] == 4


def test_sigstore_out_of_reach_is_no_verdict(signed, capsys, monkeypatch):
    from sigstore.errors import TUFError  # the tests run offline, but one machine has a cache of its keys

    def refuse(*_, **__):
        raise TUFError("offline")

    monkeypatch.setattr(model_signing.verifying.Config, "use_sigstore_verifier", refuse)
    monkeypatch.setattr(model_signing.signing.Config, "use_sigstore_signer", refuse)
    assert run(["verify", str(signed), "--attestation", "--identity", "me", "--issuer", "https://x"]) == 7
    assert "NOT VERIFIED" in capsys.readouterr().out
    (signed / SIGNATURE).unlink()
    assert run(["attest", str(signed), "--sigstore"]) == 7


def test_a_signature_of_the_library_is_enough_and_says_less(base, signed, check):
    for name in (STATEMENT, SIGNATURE):
        (signed / name).unlink()
    sign_by_library(signed, base)
    code, said = check(signed)
    assert code == 0
    assert f"the signature covers no {STATEMENT}" in said


def test_a_signed_statement_must_fit_its_files(base, signed, check):
    said = json.loads((signed / STATEMENT).read_text())
    other = {**said, "subject": [*said["subject"][:-1], {"name": "tokenizer.json", "digest": {"sha256": "0" * 64}}]}
    (signed / STATEMENT).write_text(json.dumps(other))
    (signed / SIGNATURE).unlink()
    sign_by_library(signed, base)
    code, text = check(signed)
    assert code == 3
    assert "do not say the same of tokenizer.json" in text
    said["subject"][0]["digest"] = {"shardctl1": "0" * 32}
    (signed / STATEMENT).write_text(json.dumps(said))
    (signed / SIGNATURE).unlink()
    sign_by_library(signed, base)
    assert check(signed)[0] == 0
    code, text = check(signed, "--level", "full")
    assert code == 3
    assert f"{STATEMENT} says shardctl1:000" in text


def test_the_two_files_are_no_part_of_the_checkpoint(base, signed, tmp_path):
    result = shardctl.verify(signed, level="full", against=base / "source")
    assert result.ok
    assert not result.findings
    assert shardctl.digest(signed).digest == shardctl.digest(base / "source").digest
    assert shardctl.diff(signed, base / "source").equal
    shardctl.reshard(signed, tmp_path / "back", to="hf")
    assert not {STATEMENT, SIGNATURE} & {path.name for path in (tmp_path / "back").iterdir()}
    shardctl.reshard(base / "source", signed, tp=2, overwrite=True)
    assert not {STATEMENT, SIGNATURE} & {path.name for path in signed.iterdir()}


def test_only_what_is_right_is_signed_and_only_once(base, signed, capsys):
    key = ["--key", str(base / "own.pem")]

    def attest(directory, *options):
        capsys.readouterr()
        return run(["attest", str(directory), *options]), capsys.readouterr().err

    assert attest(signed, *key)[0] == 6
    (signed / SIGNATURE).unlink()
    assert attest(signed, *key)[0] == 0  # a statement that an interrupted run left is written again
    (signed / SIGNATURE).unlink()
    (signed / STATEMENT).write_text('{"predicate": {}}')
    assert attest(signed, *key)[0] == 6
    (signed / STATEMENT).unlink()
    assert attest(signed)[0] == attest(signed, *key, "--sigstore")[0] == 2
    assert attest(signed, "--key", str(base / "rsa.pem"))[0] == 2
    assert attest(base / "source", *key)[0] == 4
    (signed / "link").symlink_to(signed / "config.json")
    assert attest(signed, *key)[0] == 4
    (signed / "link").unlink()
    shutil.copy(base / "own.pem", signed)
    assert attest(signed, "--key", str(signed / "own.pem"))[0] == 2
    (signed / "own.pem").unlink()
    flip_byte(signed / SHARD)
    assert attest(signed, *key)[0] == 3
    assert not (signed / STATEMENT).exists()
    assert not (signed / SIGNATURE).exists()


def test_what_changes_while_it_is_verified_is_not_signed(base, tmp_path, monkeypatch):
    directory = shutil.copytree(base / "result", tmp_path / "result")
    key = base / "own.pem"

    def verify_and_change(*args, **keywords):
        found = verify(*args, **keywords)
        flip_byte(directory / SHARD)
        return found

    with monkeypatch.context() as patched:
        patched.setattr("shardctl.verbs.attest.verify", verify_and_change)
        with pytest.raises(SourceError, match="changed while they were verified"):
            shardctl.attest(directory, key=key)
    flip_byte(directory / SHARD)

    def fill_disk(path, content):
        path.write_bytes(content[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(attestation, "write_file", fill_disk)
        with pytest.raises(DestinationError, match="No space"):
            shardctl.attest(directory, key=key)
    assert not {SIGNATURE, STATEMENT} & {path.name for path in directory.iterdir()}

    with monkeypatch.context() as patched:  # links are refused before hours of verification
        patched.setattr("shardctl.verbs.attest.verify", None)
        (directory / "link").symlink_to(tmp_path)
        with pytest.raises(SourceError, match="link is a link or a special file"):
            shardctl.attest(directory, key=key)
        (directory / "link").unlink()


def test_a_link_to_the_directory_may_be_given_and_warnings_are_said(base, tmp_path, capsys, check):
    directory = shutil.copytree(base / "result", tmp_path / "result")
    (tmp_path / "latest").symlink_to(directory)
    (directory / "notes").write_text("not part of it")
    assert run(["attest", str(tmp_path / "latest"), "--key", str(base / "own.pem"), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["warnings"] == ["notes is not part of this checkpoint"]
    assert "warning: notes is not part of this checkpoint" in said.err
    assert check(tmp_path / "latest")[0] == 0
    (directory / "absent").symlink_to(tmp_path / "absent")
    code, text = check(directory)
    assert code == 3
    assert "absent is not a file" in text
    assert "not of the key" not in text


def test_files_of_any_name_are_signed_or_refused(base, tmp_path, capsys, check):
    directory = shutil.copytree(base / "result", tmp_path / "result")
    (directory / "notes:0:5").write_text("named like a piece of a file")
    attest = ["attest", str(directory), "--key", str(base / "own.pem")]
    assert run(attest) == 0
    assert check(directory)[0] == 0
    (directory / "notes:0:5").write_text("changed")
    code, text = check(directory)
    assert (code, "notes:0:5 is not the file that" in text) == (3, True)
    try:
        (directory / os.fsdecode(b"\xff")).write_text("")
    except OSError:
        pytest.skip("this file system has names in UTF-8 alone")
    code, text = check(directory)
    assert (code, "name in UTF-8" in text) == (3, True)
    (directory / SIGNATURE).unlink()
    capsys.readouterr()
    assert run(attest) == 4
    assert "is not UTF-8" in capsys.readouterr().err


def test_from_python(base, tmp_path):
    directory = shutil.copytree(base / "result", tmp_path / "result")
    done = shardctl.attest(directory, key=base / "own.pem")
    assert done.verdict.startswith("signed: 6 files")
    assert done.to_dict()["digest"] == done.digest == shardctl.digest(directory).digest
    assert shardctl.verify(directory, attestation=True, public_key=base / "own.pub").ok
