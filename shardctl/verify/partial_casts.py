"""Finds tensors that were rounded to a narrower type while their peers were not, as no cast of a whole model does.

A cast of a whole model rounds every matrix, and may keep some roles in fp32: norms, routers, states. A tool that casts
by mistake rounds one tensor, one layer or one role.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import CASTABLE
from shardctl.base.errors import format_first_few
from shardctl.tensors.training import split_state_name
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.base.dtype import DType
    from shardctl.tensors.manifest import Tensor

CHECK: Final = "cast"
_NUMBER_PATTERN: Final = re.compile(r"\d+")
_EXACT_CAST_PAIRS: Final = frozenset({("F16", "F32"), ("BF16", "F32"), ("F16", "F64"), ("BF16", "F64"), ("F32", "F64")})
"""Casts that round nothing, from a type to a wider one."""


def find_partial_casts(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[CheckFinding]:
    """Find the tensors, each paired with its source's, that a cast of the whole model would not have rounded alone.

    Weights are judged apart from each kind of optimizer state: those have a type of their own.
    """
    kinds: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for mine, theirs in pairs:
        if {mine.dtype.name, theirs.dtype.name} <= CASTABLE:
            kinds.setdefault((split_state_name(mine.name) or ("",))[0], []).append((mine, theirs))
    for each in kinds.values():
        yield from _judge_kind(each)


def _judge_kind(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[CheckFinding]:
    """Judge tensors that a cast would have treated alike."""
    roles: dict[tuple[str, DType], dict[str, DType | None]] = {}
    for mine, theirs in pairs:
        role = _NUMBER_PATTERN.sub("*", mine.name), theirs.dtype
        roles.setdefault(role, {})[mine.name] = mine.dtype if _is_rounded(mine, theirs) else None
    matrices = {_NUMBER_PATTERN.sub("*", mine.name) for mine, _ in pairs if len(mine.shape) > 1}
    model = _find_model_type([held for role, held in roles.items() if role[0] in matrices] or [*roles.values()])
    odd: dict[DType, list[str]] = {}
    for held in roles.values():
        kept = sum(dtype is None for dtype in held.values()) > len(held) / 2
        for name, dtype in held.items():
            if dtype is not None and (kept or dtype != model):
                odd.setdefault(dtype, []).append(name)
    for dtype, names in odd.items():
        message = (
            f"{format_first_few(names)} were rounded to {dtype}, and their peers were not: a cast of the whole model "
            "does not explain that"
        )
        yield CheckFinding("error", CHECK, message, names[0])


def _is_rounded(mine: Tensor, theirs: Tensor) -> bool:
    return mine.dtype != theirs.dtype and (theirs.dtype.name, mine.dtype.name) not in _EXACT_CAST_PAIRS


def _find_model_type(roles: Sequence[dict[str, DType | None]]) -> DType | None:
    """Find the type to which at least half of the roles were rounded; None if the model was not cast."""
    usual = Counter(Counter(held.values()).most_common(1)[0][0] for held in roles)
    rounded = {dtype: count for dtype, count in usual.items() if dtype is not None and 2 * count >= len(roles)}
    return max(rounded, key=lambda dtype: rounded[dtype], default=None)
