"""Names and removes the files that several workers keep in one staging area."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

CREW_NOTE: Final = "workers.json"
"""The plan of several workers; a staging area that has it belongs to them."""
WORKER_PREFIX: Final = "worker-"
"""What the name of every file of one worker begins with."""


def remove_crew_files(root: Path) -> None:
    """Remove what workers left in a staging area; the note of their plan goes last."""
    for path in sorted(root.glob(f"{WORKER_PREFIX}*")):
        path.unlink(missing_ok=True)
    (root / CREW_NOTE).unlink(missing_ok=True)
