"""Lists the states that each optimizer of `optimizers.toml` keeps of every tensor between steps: elements and types.

Single numbers that optimizers keep of each tensor (`step`, most on the host, and Adafactor's `RMS`) are left out.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from math import ceil, prod
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.training.preconditioner_blocks import count_blocks, count_packed_sides

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardctl.estimate.training.preconditioner_blocks import Block


@value_class
class OptimizedTensor:
    """What the optimizer of one rank sees of one tensor."""

    kept: tuple[int, ...]
    """The shape of the rank's part; of parameters that ZeRO shares, one dim of all that the rank updates."""
    whole: int
    """Elements that the ranks which share it by fsdp see as one tensor; at least those of `kept`."""
    hidden: bool
    """Whether it is a matrix inside a layer, neither embedding nor head: what Muon orthogonalises."""
    blocks: tuple[tuple[Block, int], ...] = ()
    """Of optimizers that spread blocks over ranks, those that this rank updates, instead of `kept`."""

    @property
    def elements(self) -> int:
        """Elements of the rank's part."""
        return sum(count * prod(block) for block, count in self.blocks) if self.blocks else prod(self.kept)


@value_class
class StateSlot:
    """One state of an optimizer."""

    name: str
    """In words, such as ``first moment``."""
    elements: Callable[[OptimizedTensor], int]
    """How many elements a rank keeps for what it sees of a tensor."""
    dtype: str | None = "F32"
    """The safetensors dtype; None for that of the parameters which are updated."""
    paged: bool = False
    """Whether it is in pages that move to the host when the device is full (CUDA unified memory)."""
    square: bool = False
    """Whether a part of a tensor may have less than its share, because sides count by their squares."""


@value_class
class OptimizerSpec:
    """An optimizer as it occupies memory."""

    name: str
    """As `--optimizer` takes it."""
    title: str
    slots: tuple[StateSlot, ...]
    source: str
    """The implementation that is counted."""
    master: bool = True
    """Whether it updates fp32 parameters, of which the computing ones are a copy."""
    constant: int = 0
    """Bytes per rank that no tensor adds to, such as the tables of bitsandbytes: 256 codes in fp32 for each moment."""
    splits: bool = False
    """Whether matrices inside layers are updated apart from all else."""

    @property
    def per_parameter(self) -> float:
        """Bytes for each parameter of a large matrix inside a layer, the fp32 copy included.

        >>> get_optimizer("adamw").per_parameter, get_optimizer("sgd").per_parameter
        (12.0, 4.0)
        """
        seen = OptimizedTensor((SMALL, SMALL), SMALL * SMALL, hidden=True)
        states = sum(
            slot.elements(seen) * BY_NAME[slot.dtype or ("F32" if self.master else "BF16")].bits / 8
            for slot in self.slots
        )
        return states / seen.elements + (4 if self.master else 0)

    temporary: bool = False
    """Whether a step makes a temporary as large as the parameters (torch's foreach kernels)."""
    trainer_copies: int = 0
    """How many temporaries of the tensor that it updates a step makes in transformers' Trainer."""
    spreads: bool = False
    """Whether ranks with the same parameters spread the blocks of their matrices, and nothing divides flat vectors."""


SMALL: Final = 4096
"""Tensors of fewer elements keep 32-bit states (bitsandbytes, `min_8bit_size`)."""
BLOCK: Final = 256
"""Elements that share one fp32 scale (bitsandbytes, `blocksize` in `Optimizer2State.init_state`)."""
PAGED: Final = 100_000
"""States of tensors with fewer elements are never paged (bitsandbytes, `Optimizer8bit.get_state_buffer`)."""
WIDEST: Final = 10_000
"""Dims that are longer have no preconditioner (SOAP, `max_precondition_dim`)."""


def _count_elements(seen: OptimizedTensor) -> int:
    return seen.elements


def _count_codes(seen: OptimizedTensor) -> int:
    return seen.elements if seen.whole >= SMALL else 0


def _count_scales(seen: OptimizedTensor) -> int:
    return ceil(seen.whole / BLOCK) if seen.whole >= SMALL else 0


def _count_uncoded(seen: OptimizedTensor) -> int:
    return 0 if seen.whole >= SMALL else seen.elements


def _count_in_pages(elements: Callable[[OptimizedTensor], int]) -> Callable[[OptimizedTensor], int]:
    return lambda seen: elements(seen) if seen.whole >= PAGED else 0


def _count_resident(elements: Callable[[OptimizedTensor], int]) -> Callable[[OptimizedTensor], int]:
    return lambda seen: 0 if seen.whole >= PAGED else elements(seen)


def _count_hidden(seen: OptimizedTensor) -> int:
    return seen.elements if seen.hidden else 0


def _count_others(seen: OptimizedTensor) -> int:
    return 0 if seen.hidden else seen.elements


def _is_factored(seen: OptimizedTensor) -> bool:
    return len(seen.kept) > 1


def _count_rows(seen: OptimizedTensor) -> int:
    return prod(seen.kept[:-1]) if _is_factored(seen) else 0


def _count_columns(seen: OptimizedTensor) -> int:
    return prod((*seen.kept[:-2], seen.kept[-1])) if _is_factored(seen) and seen.elements else 0


def _count_sides(seen: OptimizedTensor) -> int:
    """Count the elements of one square matrix for each dim of a matrix that is not too long."""
    return sum(n * n for n in seen.kept if n <= WIDEST) if _is_factored(seen) and seen.elements else 0


def _count_packed_sides(seen: OptimizedTensor) -> int:
    blocks = seen.blocks or tuple(count_blocks(seen.kept).items())
    return sum(count * count_packed_sides(block) for block, count in blocks)


def _count_unfactored(seen: OptimizedTensor) -> int:
    return 0 if _is_factored(seen) else seen.elements


_COUNTS: Final[Mapping[str, Callable[[OptimizedTensor], int]]] = {
    "all": _count_elements,
    "hidden matrices": _count_hidden,
    "others": _count_others,
    "codes": _count_codes,
    "scales": _count_scales,
    "uncoded": _count_uncoded,
    "rows": _count_rows,
    "columns": _count_columns,
    "vectors": _count_unfactored,
    "sides": _count_sides,
    "packed sides": _count_packed_sides,
}
"""How many elements a state has for what a rank sees of a tensor, by the word that `optimizers.toml` has for it."""


class _StateRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    counts: str
    """A key of `_COUNTS`."""
    dtype: str = "F32"
    """The safetensors dtype, or `parameters` for that of the parameters which are updated."""
    pages: Literal["in", "out", ""] = ""
    """Whether only large tensors have it, in pages that can leave the device, or only the others."""
    square: bool = False

    def build_slot(self) -> StateSlot:
        """Build the state; raises KeyError for a count that is not known."""
        elements = _COUNTS[self.counts]
        if self.pages:
            elements = _count_in_pages(elements) if self.pages == "in" else _count_resident(elements)
        dtype = None if self.dtype == "parameters" else self.dtype
        return StateSlot(self.name, elements, dtype, self.pages == "in", self.square)


class _OptimizerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimizer as `optimizers.toml` has it; `OptimizerSpec` says what the keys mean."""

    name: str
    title: str
    source: str
    states: tuple[_StateRecord, ...]
    other_names: tuple[str, ...] = ()
    """What libraries call optimizers that keep the same states."""
    master: bool = True
    constant: int = 0
    splits: bool = False
    temporary: bool = False
    trainer_copies: int = 0
    spreads: bool = False

    def build_spec(self) -> OptimizerSpec:
        """Build the optimizer; raises KeyError for a state whose count is not known."""
        known = {key: getattr(self, key) for key in self.__struct_fields__ if key not in {"states", "other_names"}}
        return OptimizerSpec(**known, slots=tuple(state.build_slot() for state in self.states))


class _OptimizerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    optimizer: tuple[_OptimizerRecord, ...]


@cache
def _read_records() -> tuple[_OptimizerRecord, ...]:
    """Read `optimizers.toml`."""
    text = files("shardctl.estimate.training").joinpath("optimizers.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _OptimizerFile).optimizer


@cache
def list_optimizers() -> tuple[OptimizerSpec, ...]:
    """List all that shardctl knows, in the order of `optimizers.toml`."""
    return tuple(record.build_spec() for record in _read_records())


def build_plain_optimizer(known: OptimizerSpec) -> OptimizerSpec:
    """Return the optimizer as it updates parameters without fp32 copies.

    The states of torch's optimizers have then the parameters' type; bitsandbytes' keep their own.

    >>> build_plain_optimizer(get_optimizer("adamw")).per_parameter
    4.0
    """
    if not known.source.startswith("torch"):
        return replace(known, master=False)
    return replace(known, master=False, slots=tuple(replace(slot, dtype=None) for slot in known.slots))


def narrow_moments(known: OptimizerSpec, dtypes: tuple[str, str]) -> OptimizerSpec:
    """Return AdamW with its two moments in `dtypes`, as Transformer Engine's FusedAdam keeps them.

    >>> [slot.dtype for slot in narrow_moments(get_optimizer("adamw"), ("BF16", "F32")).slots]
    ['BF16', 'F32']
    """
    slots = tuple(replace(slot, dtype=dtype) for slot, dtype in zip(known.slots, dtypes, strict=True))
    source = "Transformer Engine 2.11, optimizers/fused_adam.py; megatron-core 0.16, optimizer/optimizer_config.py"
    return replace(known, slots=slots, source=source)


def get_optimizer(name: str) -> OptimizerSpec:
    """Return the optimizer of that name.

    Raises UsageError, naming those there are.

    >>> get_optimizer("lion").slots[0].elements(OptimizedTensor((2, 3), 6, hidden=True))
    6
    """
    for known in list_optimizers():
        if known.name == name:
            return known
    from difflib import get_close_matches  # rarely needed

    names, plain = [known.name for known in list_optimizers()], name.lower().replace("_", "-")
    same = [record.name for record in _read_records() if plain in record.other_names]
    meant = next(iter(same or get_close_matches(plain, names, 1)), "")
    guess = f"did you mean {meant}? " if meant else ""
    raise UsageError(f"unknown optimizer {name!r}", hint=f"{guess}The optimizers are {', '.join(names)}")
