"""Which folders of a source are the ranks of one of Megatron-LM's checkpoints, and which ranks they are.

`get_checkpoint_name` of `megatron/training/checkpointing.py` gives them their names: ``mp_rank_TT``, ``_PPP`` behind
it where there are pipeline stages, ``_EEE`` where experts are divided, so that two numbers alone may be either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Final

from shardctl.errors import SourceError, UnsupportedError
from shardctl.formats.sharded_backend import TRACKER
from shardctl.mesh import Mesh
from shardctl.schemas.megatron.layers import TITLE
from shardctl.storage import read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.storage import Source

FILES: Final = ("model_optim_rng.pt", "model_rng.pt")
"""What a rank's weights are in; the second where an old distributed optimizer has a file of its own."""
_FOLDER: Final = re.compile(r"((?:iter_[0-9]{7,12}|release)/)?(mp_rank_[0-9]{2,5}(?:_[0-9]{3,5}){0,2})/([^/]+)")
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Directory:
    """The files of one iteration."""

    folder: str
    """That holds the ranks' folders: empty, or a path that ends in a slash."""
    files: Mapping[str, str]
    """The path of a rank's weights, by the name of its folder."""
    others: tuple[str, ...] = ()
    """The other iterations that are there."""


def has_ranks(source: Source) -> bool:
    """Whether there is a folder of a rank with its weights."""
    return any(found[3] in FILES for path in source.files() if (found := _FOLDER.fullmatch(path)))


def directory(source: Source) -> Directory:
    """The ranks of the iteration that the tracker names, or of the only one.

    Raises SourceError if there are several and nothing says which, or the one that is named is not there.
    """
    found: dict[str, dict[str, str]] = {}
    for path in source.files():
        match = _FOLDER.fullmatch(path)
        if match is not None and match[3] in FILES:
            found.setdefault(match[1] or "", {})[match[2]] = path
    if not found:
        raise SourceError(f"{source.name} holds no folders mp_rank_* with {FILES[0]} of {TITLE}")
    folder = "" if "" in found else _tracked(source)
    if folder is None and len(found) > 1:
        raise SourceError(
            f"{source.name} holds several iterations and no {TRACKER}: {', '.join(sorted(found)[:_SHOWN])}",
            hint=f"give one of them, such as {source.name}/{max(found).rstrip('/')}",
        )
    folder = folder if folder is not None else next(iter(found))
    if folder not in found:
        raise SourceError(
            f"{TRACKER} names {folder.rstrip('/')}, of which there are no ranks, only {', '.join(sorted(found))}",
            hint="the copy is not complete; or give the folder of another iteration",
        )
    others = tuple(sorted(each for each in found if each not in {folder, ""}))
    return Directory(folder, dict(sorted(found[folder].items())), others)


def _tracked(source: Source) -> str | None:
    stat = source.files().get(TRACKER)
    if stat is None:
        return None
    text = read(source, TRACKER, 0, min(stat.size, 64)).decode("ascii", "replace").strip()
    if text == "release":
        return "release/"
    if not text.isascii() or not text.isdigit():
        raise SourceError(f"{TRACKER} holds {text[:40]!a}, neither a number nor release")
    return f"iter_{int(text):07d}/"


def folder_name(tp: int, pp: int | None, ep: int | None) -> str:
    """The folder of a rank; None for an axis of one.

    >>> folder_name(1, None, 0), folder_name(0, 3, 1)
    ('mp_rank_01_000', 'mp_rank_00_003_001')
    """
    return f"mp_rank_{tp:02d}" + "".join(f"_{index:03d}" for index in (pp, ep) if index is not None)


def least_mesh(*, tp: int, pp: int, ep: int, etp: int) -> Mesh:
    """The mesh of as few ranks as hold everything."""
    stage = lcm(tp, ep * etp)
    return Mesh.of(pp=pp, dp=stage // tp, tp=tp, ep=ep, etp=etp)


def folders(mesh: Mesh) -> dict[int, str]:
    """The folder of every rank that has one of its own, in the order of ranks.

    Raises UnsupportedError where different parts of experts would be in folders of the same name, as the format has no
    place for the rank inside an expert.
    """
    named: dict[str, tuple[int, int]] = {}
    for rank in range(mesh.world):
        at = mesh.coordinate(rank)
        pp = at["pp"] if mesh.degree("pp") > 1 else None
        name = folder_name(at["tp"], pp, at["ep"] if mesh.ep > 1 else None)
        before = named.setdefault(name, (rank, at["etp"]))
        if before[1] != at["etp"]:
            raise UnsupportedError(
                f"{TITLE}'s folders are named by tp and ep, and {name} would hold two parts of experts: etp={mesh.etp} "
                f"does not fit tp={mesh.degree('tp')}, ep={mesh.ep}",
                hint="use a divisor of tp for etp",
            )
    return {rank: name for name, (rank, _) in sorted(named.items(), key=lambda item: item[1])}


def ranks_of(found: Directory, mesh: Mesh) -> dict[int, str]:
    """The folders of a mesh's ranks; raises SourceError, naming it, for one that is missing or one too many."""
    wanted = folders(mesh)
    said = ", ".join(f"{axis}={mesh.degree(axis)}" for axis in ("tp", "pp", "ep", "etp"))
    missing = [name for name in wanted.values() if name not in found.files]
    if missing:
        more = f" and {len(missing) - 1} more folders are" if len(missing) > 1 else " is"
        raise SourceError(
            f"{found.folder}{missing[0]}{more} missing: the args say {said}",
            hint="every rank's folder is needed; fetch the rest",
        )
    extra = [name for name in found.files if name not in wanted.values()]
    if extra:
        raise SourceError(
            f"{found.folder}{extra[0]} is there, but the args say {said}", hint="folders of two checkpoints are mixed"
        )
    return wanted
