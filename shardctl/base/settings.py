"""Defines the values that optimizer settings can have, in JSON and in every pickle."""

from __future__ import annotations

from typing import Any, Final, TypeGuard

Setting = None | bool | int | float | str | tuple["Setting", ...]
"""A value that every optimizer can be told, and JSON and every pickle can hold."""

_MAX_NESTING_DEPTH: Final = 4
"""Lists in one another that a setting may be."""
_MAX_SETTING_VALUES: Final = 1 << 20
"""Values in them: the longest setting is the names of all parameters of a group."""
_INTEGER_LIMIT: Final = 1 << 63
"""No number that anything counts is as large."""


def as_setting(node: object) -> tuple[Setting] | None:
    """Return the number, text, None or list of those that a node of a pickle or of JSON is, alone in a tuple.

    None for anything else; for what would take long to look at: lists too deep in one another, or of too many values in
    all (a list may hold the same list often, so that a short pickle can describe an endless one); and for what could
    not be written again: whole numbers beyond 64 bits, and text with halves of surrogate pairs.

    >>> as_setting([0.9, 0.95]), as_setting(None), as_setting({"lr": 0.1})
    (((0.9, 0.95),), (None,), None)
    """
    return (
        (_freeze_setting(node),)
        if _count_values(node, _MAX_NESTING_DEPTH, _MAX_SETTING_VALUES) <= _MAX_SETTING_VALUES
        else None
    )


def _count_values(node: object, depth: int, most: int) -> int:
    """Count values in a setting, one for an empty list; more than `most` for what has more, or is no setting."""
    if not isinstance(node, list | tuple):
        return 1 if _is_plain(node) else most + 1
    found = 0
    for part in node if depth else ():
        found += _count_values(part, depth - 1, most - found)
        if found > most:
            return found
    return max(found, 1) if depth else most + 1


def _is_plain(node: object) -> bool:
    if isinstance(node, int):
        return -_INTEGER_LIMIT <= node < _INTEGER_LIMIT
    return node is None or isinstance(node, float) or is_text(node)


def is_text(node: object) -> TypeGuard[str]:
    """Return whether this is a text that can be written."""
    return isinstance(node, str) and (node.isascii() or not any("\ud800" <= c <= "\udfff" for c in node))


def as_steps(setting: Setting) -> int | None:
    """Return the number of steps that a setting is, also if it is a float without a fraction; None for anything else.

    >>> as_steps(3.0), as_steps(0.5), as_steps(float("inf")), as_steps(True)
    (3, None, None, None)
    """
    if isinstance(setting, bool) or not isinstance(setting, int | float) or not 0 <= setting < _INTEGER_LIMIT:
        return None
    return int(setting) if setting == int(setting) else None


def _freeze_setting(node: Any) -> Setting:  # noqa: ANN401 - a node that was found to be a setting
    return tuple(map(_freeze_setting, node)) if isinstance(node, list | tuple) else node
