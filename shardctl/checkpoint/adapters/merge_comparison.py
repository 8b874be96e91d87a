"""Says of merged weights that another version or program computed whether rounding explains how they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.amounts import format_plural
from shardctl.base.errors import format_first_few
from shardctl.checkpoint.adapters.merging import ARITHMETIC_VERSION, MERGE_ARITHMETIC, MERGED
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.verify.content import TensorDifference

_IDENTITY_CHECK_NAME = "identity"


def explain_merge_differences(
    checkpoint: OpenedCheckpoint, other: OpenedCheckpoint, differences: Sequence[TensorDifference]
) -> tuple[list[TensorDifference], Iterator[CheckFinding]]:
    """Take out of the differences those of merged tensors that rounding explains, and say so in their place.

    `other` is the base, into which this version has merged the adapters.
    """
    reason = _explain_other_rounding(checkpoint) if other.adapted else ""
    adapted = {tensor.name for tensor in other.adapted}
    merged = [each for each in differences if reason and each.tensor in adapted]
    near = [each for each in merged if each.distance is not None and each.distance.rounding]
    return [each for each in differences if each not in near], _list_findings(reason, near, merged)


def _explain_other_rounding(checkpoint: OpenedCheckpoint) -> str:
    """Explain why merged weights may be rounded otherwise than this version does; empty if they must not be."""
    options = checkpoint.record.options if checkpoint.record is not None else {}
    if MERGED not in options:  # PEFT, or any other program
        return "no record says that shardctl merged them, and other programs add up products in orders of their own"
    version = options.get(MERGE_ARITHMETIC, "1")
    if version == str(ARITHMETIC_VERSION):
        return ""
    return f"version {version} of the arithmetic of merges made them, and this is version {ARITHMETIC_VERSION}"


def _list_findings(
    reason: str, near: Sequence[TensorDifference], merged: Sequence[TensorDifference]
) -> Iterator[CheckFinding]:
    if near:
        names, count = format_first_few(each.tensor for each in near), sum(each.count for each in near)
        message = (
            f"{names} cannot be compared bit for bit, because {reason}: "
            f"{format_plural(count, 'element')} are one rounding apart, and all others are equal"
        )
        yield CheckFinding("warning", _IDENTITY_CHECK_NAME, message)
    elif merged:
        message = f"merged weights may be one rounding apart, because {reason}; these are further apart"
        yield CheckFinding("warning", _IDENTITY_CHECK_NAME, message)
