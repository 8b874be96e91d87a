"""Finds which folders of a source are the ranks of a Megatron-LM checkpoint, and whether any is missing."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.libraries.files.sharded_backend import TRACKER, read_tracker
from shardctl.libraries.megatron.ranks import FILE, TITLE, list_mesh_folders

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.storage import Source
    from shardctl.tensors.mesh import Mesh

FILES: Final = (FILE, "model_rng.pt")
"""What a rank's weights are in; the second where an old distributed optimizer has a file of its own."""
_RANK_FOLDER_PATTERN: Final = re.compile(
    r"((?:iter_[0-9]{7,12}|release)/)?(mp_rank_[0-9]{2,5}(?:_[0-9]{3,5}){0,2})/([^/]+)"
)
_MAX_ITERATIONS_SHOWN: Final = 5


@value_class
class RankDirectory:
    """The files of one iteration."""

    folder: str
    """That holds the ranks' folders: empty, or a path that ends in a slash."""
    files: Mapping[str, str]
    """The path of a rank's weights, by the name of its folder."""
    others: tuple[str, ...] = ()
    """The other iterations that are there."""


def has_ranks(source: Source) -> bool:
    """Return whether there is a folder of a rank with its weights."""
    return any(found[3] in FILES for path in source.files() if (found := _RANK_FOLDER_PATTERN.fullmatch(path)))


def choose_iteration(source: Source) -> RankDirectory:
    """Choose the ranks of the iteration that the tracker names, or of the only one.

    Raises SourceError if there are several and nothing says which, or the one that is named is not there.
    """
    found: dict[str, dict[str, str]] = {}
    for path in source.files():
        match = _RANK_FOLDER_PATTERN.fullmatch(path)
        if match is not None and match[3] in FILES:
            found.setdefault(match[1] or "", {})[match[2]] = path
    if not found:
        raise SourceError(f"{source.name} holds no folders mp_rank_* with {FILE} of {TITLE}")
    folder = "" if "" in found else read_tracker(source)
    if folder is None and TRACKER in source.files():
        raise SourceError(f"{TRACKER} holds neither a number nor release")
    if folder is None and len(found) > 1:
        raise SourceError(
            f"{source.name} holds several iterations and no {TRACKER}:"
            f" {', '.join(sorted(found)[:_MAX_ITERATIONS_SHOWN])}",
            hint=f"give one of them, such as {source.name}/{max(found).rstrip('/')}",
        )
    folder = folder if folder is not None else next(iter(found))
    if folder not in found:
        raise SourceError(
            f"{TRACKER} names {folder.rstrip('/')}, but only {', '.join(sorted(found))} has files of ranks",
            hint="copy the rest, or give the folder of another iteration",
        )
    others = tuple(sorted(each for each in found if each not in {folder, ""}))
    return RankDirectory(folder, dict(sorted(found[folder].items())), others)


def list_rank_folders(found: RankDirectory, mesh: Mesh) -> dict[int, str]:
    """List the folders of a mesh's ranks; raises SourceError, naming it, for one that is missing or one too many."""
    wanted = list(islice(list_mesh_folders(mesh), len(found.files) + 1))  # the args may say any number
    said = ", ".join(f"{axis}={mesh.degree(axis)}" for axis in ("tp", "pp", "ep", "etp"))
    missing = [name for name in wanted if name not in found.files]
    if missing:
        short = mesh.world - len(found.files)
        more = f" and {short - 1:,} more folders are" if short > 1 else " is"
        raise SourceError(
            f"{found.folder}{missing[0]}{more} missing: the args say {said}",
            hint="every rank's folder is needed; fetch the rest"
            + ("; if experts were divided in another way, say how with --source-etp N" if mesh.ep > 1 else ""),
        )
    extra = [name for name in found.files if name not in wanted]
    if extra:
        raise SourceError(
            f"{found.folder}{extra[0]} is there, but the args say {said}", hint="folders of two checkpoints are mixed"
        )
    return dict(enumerate(wanted))
