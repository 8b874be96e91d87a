"""Says where derived rules come from, and what they leave whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import format_first_few
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from shardctl.tensors.placement import AxisPartition, GroupMember

SHAPES: Final = "names and shapes"
"""The origin of a rule that no library confirms."""
ORDER_UNKNOWN: Final = "what is fused in it, in which order, is not known"
"""Why an array stays whole that holds more than one projection."""
_VERIFICATION_HINT: Final = "reshard --prove or verify --forward proves it, inspect --show-rules prints it"


@value_class
class TensorRule:
    """How one tensor is cut by tp or the axes of experts; fsdp and pp are added to this."""

    cuts: tuple[tuple[AxisPartition, ...], ...]
    """By dim; all empty for a tensor that stays whole."""
    origin: str
    """`names and shapes`, or the class and version of transformers."""
    note: str = ""
    """What the tensor is, such as `queries by heads`."""
    member: GroupMember | None = None
    """Which of the experts it is, if it is one's."""


@value_class
class DerivedRule:
    """One line of a derived table."""

    pattern: str
    """Over names, as in a rule file."""
    rule: TensorRule
    """Of each tensor that matches; of experts, that of the first one."""


@value_class
class UncutTensors:
    """Tensors that stay whole on every tp rank because it is not known how to cut them."""

    pattern: str
    reason: str


@value_class
class RuleDerivation:
    """A derived table."""

    architecture: str
    rules: tuple[DerivedRule, ...]
    """In model order; those of tensors that are known to stay whole are left out."""
    uncut: tuple[UncutTensors, ...]
    experts: tuple[str, ...] = ()
    """Patterns whose last `*` counts experts."""

    @property
    def origins(self) -> tuple[str, ...]:
        """Where the rules are from, each once."""
        return tuple(dict.fromkeys(each.rule.origin for each in self.rules))

    @property
    def unordered(self) -> tuple[str, ...]:
        """Patterns of arrays that no tp rank has a part of, because the order of what is fused in them is not known."""
        rules = (each.pattern for each in self.rules if ORDER_UNKNOWN in each.rule.note)
        return (*rules, *(each.pattern for each in self.uncut if each.reason == ORDER_UNKNOWN))

    def describe(self) -> str:
        """Return one sentence for people who did not ask for it."""
        what = self.architecture or "this model"
        source = " and ".join(self.origins) or "nothing that is known"
        whole = ""
        unordered = self.unordered
        others = [each.pattern for each in self.uncut if each.pattern not in unordered]
        if unordered:
            whole = f"; whole, because the order of what is fused in them is not known: {format_first_few(unordered)}"
        if others:
            whole += f"; whole, because it is not known how to cut them: {format_first_few(others)}"
        return f"shardctl has no table for {what}; its cuts are derived from {source}{whole}; {_VERIFICATION_HINT}"
