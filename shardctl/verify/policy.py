"""Reads a policy, which says what a checkpoint may hold and who may have signed it, and lists what breaks it.

Files are judged by their names and first bytes, whether or not the checkpoint uses them: a loader may.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError, UsageError
from shardctl.base.value import value_class
from shardctl.libraries.files.file_names import DCP_METADATA, SAFETENSORS, WEIGHT_SUFFIXES
from shardctl.libraries.safetensors.header import read_header
from shardctl.storage import read_bytes
from shardctl.storage.bounded_text import CONFIG_TEXT, RULE_TEXT, parse_toml, read_file, read_json, read_text
from shardctl.tensors.record import RECORD, STATEMENT
from shardctl.verify.attestation import TrustedSigner
from shardctl.verify.auxiliary_files import list_code_references
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest

POLICY: Final = "policy"
"""The level that a policy makes."""
_KEYS: Final = ("code_files", "auto_map", "pickles", "dtypes", "licenses", "signers")
_WORDS: Final[dict[str, frozenset[str] | None]] = {"allow": None, "forbid": frozenset()}
_HEAD_BYTES: Final = 256
"""Bytes by which a file is judged."""
_CODE_SUFFIXES: Final = frozenset(
    {
        *(".py", ".pyc", ".pyd", ".pyx", ".ipynb", ".so", ".dylib", ".dll", ".exe", ".jar", ".wasm", ".js"),
        *(".sh", ".bash", ".zsh", ".bat", ".cmd", ".ps1", ".pl", ".rb", ".lua", ".c", ".cpp", ".cu", ".ptx", ".cubin"),
    }
)
_CODE_SIGNATURES: Final = (b"#!", b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
"""Scripts, programs of Linux, Windows and macOS, and classes of Java."""
_PICKLE_SUFFIXES: Final = frozenset(
    {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill", ".distcp", ".nemo", ".npz"}
)
_PICKLE_SIGNATURE: Final = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04|\x93NUMPY.{0,200}'descr': *'[|<>=]?O", re.DOTALL)
"""A pickle of protocol 2 to 5, an archive, which may hold one, or an array of Python's objects."""
_SETTINGS_PATTERN: Final = re.compile(r"(.*/)?[^/]*config[^/]*\.json", re.IGNORECASE)
"""JSON files in which loaders look for `auto_map`."""
_CARD: Final = "README.md"
_FRONT_MATTER: Final = re.compile(rb"\s*---[ \t]*\r?\n(.{0,65536}?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)


@value_class
class VerificationPolicy:
    """What is allowed: None for everything, an empty set for nothing."""

    path: str
    code_files: frozenset[str] | None
    """Paths of files with code."""
    auto_map: frozenset[str] | None
    """Classes that configs may name, such as `modeling_x.XModel`."""
    pickles: frozenset[str] | None
    """Paths of files that are pickles or may hold one."""
    dtypes: frozenset[str] | None
    """Types of elements, as safetensors calls them."""
    licenses: frozenset[str] | None
    """Identifiers of licences, in lower case."""
    signers: tuple[TrustedSigner, ...]
    """Of whom one must have signed the directory; none for no signature."""


def read_policy(path: Path) -> VerificationPolicy:
    """Read a policy; raises UsageError for a file that is none, and for a key or a value that means nothing."""
    try:
        data = read_file(path, RULE_TEXT, UsageError)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    said = parse_toml(data, str(path), RULE_TEXT, UsageError)
    hint = f"the keys are {', '.join(_KEYS)}"
    for key in said:
        if key not in _KEYS:
            raise UsageError(f"{path} has the key {key!r}, which no policy has", hint=hint)
    if not said:
        raise UsageError(f"{path} says nothing", hint=hint)
    dtypes = _parse_names(said, "dtypes", path, words=False)
    for name in dtypes or ():
        if name.upper() not in BY_NAME:
            raise UsageError(f"{path}: dtypes has {name!r}", hint="types are named as in safetensors: BF16, F32, I8")
    licenses = _parse_names(said, "licenses", path, words=False)
    return VerificationPolicy(
        path=str(path),
        code_files=_parse_names(said, "code_files", path),
        auto_map=_parse_names(said, "auto_map", path),
        pickles=_parse_names(said, "pickles", path),
        dtypes=frozenset(name.upper() for name in dtypes) if dtypes is not None else None,
        licenses=frozenset(name.lower() for name in licenses) if licenses is not None else None,
        signers=_parse_signers(said, path),
    )


def _parse_names(said: Mapping[str, Any], key: str, path: Path, *, words: bool = True) -> frozenset[str] | None:
    value = said.get(key, "allow")
    if value == "allow" and key not in said:
        return None
    if words and isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        hint = f'write {key} = ["...", "..."]' + (', "forbid" or "allow"' if words else "")
        raise UsageError(f"{path}: {key} is not a list of names", hint=hint)
    return frozenset(value)


def _parse_signers(said: Mapping[str, Any], path: Path) -> tuple[TrustedSigner, ...]:
    """Parse the signers; paths of keys are relative to the policy."""
    if "signers" not in said:
        return ()
    signers = said["signers"]
    hint = 'write signers = [{public_key = "key.pub"}, {identity = "me@example.com", issuer = "https://..."}]'
    if not isinstance(signers, list) or not signers:
        raise UsageError(f"{path}: signers is not a list of signers", hint=hint)
    found = []
    for each in signers:
        texts = each if isinstance(each, dict) and all(isinstance(text, str) and text for text in each.values()) else {}
        if texts.keys() == {"public_key"}:
            found.append(TrustedSigner(path.parent / texts["public_key"]))
        elif texts.keys() == {"identity", "issuer"}:
            found.append(TrustedSigner(None, texts["identity"], texts["issuer"]))
        else:
            raise UsageError(f"{path}: signers has {each!r:.80}", hint=hint)
    return tuple(found)


def check_policy(policy: VerificationPolicy, source: Source, stored: Manifest) -> Iterator[CheckFinding]:
    """Yield every breach of a policy in the files of a source, whose checkpoint is `stored`."""
    yield from _check_files(policy, source)
    if policy.auto_map is not None:
        yield from _check_code_references(policy.auto_map, source)
    if policy.dtypes is not None:
        yield from _check_dtypes(policy.dtypes, source, stored)
    if policy.licenses is not None:
        yield from _check_license(policy.licenses, source)


def _check_files(policy: VerificationPolicy, source: Source) -> Iterator[CheckFinding]:
    """Yield files of code, and pickles, that are not allowed."""
    if policy.code_files is None and policy.pickles is None:
        return
    for path, stat in source.files().items():
        head = read_bytes(source, path, 0, min(stat.size, _HEAD_BYTES))
        suffix = PurePosixPath(path.lower()).suffix
        code = suffix in _CODE_SUFFIXES or head.startswith(_CODE_SIGNATURES)
        if code and policy.code_files is not None and path not in policy.code_files:
            yield _build_finding("code_files", f"{path} is code", path)
        pickled = suffix in _PICKLE_SUFFIXES or PurePosixPath(path).name == DCP_METADATA
        pickled = pickled or _PICKLE_SIGNATURE.match(head) is not None
        if pickled and policy.pickles is not None and path not in policy.pickles:
            yield _build_finding("pickles", f"{path} is a pickle, or may hold one", path)


def _check_code_references(allowed: frozenset[str], source: Source) -> Iterator[CheckFinding]:
    """Yield classes that JSON files name for loaders to import, from files or other repositories."""
    for path in source.files():
        if not path.lower().endswith(".json") or path in {RECORD, STATEMENT}:
            continue
        try:
            said = read_json(source, path, CONFIG_TEXT)
        except SourceError as error:  # a tokenizer may be that large, but no loader takes classes from one
            if _SETTINGS_PATTERN.fullmatch(path):
                yield _build_finding("auto_map", f"{path} cannot be read: {error.message}", path)
            continue
        for key, value in list_code_references(said) if isinstance(said, dict) else ():
            for name in sorted({*_list_texts(value)} - allowed):
                yield _build_finding("auto_map", f"{path} names {name} in {key}", path)


def _list_texts(value: object) -> Iterator[str]:
    """List the texts in a value of `auto_map`; what is neither text, list nor table is written out."""
    inner: Iterable[object] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict | list):
        for each in inner:
            yield from _list_texts(each)
    elif value is not None:
        yield str(value)


def _check_dtypes(allowed: frozenset[str], source: Source, stored: Manifest) -> Iterator[CheckFinding]:
    """Yield tensors of other types, also of weights that lie next to the checkpoint, and files that cannot be told."""
    for tensor in stored.tensors.values():
        if tensor.dtype.name not in allowed:
            file = min(tensor.files, default="")
            yield _build_finding("dtypes", f"{tensor.name} has the type {tensor.dtype.name}", file, tensor.name)
    for path in source.files():
        if path in stored.files or not path.endswith(WEIGHT_SUFFIXES):
            continue
        if not path.endswith(SAFETENSORS):
            yield _build_finding("dtypes", f"{path} is not part of the checkpoint, so its types are not known", path)
            continue
        for name in sorted({array.dtype.name for array in read_header(source, path).arrays} - allowed):
            yield _build_finding("dtypes", f"{path} has tensors of the type {name}", path)


def _check_license(allowed: frozenset[str], source: Source) -> Iterator[CheckFinding]:
    """Yield the licence that the model card states, if it is another one or none."""
    names = _read_licenses(read_text(source, _CARD, CONFIG_TEXT)) if _CARD in source.files() else []
    if not names:
        yield _build_finding("licenses", f"no licence is stated in the head of {_CARD}", _CARD)
    for name in names:
        if name.lower() not in allowed:
            yield _build_finding("licenses", f"the licence is {name}", _CARD)


def _read_licenses(card: bytes) -> list[str]:
    """Read the identifiers of the licences in the metadata of a model card; `other` has a name of its own."""
    found = _FRONT_MATTER.match(card)
    if found is None:
        return []
    import yaml  # which huggingface_hub requires

    try:
        said = yaml.load(found[1], Loader=yaml.BaseLoader)  # noqa: S506 - it makes texts, lists and tables only
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    said = said if isinstance(said, dict) else {}
    stated, own_name = said.get("license"), said.get("license_name")
    stated = stated if isinstance(stated, list) else [stated]
    names = [name if isinstance(name, str) else "not a text" for name in stated if name]
    own_name = own_name if isinstance(own_name, str) and own_name else "other"
    return [own_name if name.lower() == "other" else name for name in dict.fromkeys(names)]


def _build_finding(key: str, message: str, file: str, tensor: str = "") -> CheckFinding:
    return CheckFinding("error", key, f"{message}, which the policy does not allow", tensor=tensor, file=file)
