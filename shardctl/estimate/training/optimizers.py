"""Lists the states that each optimizer keeps of every tensor between steps: their elements and types.

Single numbers that optimizers keep of each tensor (`step`, most on the host, and Adafactor's `RMS`) are left out.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.training.preconditioner_blocks import count_blocks, count_packed_sides

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Bytes per rank that no tensor adds to."""
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
CODES: Final = 256 * 4
"""Bytes of the table that says what each of 256 codes means; all tensors share it."""


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


def _build_8_bit_slots(*moments: str, paged: bool = False) -> tuple[StateSlot, ...]:
    """Build the states of an optimizer whose `moments` are codes of 8 bits with a scale for each block."""
    slots: list[StateSlot] = []
    for moment in moments:
        if paged:
            slots.append(StateSlot(f"{moment}, 8-bit codes in pages", _count_in_pages(_count_codes), "U8", paged=True))
        slots += (
            StateSlot(f"{moment}, 8-bit codes", _count_resident(_count_codes) if paged else _count_codes, "U8"),
            StateSlot(f"{moment}, scales", _count_scales),
            StateSlot(f"{moment} of small tensors", _count_uncoded),
        )
    return tuple(slots)


_ADAM_STATE_NAMES: Final = ("first moment", "second moment")
_BITSANDBYTES_SOURCE: Final = "bitsandbytes 0.50, optim/optimizer.py"

OPTIMIZERS: Final = (
    OptimizerSpec(
        "adamw",
        "AdamW",
        tuple(StateSlot(name, _count_elements) for name in _ADAM_STATE_NAMES),
        "torch 2.13, torch.optim.AdamW",
        temporary=True,
    ),
    OptimizerSpec(
        "adamw-bf16",
        "AdamW without fp32 copies: parameters, gradients and moments in the type that computes",
        tuple(StateSlot(name, _count_elements, None) for name in _ADAM_STATE_NAMES),
        "torch 2.13, torch.optim.AdamW (states are `zeros_like` the parameter)",
        master=False,
        temporary=True,
    ),
    OptimizerSpec(
        "adamw-8bit",
        "AdamW with moments in 8 bits",
        _build_8_bit_slots(*_ADAM_STATE_NAMES),
        f"{_BITSANDBYTES_SOURCE}, Optimizer2State",
        constant=2 * CODES,
    ),
    OptimizerSpec(
        "paged-adamw",
        "AdamW with moments in pages that can leave the device",
        tuple(
            slot
            for name in _ADAM_STATE_NAMES
            for slot in (
                StateSlot(f"{name} in pages", _count_in_pages(_count_elements), paged=True),
                StateSlot(f"{name} of small tensors", _count_resident(_count_elements)),
            )
        ),
        f"{_BITSANDBYTES_SOURCE}, get_state_buffer",
    ),
    OptimizerSpec(
        "paged-adamw-8bit",
        "AdamW with moments in 8 bits, in pages that can leave the device",
        _build_8_bit_slots(*_ADAM_STATE_NAMES, paged=True),
        f"{_BITSANDBYTES_SOURCE}, Optimizer2State and get_state_buffer",
        constant=2 * CODES,
    ),
    OptimizerSpec("sgd", "SGD", (), "torch 2.13, torch.optim.SGD"),
    OptimizerSpec(
        "sgd-momentum", "SGD with momentum", (StateSlot("momentum", _count_elements),), "torch 2.13, torch.optim.SGD"
    ),
    OptimizerSpec(
        "adafactor",
        "Adafactor without first moment",
        (
            StateSlot("row variances", _count_rows),
            StateSlot("column variances", _count_columns),
            StateSlot("variances of vectors", _count_unfactored),
        ),
        "Shazeer and Stern 2018, sec. 3; transformers 5.23, optimization.Adafactor; torch 2.13, torch.optim.Adafactor",
        temporary=True,
        trainer_copies=2,
    ),
    OptimizerSpec(
        "muon",
        "Muon for the matrices of layers, AdamW for all else",
        (
            StateSlot("momentum of matrices", _count_hidden),
            StateSlot("first moment of the others", _count_others),
            StateSlot("second moment of the others", _count_others),
        ),
        "torch 2.13, torch.optim.Muon and AdamW; Jordan et al. 2024",
        splits=True,
    ),
    OptimizerSpec(
        "soap",
        "SOAP: Adam in the eigenbasis of Shampoo's preconditioners",
        (
            *(StateSlot(name, _count_elements) for name in _ADAM_STATE_NAMES),
            StateSlot("preconditioners", _count_sides, square=True),
            StateSlot("their eigenvectors", _count_sides, square=True),
        ),
        "Vyas et al. 2024, algorithm 3; pytorch_optimizer 4.1, optimizer/soap.py",
    ),
    OptimizerSpec(
        "shampoo",
        "Shampoo with the step size of Adam",
        (
            StateSlot("momentum", _count_elements, None),
            StateSlot("second moment, for the step size", _count_elements, None),
            StateSlot("preconditioners", _count_packed_sides, square=True),
            StateSlot("their inverse roots", _count_packed_sides, square=True),
        ),
        "Shi et al. 2023; facebookresearch/optimizers f606606, distributed_shampoo, grafting from Adam",
        spreads=True,
    ),
    OptimizerSpec(
        "lion",
        "Lion",
        (StateSlot("momentum", _count_elements),),
        "Chen et al. 2023, algorithm 2; bitsandbytes 0.50, Lion",
    ),
    OptimizerSpec(
        "lion-8bit",
        "Lion with momentum in 8 bits",
        _build_8_bit_slots("momentum"),
        f"{_BITSANDBYTES_SOURCE}, Optimizer1State",
        constant=CODES,
    ),
)
"""All that shardctl knows."""


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


_OTHER_NAMES: Final = {
    **dict.fromkeys(("adam", "fusedadam", "fused-adam", "adamw-torch", "adamw-torch-fused", "adamw-hf"), "adamw"),
    **dict.fromkeys(("adam-8bit", "adam8bit", "adamw8bit", "adamw-bnb-8bit", "8bit-adam"), "adamw-8bit"),
    **dict.fromkeys(("momentum", "nesterov"), "sgd-momentum"),
}
"""What libraries call optimizers that keep the same states."""


def get_optimizer(name: str) -> OptimizerSpec:
    """Return the optimizer of that name.

    Raises UsageError, naming those there are.

    >>> get_optimizer("lion").slots[0].elements(OptimizedTensor((2, 3), 6, hidden=True))
    6
    """
    for known in OPTIMIZERS:
        if known.name == name:
            return known
    from difflib import get_close_matches  # rarely needed

    names, plain = [known.name for known in OPTIMIZERS], name.lower().replace("_", "-")
    meant = _OTHER_NAMES.get(plain) or next(iter(get_close_matches(plain, names, 1)), "")
    guess = f"did you mean {meant}? " if meant else ""
    raise UsageError(f"unknown optimizer {name!r}", hint=f"{guess}The optimizers are {', '.join(names)}")
