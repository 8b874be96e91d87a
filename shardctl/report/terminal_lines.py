"""Breaks long lines between words, for terminals: a terminal itself breaks them within words."""

from __future__ import annotations

import re
from typing import Final

from rich.cells import cell_len

_ANSI_STYLE_PATTERN: Final = re.compile(r"\x1b\[[0-9;]*m")
_COLUMN_GAP_PATTERN: Final = re.compile(r"(?<=\S) {2,}(?=\S)")
"""What lies between two columns of a table."""
_INDENT_STEP_COLUMNS: Final = 4
"""Columns by which what follows is indented."""


def wrap_terminal_lines(content: str, columns: int) -> str:
    """Break every line of more than `columns` between words; a longer word, such as a path, stays whole.

    What follows is indented by four more than the line. In a table, whose lines are indented, it begins where the last
    column does, if that leaves half of the terminal.

    >>> print(wrap_terminal_lines("fits: rank 0 needs 3 GiB of the 80 GiB of a device", 40))
    fits: rank 0 needs 3 GiB of the 80 GiB
        of a device
    >>> print(wrap_terminal_lines("  tp2  12 ms  compute 60 %, memory 30 %, communication 10 %", 40))
      tp2  12 ms  compute 60 %, memory 30 %,
                  communication 10 %
    """
    return "\n".join(_wrap_line(line, columns) for line in content.split("\n"))


def _wrap_line(line: str, columns: int) -> str:
    plain = _ANSI_STYLE_PATTERN.sub("", line)
    if cell_len(plain) <= columns:
        return line
    hang = _find_hanging_indent(plain, columns)
    lines, width, filled = [""], 0, False
    for space, word in re.findall(r"( *)([^ ]+)", line):
        length = cell_len(_ANSI_STYLE_PATTERN.sub("", word))
        if filled and width + len(space) + length > columns:
            lines.append(" " * hang + word)
            width = hang + length
        else:
            lines[-1] += space + word
            width += len(space) + length
        filled = filled or length > 0
    return "\n".join(lines)


def _find_hanging_indent(plain: str, columns: int) -> int:
    begin = len(plain) - len(plain.lstrip(" "))
    found = [cell_len(plain[: gap.end()]) for gap in _COLUMN_GAP_PATTERN.finditer(plain)] if begin else []
    return max((at for at in found if at <= columns // 2), default=begin + _INDENT_STEP_COLUMNS)
