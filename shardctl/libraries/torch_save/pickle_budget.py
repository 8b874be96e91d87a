"""Limits what all pickles of one checkpoint may use together, so that many small files cost no more than one.

Each source has one budget, which every reader of its pickles draws on: `budget_of(source)`. It grows with the size of
the source, because honest tensors are larger than what describes them, and a hostile file that is small stays cheap.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from shardctl.base.errors import HostileError
from shardctl.libraries.torch_save.leftovers import LeftoverNotes

if TYPE_CHECKING:
    from shardctl.storage import Source

_BASE_OPCODE_BUDGET: Final = 24_000_000
"""Opcodes of the pickles of a small checkpoint: 10 s of a core. A state dict takes about 32 per tensor."""
_BYTES_PER_OPCODE: Final = 128
"""One opcode more for as many bytes of the source; the smallest item of a distributed checkpoint takes 25 for each."""
_BASE_TENSOR_BUDGET: Final = 500_000
"""Tensors of a small checkpoint: about 1 GiB of bookkeeping."""
_BYTES_PER_TENSOR: Final = 1024
"""One tensor more for as many bytes of the source."""
_CYCLE_COLLECTION_BYTES: Final = 64 << 20
"""Bytes of trees after which those that refer to themselves are looked for; that takes 0.1 s, and counts for all."""
_MAX_NODE_VISITS: Final = 4_000_000
"""Nodes of a tree that a walk looks at; a shared one counts each time."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class PickleBudget:
    """What the pickles of a checkpoint may still ask for."""

    opcodes: int = _BASE_OPCODE_BUDGET
    tensors: int = _BASE_TENSOR_BUDGET
    leftovers: LeftoverNotes = field(default_factory=LeftoverNotes)
    """What the files hold that no reader uses."""
    litter: int = 0
    """Estimated bytes of the trees that were made since cycles were last collected."""

    def take_run(self, opcodes: int, memory: int) -> None:
        """Charge one pickle that was read: its opcodes, and the bytes of its tree."""
        self.opcodes -= opcodes
        self.litter += memory

    def take_tensors(self, number: int, path: str) -> None:
        """Charge the tensors of a file; raises HostileError if there are too many for the size of the checkpoint."""
        self.tensors -= number
        if self.tensors < 0:
            raise HostileError(
                f"{path} brings the tensors of this checkpoint beyond what is read: {_BASE_TENSOR_BUDGET:,}, and one"
                f" more for each {_BYTES_PER_TENSOR:,} bytes of its files"
            )

    def collect_cycles(self) -> None:
        """Free trees that nobody holds but themselves, if there may be large ones; others are freed as they go."""
        if self.litter > _CYCLE_COLLECTION_BYTES:
            gc.collect()
            self.litter = 0


_BUDGETS_BY_SOURCE: Final[WeakKeyDictionary[Source, PickleBudget]] = WeakKeyDictionary()


def budget_of(source: Source) -> PickleBudget:
    """Return the one budget of a source."""
    found = _BUDGETS_BY_SOURCE.get(source)
    if found is None:
        size = sum(stat.size for stat in source.files().values())
        found = PickleBudget(
            _BASE_OPCODE_BUDGET + size // _BYTES_PER_OPCODE, _BASE_TENSOR_BUDGET + size // _BYTES_PER_TENSOR
        )
        _BUDGETS_BY_SOURCE[source] = found
    return found


def list_leftovers(source: Source) -> tuple[str, ...]:
    """List the warnings about what the files of torch.save that were opened in a source hold and no reader uses."""
    found = _BUDGETS_BY_SOURCE.get(source)
    return found.leftovers.list_warnings() if found is not None else ()


class VisitCounter:
    """Counts the nodes that a walk through a tree looks at, because a small tree can hold the same dict many times."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.left = _MAX_NODE_VISITS

    def charge_nodes(self, number: int) -> None:
        """Charge `number` nodes; raises HostileError if they are too many."""
        self.left -= number
        if self.left < 0:
            raise HostileError(
                f"{self.path} holds the same dicts and lists inside of each other so often that there are more than "
                f"{_MAX_NODE_VISITS:,} values in them"
            )
