"""Selects tensors by patterns for their names, before and after these are bound to a model's class.

>>> selection = NameSelection.parse(None, "^loss")
>>> selection.includes_tensor("model.norm.weight"), selection.includes_tensor("loss.weight")
(True, False)
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.tensors.training import split_state_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.tensors.manifest import Manifest, Tensor

_MATCH_ALL_PATTERN: Final = re.compile("")
_MATCH_NONE_PATTERN: Final = re.compile(r"(?!)")


@value_class
class NameSelection:
    """Which tensors `--include` and `--exclude` take."""

    include: re.Pattern[str] = _MATCH_ALL_PATTERN
    exclude: re.Pattern[str] = _MATCH_NONE_PATTERN

    @classmethod
    def parse(cls, include: str | None, exclude: str | None) -> NameSelection | None:
        """Parse both options; None if neither is given. Raises UsageError for what is no regular expression."""
        if include is None and exclude is None:
            return None
        return cls(
            compile_pattern("--include", include) if include is not None else _MATCH_ALL_PATTERN,
            compile_pattern("--exclude", exclude) if exclude is not None else _MATCH_NONE_PATTERN,
        )

    @classmethod
    def of_record(cls, options: Mapping[str, str]) -> NameSelection | None:
        """Return what a conversion took, by the options in its record."""
        return cls.parse(options.get("include"), options.get("exclude"))

    def includes_tensor(self, name: str) -> bool:
        """Return whether a tensor of this name is taken."""
        return self.include.search(name) is not None and self.exclude.search(name) is None

    def excludes_tensor(self, tensor: Tensor, *, by_arrays: bool) -> bool:
        """Return whether a tensor is excluded by its canonical name or, if `by_arrays`, by those of all its arrays.

        An embedding that is also stored as a head stays if only the head is excluded.
        """
        arrays = {chunk.name for chunk in tensor.chunks} if by_arrays else set()
        return self.exclude.search(tensor.name) is not None or (bool(arrays) and all(map(self.exclude.search, arrays)))

    def select_stored(self, stored: Manifest) -> Manifest:
        """Return the tensors that are taken by their stored names, and the states that an optimizer has of them."""
        tensors = {name: tensor for name, tensor in stored.tensors.items() if self.includes_tensor(name)}
        left = stored.tensors.keys() - tensors.keys()
        training = stored.training
        if training is not None:
            states = {n: t for n, t in training.states.items() if (split_state_name(n) or ("", n))[1] not in left}
            training = replace(training, states=states)
        return replace(stored, tensors=tensors, training=training)

    def takes_tensor(self, tensor: Tensor, *, by_arrays: bool) -> bool:
        """Return whether a tensor is included, by any of the same names, and not excluded."""
        arrays = {chunk.name for chunk in tensor.chunks} if by_arrays else set()
        included = any(map(self.include.search, {tensor.name, *arrays}))
        return included and not self.excludes_tensor(tensor, by_arrays=by_arrays)


def compile_pattern(option: str, text: str) -> re.Pattern[str]:
    """Compile what an option gives; raises UsageError, which names it, for anything but a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"{option} {text!r} is not a regular expression: {error}") from error
