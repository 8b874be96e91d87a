"""Collects what files of torch.save hold besides what is read of them, for one warning of each kind per checkpoint."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import format_first_few
from shardctl.libraries.torch_save.pickle_names import is_harmless

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardctl.libraries.torch_save.pickle_tree import GlobalNode

UNKNOWN_NAMES: Final = "names that no tensor needs, and that are not known to be harmless, are left behind"
UNUSED_RECORDS: Final = "records that nothing in the pickle refers to are left behind"
SECOND_PICKLE: Final = "what follows the pickle is left behind, as torch leaves it"
SECOND_SAVE: Final = "what follows the first save is left behind, as torch.load leaves it"
UNUSED_ITEMS: Final = "entries that belong to no tensor or object are left behind"
UNUSED_BYTES: Final = "bytes between and behind the entries are left behind"
_MAX_NAMES_SHOWN: Final = 5
_MAX_REMEMBERED_ITEMS: Final = 100
"""Things of one file, and different lists of things, that are remembered: hostile files have millions."""


class LeftoverNotes:
    """What no reader uses of the files of one checkpoint: for each kind, which things are in which files."""

    def __init__(self) -> None:
        self._found: dict[str, dict[tuple[str, ...], dict[str, None]]] = {}
        self._told: set[str] = set()

    def note(self, path: str, kind: str, things: Iterable[str]) -> None:
        """Remember that a file holds `things` of a kind, of which the first few are named later."""
        listed = tuple(islice(things, _MAX_REMEMBERED_ITEMS))
        if listed:
            groups = self._found.setdefault(kind, {})
            known = listed in groups or len(groups) < _MAX_REMEMBERED_ITEMS
            groups.setdefault(listed if known else next(iter(groups)), {})[path] = None

    def note_names(self, path: str, names: Iterable[GlobalNode]) -> None:
        """Remember which names that a pickle mentions are not known to be harmless."""
        self.note(path, UNKNOWN_NAMES, (str(name) for name in names if not is_harmless(name.module, name.name)))

    def mark_told(self, things: Iterable[str]) -> None:
        """Leave out things that another warning, or the list of objects, tells more of."""
        self._told.update(things)

    def list_warnings(self) -> tuple[str, ...]:
        """List one warning of each kind, which names a few things and how many files hold some."""
        return tuple(
            chain.from_iterable(self._describe_leftovers(kind, groups) for kind, groups in self._found.items())
        )

    def _describe_leftovers(self, kind: str, groups: dict[tuple[str, ...], dict[str, None]]) -> Iterator[str]:
        untold = {listed: paths for listed, paths in groups.items() if not self._told.issuperset(listed)}
        things = [thing for thing in dict.fromkeys(chain.from_iterable(untold)) if thing not in self._told]
        paths = dict.fromkeys(chain.from_iterable(untold.values()))
        if things:
            many = len(groups) == _MAX_REMEMBERED_ITEMS or any(
                len(listed) == _MAX_REMEMBERED_ITEMS for listed in untold
            )
            said = (
                f"{', '.join(things[:_MAX_NAMES_SHOWN])} and many more"
                if many
                else format_first_few(things, _MAX_NAMES_SHOWN)
            )
            yield f"{format_first_few(paths, 1)}: {kind}: {said}"
