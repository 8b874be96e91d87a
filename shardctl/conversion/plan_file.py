"""Reads and writes plan files: `shardctl plan --out FILE` makes one, and `reshard --plan FILE` follows it.

The file is JSON with `"schema": "shardctl.plan-file/1"`: the source with its files, every option that shapes the result
(the mesh, the layout and the layers of each stage as they came out), and a hash of the plan itself. It carries no
permission: `--allow-expansion` and the like count only when the run itself is given them. Of the files that hold
tensors it has the size and a hash of what their headers say; of `config.json`, of the record of an earlier conversion
and of files named by options a hash of all bytes; of other files that travel along the size. The values of elements are
no part of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin

from shardctl.base.errors import ChangedError, DestinationError, MemoryBudgetError, SourceError, UsageError
from shardctl.base.value import value_class
from shardctl.base.version import __version__
from shardctl.checkpoint.config_files import CONFIG, list_override_files
from shardctl.conversion.conversion_plan import plan_conversion
from shardctl.libraries.files.extra_tensors import add_extra_tensors
from shardctl.libraries.reader import find_given_file
from shardctl.models.quantization.settings import SIDECAR
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.options.declaration import (
    Chosen,
    declared_options,
    effort_options,
    flat_options,
    make_options,
    permission_options,
    withdraw_permissions,
)
from shardctl.storage.bounded_text import PLAN_TEXT, RECORD_TEXT, check_json, parse_json, read_file, read_text
from shardctl.storage.byte_names import is_name, name_from_text, name_to_text
from shardctl.storage.durable import translate_os_errors, write_file
from shardctl.tensors.manifest import Region
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import RECORD
from shardctl.tensors.training import add_states

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.conversion.conversion_plan import PlannedConversion

SCHEMA: Final = "shardctl.plan-file/1"


@value_class
class SourceFileState:
    """A file of the source, as it was when the plan was made."""

    size: int
    """Bytes."""
    sha256: str = ""
    """Of what its header says or of all its bytes; empty where only the size counts."""


@value_class
class PlanFile:
    """What a plan says."""

    path: str
    """Of the plan file itself, for messages."""
    version: str
    """Of the shardctl that made it."""
    source: str
    """An absolute path, or an address bound to a commit."""
    files: Mapping[str, SourceFileState]
    """By path: relative to the source, or absolute for those that options name."""
    reshard_options: ReshardOptions
    """What to make of the source; nothing in it is left to be decided, and nothing is permitted."""
    source_options: SourceOptions
    """How the source is understood."""
    identity: str
    """Of the conversion: see `Draft.identity`."""

    def drafted(self, checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions) -> PlannedConversion:
        """Return the conversion of a checkpoint that this plan speaks of; its `reshard_options` may differ in effort.

        Raises ChangedError, naming the file, if the source is not what it was, and SourceError if the plan cannot be
        done or would be done otherwise by this version of shardctl.
        """
        if _with_effort(reshard_options, self.reshard_options, effort_options(ReshardOptions)) != self.reshard_options:
            raise UsageError(f"the conversion differs from the one in {self.path}")
        self._check_source(checkpoint)
        try:
            work = plan_conversion(checkpoint, reshard_options)
        except MemoryBudgetError:
            raise
        except UsageError as error:
            raise SourceError(
                f"the plan {self.path} cannot be carried out: {error.message}", hint=error.hint
            ) from error
        if work.identity() != self.identity:
            raise SourceError(
                f"{self.path} differs from the plan that this version makes: shardctl {self.version} made it, this is "
                f"{__version__}",
                hint="make the plan again",
            )
        return work

    def with_effort(self, other: ReshardOptions, given: Collection[str]) -> ReshardOptions:
        """Return the plan's conversion, with those options of `other` that were given and shape no byte."""
        return _with_effort(
            self.reshard_options, other, [name for name in effort_options(ReshardOptions) if name in given]
        )

    def apply_run_options(
        self, conversion: ReshardOptions, source_options: SourceOptions, given: Collection[str]
    ) -> tuple[ReshardOptions, SourceOptions]:
        """Return the plan's options with those of a run that change no byte; `given` names the fields that it has.

        Raises UsageError for any other option: the plan decides the result.
        """
        declared = (*flat_options(ReshardOptions), *flat_options(SourceOptions))
        shaping = {each.name: each.flag for each, option in declared if option.shapes_result}
        for name in given:
            if name in shaping:
                raise UsageError(
                    f"--plan and {shaping[name]} are both given",
                    hint="the plan decides the result: leave the option out, or make another plan",
                )
        permitted = {name: getattr(source_options, name) for name in permission_options(SourceOptions)}
        strict = source_options.strict or self.source_options.strict
        return self.with_effort(conversion, given), replace(self.source_options, strict=strict, **permitted)

    def _check_source(self, checkpoint: OpenedCheckpoint) -> None:
        changes = list(_list_changes(self.files, _record_source_files(checkpoint, self.source_options)))
        if changes:
            more = f" (and {len(changes) - 1} more changes)" if len(changes) > 1 else ""
            raise ChangedError(
                f"{checkpoint.source.name} has changed since {self.path} was made: {changes[0]}{more}",
                hint="make the plan again with shardctl plan --out",
            )


def write_plan_file(path: str | Path, work: PlannedConversion, source_options: SourceOptions | None = None) -> None:
    """Write the plan of a conversion, which a later `reshard` can follow.

    Raises DestinationError if something else than a plan is at `path`, or the source's directory would hold it.
    """
    path, source_options = Path(path), source_options or SourceOptions()
    source = work.checkpoint.source
    folder = None if find_given_file(source) is not None else source.folder
    if folder is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise DestinationError(f"{path} is inside the source, and would be copied with it", hint="write it elsewhere")
    with translate_os_errors(path, "looking at"):
        if path.is_dir() or (path.exists() and not _is_plan(path)):
            raise DestinationError(f"{path} exists and is not a plan of shardctl", hint="choose another name")
    stages = ",".join(map(str, work.stages)) if work.stages and work.mesh.degree("pp") > 1 else None
    mesh = work.mesh if work.mesh.world > 1 else None
    reshard_options = replace(work.reshard_options, to=work.layout, mesh=mesh, stages=stages)
    if source_options.complete_from is not None and Path(source_options.complete_from).exists():
        source_options = replace(source_options, complete_from=str(Path(source_options.complete_from).absolute()))
    if source_options.apply:
        places = [str(Path(each).absolute()) if Path(each).exists() else each for each in source_options.apply]
        source_options = replace(source_options, apply=tuple(places))
    document = {
        "schema": SCHEMA,
        "version": __version__,
        "source": {
            "path": name_to_text(source.location),
            "format": work.have.format,
            "files": {
                name_to_text(name): asdict(seen)
                for name, seen in _record_source_files(work.checkpoint, source_options).items()
            },
        },
        "reshard_options": _encode_options(withdraw_permissions(reshard_options)),
        "source_options": _encode_options(withdraw_permissions(source_options)),
        "plan": work.identity(),
    }
    with translate_os_errors(path, "writing"):
        write_file(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())


def read_plan_file(path: str | Path) -> PlanFile:
    """Read a plan; raises SourceError, naming the key, if it is malformed or of a later version."""
    path = Path(path)
    try:
        data = read_file(path, PLAN_TEXT, UsageError)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    check_json(data, str(path), PLAN_TEXT, UsageError)
    document = parse_json(data, str(path), PLAN_TEXT, hint="shardctl plan SRC --out FILE writes plans")
    return _PlanFileReader(str(path)).plan(document)


def _is_plan(path: Path) -> bool:
    try:
        read_plan_file(path)
    except (SourceError, UsageError):
        return False
    return True


def _record_source_files(checkpoint: OpenedCheckpoint, source_options: SourceOptions) -> dict[str, SourceFileState]:
    """Return every file that decides what a conversion of the checkpoint does."""
    source, hashes = checkpoint.source, _hash_headers(checkpoint)
    files = source.files()
    names = [
        *hashes,
        *(side.name for side in checkpoint.stored.objects if side.policy == "carry" and side.name in files),
    ]
    seen = {name: SourceFileState(files[name].size, hashes.get(name, "")) for name in sorted(names)}
    for name in (CONFIG, SIDECAR, RECORD):
        if name in files:
            seen[name] = SourceFileState(
                files[name].size, hashlib.sha256(read_text(source, name, RECORD_TEXT)).hexdigest()
            )
    for name in (CONFIG, SIDECAR) if source_options.config is None else (SIDECAR,):
        beside = source.beside(name)
        if beside is not None:
            place = str(source.folder.absolute() / name) if source.folder is not None else name
            seen[place] = SourceFileState(len(beside), hashlib.sha256(beside).hexdigest())
    configs = list_override_files(source_options.config) if source_options.config is not None else ()
    for given in (*configs, *((source_options.rules,) if source_options.rules is not None else ())):
        if given.exists():
            content = given.read_bytes()
            seen[str(given.absolute())] = SourceFileState(len(content), hashlib.sha256(content).hexdigest())
    return seen


def _hash_headers(checkpoint: OpenedCheckpoint) -> dict[str, str]:
    """Hash what each file's header says: every array's name, type, shape, and where its bytes are."""
    stored = add_extra_tensors(add_states(checkpoint.stored))
    states = defaultdict(hashlib.sha256, {path: hashlib.sha256() for path in stored.files})
    for tensor in stored.tensors.values():
        for chunk in tensor.chunks:
            if isinstance(chunk.where, Region):
                where = chunk.where
                place = f"{where.offset}\0{where.strides}\0{chunk.box}\0{chunk.dtype}\0{tensor.shape}\0{tensor.name}\n"
                states[where.file].update(place.encode())
    return {path: state.hexdigest() for path, state in states.items()}


def _list_changes(before: Mapping[str, SourceFileState], now: Mapping[str, SourceFileState]) -> Iterator[str]:
    """List what is different about each file that is not as it was."""
    for name, old in before.items():
        new = now.get(name)
        if new is None:
            yield f"{name} is gone"
        elif new.size != old.size:
            yield f"{name} has {new.size:,} bytes, and had {old.size:,}"
        elif new.sha256 != old.sha256:
            yield f"{name} has different content" if name.endswith(".json") else f"the header of {name} differs"
    for name in now:
        if name not in before:
            yield f"{name} is new"


def _with_effort(reshard_options: ReshardOptions, other: ReshardOptions, names: Iterable[str]) -> ReshardOptions:
    """Return a conversion with some fields of another."""
    return replace(reshard_options, **{name: getattr(other, name) for name in names})


def _encode_options(of: ReshardOptions | SourceOptions) -> dict[str, Any]:
    """Encode every option as JSON, whatever options there are."""
    found: dict[str, Any] = {}
    for declared in declared_options(type(of)):
        value = getattr(of, declared.name)
        if isinstance(value, Mesh):
            value = {"axes": dict(value.axes), "ep": value.ep, "etp": value.etp}
        elif isinstance(value, tuple):
            value = [name_to_text(str(each.absolute())) if isinstance(each, Path) else each for each in value]
        found[declared.key] = name_to_text(str(value.absolute())) if isinstance(value, Path) else value
    return found


@value_class
class _PlanFileReader:
    """Takes a plan's document apart; every complaint names the key."""

    path: str

    def plan(self, document: object) -> PlanFile:
        """Return the plan that the document is."""
        top = self.members(document, "", ("schema", "version", "source", "reshard_options", "source_options", "plan"))
        source = self.members(top["source"], "source", ("path", "format", "files"))
        files = self.members(source["files"], "source.files", None)
        return PlanFile(
            path=self.path,
            version=self.text(top["version"], "version"),
            source=self.path_text(source["path"], "source.path"),
            files={name_from_text(name): self.seen(value, f"source.files.{name}") for name, value in files.items()},
            reshard_options=withdraw_permissions(
                self.options(top["reshard_options"], "reshard_options", ReshardOptions)
            ),
            source_options=withdraw_permissions(self.options(top["source_options"], "source_options", SourceOptions)),
            identity=self.text(top["plan"], "plan"),
        )

    def members(self, value: object, key: str, names: tuple[str, ...] | None) -> dict[str, Any]:
        """Return the members of an object: just `names`, if they are known."""
        if not isinstance(value, dict):
            raise self.build_value_error(key, "an object")
        if not key:
            self.schema(value)
        for name in names or ():
            if name not in value:
                raise SourceError(f"{self.path} has no {_join_key(key, name)}", hint="make the plan again")
        for name in value:
            if names is not None and name not in names:
                raise SourceError(
                    f"{self.path} has {_join_key(key, name)}, which this shardctl does not know",
                    hint="use the version of shardctl that made the plan, or make it again",
                )
        return value

    def schema(self, document: Mapping[str, object]) -> None:
        """Refuse a document of another kind."""
        schema = document.get("schema")
        if schema != SCHEMA:
            raise SourceError(
                f"{self.path} has schema {schema!r}, but a plan has {SCHEMA!r}",
                hint="shardctl plan SRC --out FILE writes plans",
            )

    def seen(self, value: object, key: str) -> SourceFileState:
        """Return one file of the source."""
        file = self.members(value, key, ("size", "sha256"))
        return SourceFileState(self.count(file["size"], f"{key}.size"), self.text(file["sha256"], f"{key}.sha256"))

    def options(self, value: object, key: str, kind: type[Chosen]) -> Chosen:
        """Return a dataclass of options."""
        options = declared_options(kind)
        found = self.members(value, key, tuple(each.key for each in options))
        return make_options(
            kind, {each.name: self.option(found[each.key], f"{key}.{each.key}", each.annotation) for each in options}
        )

    def option(self, value: object, key: str, annotation: object) -> object:
        """Return the value of one option, of the type that it is declared to have."""
        types = get_args(annotation) if isinstance(annotation, UnionType) or get_origin(annotation) is Union else ()
        if value is None and NoneType in types:
            return None
        kind = next((each for each in types if each is not NoneType), annotation)
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise self.build_value_error(key, f"one of {', '.join(map(str, get_args(kind)))}")
            return value
        return _READERS_BY_TYPE[kind](self, value, key)

    def mesh(self, value: object, key: str) -> Mesh:
        """Return a mesh."""
        found = self.members(value, key, ("axes", "ep", "etp"))
        axes = self.members(found["axes"], f"{key}.axes", None)
        try:
            return Mesh(
                tuple((axis, self.count(degree, f"{key}.axes.{axis}")) for axis, degree in axes.items()),
                self.count(found["ep"], f"{key}.ep"),
                self.count(found["etp"], f"{key}.etp"),
            )
        except UsageError as error:
            raise SourceError(f"{self.path} has {key} that is not a mesh: {error.message}", hint=error.hint) from error

    def text(self, value: object, key: str) -> str:
        """Return a string."""
        if not isinstance(value, str):
            raise self.build_value_error(key, "a string")
        return value

    def list_paths(self, value: object, key: str) -> tuple[Path, ...]:
        """Return several paths."""
        if not isinstance(value, list):
            raise self.build_value_error(key, "a list")
        return tuple(self.path_of(each, f"{key}[{number}]") for number, each in enumerate(value))

    def read_strings(self, value: object, key: str) -> tuple[str, ...]:
        """Return several strings."""
        if not isinstance(value, list):
            raise self.build_value_error(key, "a list")
        return tuple(self.text(each, f"{key}[{number}]") for number, each in enumerate(value))

    def path_text(self, value: object, key: str) -> str:
        """Return a path or an address."""
        path = name_from_text(self.text(value, key))
        if not is_name(path):
            raise self.build_value_error(key, "a path")
        return path

    def count(self, value: object, key: str) -> int:
        """Return a whole number that is not negative and can be that of bytes."""
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise self.build_value_error(key, "a whole number")
        return value

    def path_of(self, value: object, key: str) -> Path:
        """Return a path."""
        return Path(self.path_text(value, key))

    def read_flag(self, value: object, key: str) -> bool:
        """Return a truth value."""
        if not isinstance(value, bool):
            raise self.build_value_error(key, "true or false")
        return value

    def build_value_error(self, key: str, expected: str) -> SourceError:
        """Return what to say of a value that is not what its key should have."""
        return SourceError(f"{self.path} has {key or 'something'} that is not {expected}", hint="make the plan again")


_READERS_BY_TYPE: Final[dict[object, Callable[[_PlanFileReader, object, str], object]]] = {
    bool: _PlanFileReader.read_flag,
    int: _PlanFileReader.count,
    str: _PlanFileReader.text,
    Path: _PlanFileReader.path_of,
    Mesh: _PlanFileReader.mesh,
    tuple[Path, ...]: _PlanFileReader.list_paths,
    tuple[str, ...]: _PlanFileReader.read_strings,
}
"""By the type of an option, what reads it."""


def _join_key(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
