"""What each optimizer keeps of every tensor between steps, as data: the elements and the type of each state.

Single numbers that optimizers keep of each tensor (`step`, most on the host, and Adafactor's `RMS`) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Final

from shardctl.dtype import BY_NAME
from shardctl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Seen:
    """What the optimizer of one rank sees of one tensor."""

    kept: tuple[int, ...]
    """The shape of the rank's part; of parameters that ZeRO shares, one dim of all that the rank updates."""
    whole: int
    """Elements that the ranks which share it by fsdp see as one tensor; at least those of `kept`."""
    hidden: bool
    """Whether it is a matrix inside a layer, neither embedding nor head: what Muon orthogonalises."""

    @property
    def elements(self) -> int:
        """Elements of the rank's part."""
        return prod(self.kept)


@dataclass(frozen=True, slots=True)
class Slot:
    """One state of an optimizer."""

    name: str
    """In words, such as ``first moment``."""
    elements: Callable[[Seen], int]
    """How many elements a rank keeps for what it sees of a tensor."""
    dtype: str | None = "F32"
    """The safetensors dtype; None for that of the parameters which are updated."""
    paged: bool = False
    """Whether it is in pages that move to the host when the device is full (CUDA unified memory)."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer as it occupies memory."""

    name: str
    """As `--optimizer` takes it."""
    title: str
    slots: tuple[Slot, ...]
    source: str
    """The implementation that is counted."""
    master: bool = True
    """Whether it updates fp32 parameters, of which the computing ones are a copy."""
    constant: int = 0
    """Bytes per rank that no tensor adds to."""
    splits: bool = False
    """Whether matrices inside layers are updated apart from all else."""

    @property
    def per_parameter(self) -> float:
        """Bytes for each parameter of a large matrix inside a layer, the fp32 copy included.

        >>> optimizer("adamw").per_parameter, optimizer("sgd").per_parameter
        (12.0, 4.0)
        """
        seen = Seen((SMALL, SMALL), SMALL * SMALL, hidden=True)
        states = sum(slot.elements(seen) * BY_NAME[slot.dtype or "BF16"].bits / 8 for slot in self.slots)
        return states / seen.elements + (4 if self.master else 0)

    temporary: bool = False
    """Whether a step makes a temporary as large as the parameters (torch's foreach kernels)."""


SMALL: Final = 4096
"""Tensors of fewer elements keep 32-bit states (bitsandbytes, `min_8bit_size`)."""
BLOCK: Final = 256
"""Elements that share one fp32 scale (bitsandbytes, `blocksize` in `Optimizer2State.init_state`)."""
PAGED: Final = 100_000
"""States of tensors with fewer elements are never paged (bitsandbytes, `Optimizer8bit.get_state_buffer`)."""
CODES: Final = 256 * 4
"""Bytes of the table that says what each of 256 codes means; all tensors share it."""


def _each(seen: Seen) -> int:
    return seen.elements


def _codes(seen: Seen) -> int:
    return seen.elements if seen.whole >= SMALL else 0


def _scales(seen: Seen) -> int:
    return ceil(seen.whole / BLOCK) if seen.whole >= SMALL else 0


def _uncoded(seen: Seen) -> int:
    return 0 if seen.whole >= SMALL else seen.elements


def _in_pages(elements: Callable[[Seen], int]) -> Callable[[Seen], int]:
    return lambda seen: elements(seen) if seen.whole >= PAGED else 0


def _resident(elements: Callable[[Seen], int]) -> Callable[[Seen], int]:
    return lambda seen: 0 if seen.whole >= PAGED else elements(seen)


def _hidden(seen: Seen) -> int:
    return seen.elements if seen.hidden else 0


def _others(seen: Seen) -> int:
    return 0 if seen.hidden else seen.elements


def _factored(seen: Seen) -> bool:
    return len(seen.kept) > 1


def _rows(seen: Seen) -> int:
    return prod(seen.kept[:-1]) if _factored(seen) else 0


def _columns(seen: Seen) -> int:
    return prod((*seen.kept[:-2], seen.kept[-1])) if _factored(seen) and seen.elements else 0


def _unfactored(seen: Seen) -> int:
    return 0 if _factored(seen) else seen.elements


def _in_8_bits(*moments: str, paged: bool = False) -> tuple[Slot, ...]:
    """The states of an optimizer whose `moments` are codes of 8 bits with a scale for each block."""
    slots: list[Slot] = []
    for moment in moments:
        if paged:
            slots.append(Slot(f"{moment}, 8-bit codes in pages", _in_pages(_codes), "U8", paged=True))
        slots += (
            Slot(f"{moment}, 8-bit codes", _resident(_codes) if paged else _codes, "U8"),
            Slot(f"{moment}, scales", _scales),
            Slot(f"{moment} of small tensors", _uncoded),
        )
    return tuple(slots)


_ADAM: Final = ("first moment", "second moment")
_BITSANDBYTES: Final = "bitsandbytes 0.50, optim/optimizer.py"

OPTIMIZERS: Final = (
    Optimizer(
        "adamw",
        "AdamW",
        tuple(Slot(name, _each) for name in _ADAM),
        "torch 2.13, torch.optim.AdamW",
        temporary=True,
    ),
    Optimizer(
        "adamw-bf16",
        "AdamW without fp32 copies: parameters, gradients and moments in the type that computes",
        tuple(Slot(name, _each, None) for name in _ADAM),
        "torch 2.13, torch.optim.AdamW (states are `zeros_like` the parameter)",
        master=False,
        temporary=True,
    ),
    Optimizer(
        "adamw-8bit",
        "AdamW with moments in 8 bits",
        _in_8_bits(*_ADAM),
        f"{_BITSANDBYTES}, Optimizer2State",
        constant=2 * CODES,
    ),
    Optimizer(
        "paged-adamw",
        "AdamW with moments in pages that can leave the device",
        tuple(
            slot
            for name in _ADAM
            for slot in (
                Slot(f"{name} in pages", _in_pages(_each), paged=True),
                Slot(f"{name} of small tensors", _resident(_each)),
            )
        ),
        f"{_BITSANDBYTES}, get_state_buffer",
    ),
    Optimizer(
        "paged-adamw-8bit",
        "AdamW with moments in 8 bits, in pages that can leave the device",
        _in_8_bits(*_ADAM, paged=True),
        f"{_BITSANDBYTES}, Optimizer2State and get_state_buffer",
        constant=2 * CODES,
    ),
    Optimizer("sgd", "SGD", (), "torch 2.13, torch.optim.SGD"),
    Optimizer("sgd-momentum", "SGD with momentum", (Slot("momentum", _each),), "torch 2.13, torch.optim.SGD"),
    Optimizer(
        "adafactor",
        "Adafactor without first moment",
        (
            Slot("row variances", _rows),
            Slot("column variances", _columns),
            Slot("variances of vectors", _unfactored),
        ),
        "Shazeer and Stern 2018, sec. 3; transformers 5.23, optimization.Adafactor; torch 2.13, torch.optim.Adafactor",
        temporary=True,
    ),
    Optimizer(
        "muon",
        "Muon for the matrices of layers, AdamW for all else",
        (
            Slot("momentum of matrices", _hidden),
            Slot("first moment of the others", _others),
            Slot("second moment of the others", _others),
        ),
        "torch 2.13, torch.optim.Muon and AdamW; Jordan et al. 2024",
        splits=True,
    ),
    Optimizer("lion", "Lion", (Slot("momentum", _each),), "Chen et al. 2023, algorithm 2; bitsandbytes 0.50, Lion"),
    Optimizer(
        "lion-8bit",
        "Lion with momentum in 8 bits",
        _in_8_bits("momentum"),
        f"{_BITSANDBYTES}, Optimizer1State",
        constant=CODES,
    ),
)
"""All that shardctl knows."""


def optimizer(name: str) -> Optimizer:
    """The optimizer of that name.

    Raises UsageError, naming those there are.

    >>> optimizer("lion").slots[0].elements(Seen((2, 3), 6, hidden=True))
    6
    """
    for known in OPTIMIZERS:
        if known.name == name:
            return known
    raise UsageError(f"unknown optimizer {name!r}", hint=f"the optimizers are {', '.join(o.name for o in OPTIMIZERS)}")
