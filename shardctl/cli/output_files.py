"""Refuses a plan, a report or a log that would replace a file which the same run reads, or its destination's.

    require_separate_outputs({"--junit": Path("llama/config.json")}, [("SRC", "llama")], [])  # raises DestinationError

It is called before the run opens or reads anything but the plan that it follows.
"""

from __future__ import annotations

import os
import re
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import DestinationError, ShardctlError, UsageError
from shardctl.conversion.engine.staging import find_staging_roots
from shardctl.options.declaration import PathAccess
from shardctl.storage.path_overlap import are_same_file, find_same_file, is_same_or_inside

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.options.declaration import NamedPath

_EARLIER_OUTPUT: Final = re.compile(
    rb"""<\?xml[^>]*>\s*<testsuites\ name="shardctl\ |\#\#\#\ shardctl\ verify:\ """
    rb"""|<!DOCTYPE\ html>(?:\s*<[^>]*>){1,8}?\s*<meta\ name="generator"\ content="shardctl\ """
    rb"""|\S+\ shardctl\ \S+:\ shardctl\ |\{\s*"schema":\ "shardctl\.plan-file/""",
    re.VERBOSE,
)
"""How the outputs of shardctl begin: JUnit, Markdown, pages, logs and plans. No weights and no config begins so."""
_HEAD_BYTES: Final = 4_096


def check_outputs(paths: Sequence[NamedPath], given: Mapping[str, Any]) -> None:
    """Check the outputs of a command line; `given` has the values of all of its parameters."""
    outputs = {each.label: Path(given[each.parameter]) for each in paths if _is_given(each, given, PathAccess.WRITTEN)}
    if outputs:
        read = [
            (each.label, str(place))
            for each in paths
            if _is_given(each, given, PathAccess.READ)
            for place in _as_list(given[each.parameter])
        ]
        replaced = [str(given[each.parameter]) for each in paths if _is_given(each, given, PathAccess.REPLACED)]
        if given.get("plan") is not None and not replaced:  # the one argument of reshard --plan is its destination
            replaced = [place for label, place in read if label == "SRC"]
            read = [(label, place) for label, place in read if label != "SRC"]
        if given.get("each"):
            read, replaced = _expand_pattern(read, replaced)
        if given.get("plan") is not None:
            read += _list_planned_inputs(Path(given["plan"]))
        require_separate_outputs(outputs, read, replaced)


def require_separate_outputs(
    outputs: Mapping[str, Path], read: Sequence[tuple[str, str]], replaced: Sequence[str]
) -> None:
    """Raise DestinationError if an output, by its flag, is a file of something that is read or replaced.

    `read` has what names each place, and the place. A new file within a source is no harm, and neither is an earlier
    output there: it is replaced as anywhere else. A file that is no text is replaced nowhere. Raises UsageError if two
    outputs are one file.
    """
    for (one, path), (other, second) in combinations(outputs.items(), 2):
        if are_same_file(path, second) and not _is_device(path):
            raise UsageError(f"{one} and {other} name one file: {path}", hint="give each a file of its own")
    for flag, path in outputs.items():
        for place in replaced:
            if "://" not in place and any(
                is_same_or_inside(path, each) for each in (Path(place), *find_staging_roots(Path(place)))
            ):
                raise DestinationError(
                    f"{flag} {path} lies in the destination {place}, which would then hold a file that is no part of "
                    "the checkpoint",
                    hint="write it elsewhere",
                )
        if os.path.isfile(path):  # noqa: PTH113 - is_file() raises for a name too long
            _require_foreign(flag, path, read)


def _require_foreign(flag: str, path: Path, read: Sequence[tuple[str, str]]) -> None:
    """Raise DestinationError if an existing file belongs to something that is read, or is no text, such as weights."""
    head = _read_head(path)
    if b"\0" in head:
        raise DestinationError(
            f"{flag} {path} exists and is not a text file, and would be overwritten", hint="choose another name"
        )
    earlier = _EARLIER_OUTPUT.match(head) is not None
    for label, place in read:
        for folder in _list_local_places(place):
            if _holds_file(folder, path, earlier=earlier):
                raise DestinationError(
                    f"{flag} {path} is a file of {label} {place}, and would be overwritten", hint="write it elsewhere"
                )


def _holds_file(place: Path, path: Path, *, earlier: bool) -> bool:
    """Return whether an existing file is `place`, or a part of it that must not be replaced."""
    if not os.path.isdir(place):  # noqa: PTH112 - as above
        configs = () if earlier else place.parent.glob("*.json")  # which are read beside a file of weights
        return any(are_same_file(path, each) for each in (place, *configs))
    return not earlier and (is_same_or_inside(path, place) or find_same_file(path, place) is not None)


def _read_head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:  # whoever writes it says so
        return b""


def _is_device(path: Path) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)  # noqa: PTH110, PTH113 - as above


def _is_given(each: NamedPath, given: Mapping[str, Any], access: PathAccess) -> bool:
    return each.access is access and given.get(each.parameter) is not None


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _list_local_places(place: str) -> Iterator[Path]:
    """List the path of a place here, or the folder of the Hub's cache that may hold one that is elsewhere."""
    if os.path.exists(place):  # noqa: PTH110 - as above
        yield Path(place)
        return
    from shardctl.storage.hub import find_cache_folder

    folder = find_cache_folder(place)
    if folder is not None:
        yield folder


def _expand_pattern(read: list[tuple[str, str]], replaced: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """List what `--each` converts, and where to."""
    from shardctl.verbs.reshard_each import list_matches

    found = [path for label, place in read if label == "SRC" for path in list_matches(place)]
    others = [(label, place) for label, place in read if label != "SRC"]
    return [("SRC", str(path)) for path in found] + others, [
        str(Path(each) / path.name) for each in replaced for path in found
    ]


def _list_planned_inputs(path: Path) -> list[tuple[str, str]]:
    """List what a plan file says is read; nothing for one that is damaged, which the verb refuses."""
    from shardctl.conversion.plan_file import read_plan_file

    try:
        plan = read_plan_file(path)
    except ShardctlError:
        return []
    options = plan.source_options
    others = {
        "--config": (options.config,),
        "--rules": (options.rules,),
        "--complete-from": (options.complete_from,),
        "--apply": options.apply,
        "--merge": plan.reshard_options.merge,
    }
    named = [(flag, str(place)) for flag, places in others.items() for place in places if place is not None]
    return [("SRC", plan.source), *named]
