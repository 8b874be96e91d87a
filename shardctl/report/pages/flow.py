"""Draws which file of the source goes into which file of the result, and how much of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_file_size
from shardctl.base.value import value_class
from shardctl.report.pages.svg import draw_box, draw_frame, draw_picture, draw_ribbon, draw_shapes, draw_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from markupsafe import Markup

_MAX_FILES_SHOWN: Final = 16
"""Files of either side; those beyond are one."""
_ROW_HEIGHT_PIXELS: Final = 26
_NAME_COLUMN_PERCENT: Final = 33.0
"""Percent of the width for the names of either side."""


@value_class
class _Node:
    name: str
    nbytes: int
    top: float
    height: float


def draw_flows(flows: Mapping[tuple[str, str], int]) -> Markup | None:
    """Draw bytes by file of the source and file of the result; None where nothing goes anywhere."""
    folded = fold_flows(flows)
    if not folded:
        return None
    lefts, rights = Counter[str](), Counter[str]()
    for (source, target), nbytes in folded.items():
        lefts[source] += nbytes
        rights[target] += nbytes
    high = _ROW_HEIGHT_PIXELS * max(len(lefts), len(rights), 2)
    before, after = _stack_nodes(lefts, high), _stack_nodes(rights, high)
    used = {node.name: node.top for node in before.values()}, {node.name: node.top for node in after.values()}
    ribbons = []
    for number, ((source, target), nbytes) in enumerate(folded.items()):
        ends = []
        for nodes, tops, name in ((before, used[0], source), (after, used[1], target)):
            size = nodes[name].height * nbytes / nodes[name].nbytes
            ends.append((1000 * tops[name] / high, 1000 * (tops[name] + size) / high))
            tops[name] += size
        about = f"{source} to {target}: {format_file_size(nbytes)}"
        ribbons.append(draw_ribbon(ends[0], ends[1], look=f"ribbon r{number % 2}", title=about))
    parts = [draw_shapes(_NAME_COLUMN_PERCENT + 1, 0, 98 - 2 * _NAME_COLUMN_PERCENT, high, ribbons)]
    for node in before.values():
        parts += _draw_node(node, 0, 100, "end", _NAME_COLUMN_PERCENT)
    for node in after.values():
        parts += _draw_node(node, 101 - _NAME_COLUMN_PERCENT, 0, "start", 99 - _NAME_COLUMN_PERCENT)
    label = "; ".join(
        f"{a} to {b}: {format_file_size(n)}" for (a, b), n in list(folded.items())[: 2 * _MAX_FILES_SHOWN]
    )
    return draw_picture(parts, height=high, label=f"what goes where. {label}")


def fold_flows(flows: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """Take the files beyond the first of either side together.

    >>> fold_flows({("a", f"rank-{n:02}"): 1 for n in range(18)})["a", "3 more files"]
    3
    """
    names: list[dict[str, str]] = []
    for side in (0, 1):
        known = list(dict.fromkeys(pair[side] for pair in flows))
        shown = known if len(known) <= _MAX_FILES_SHOWN else known[: _MAX_FILES_SHOWN - 1]
        rest = f"{len(known) - len(shown)} more files"
        names.append({name: name if name in shown else rest for name in known})
    folded: Counter[tuple[str, str]] = Counter()
    for (source, target), nbytes in flows.items():
        folded[names[0][source], names[1][target]] += nbytes
    return dict(folded)


def _stack_nodes(sizes: Counter[str], high: float) -> dict[str, _Node]:
    """Stack the files of a side, as high as their bytes, but none lower than its name."""
    least, gap = 16.0, 4.0
    room = high - gap * (len(sizes) - 1) - least * len(sizes)
    whole, top, nodes = sum(sizes.values()) or 1, 0.0, dict[str, _Node]()
    for name, nbytes in sizes.items():
        height = least + max(room, 0) * nbytes / whole
        nodes[name] = _Node(name, nbytes or 1, top, height)
        top += height + gap
    return nodes


def _draw_node(node: _Node, left: float, at: float, anchor: str, edge: float) -> list[str]:
    """Draw a file: its `edge`, and its name at one end of the room beside it, cut off where that ends."""
    about = f"{node.name}: {format_file_size(node.nbytes)}"
    middle = node.height / 2 + 4
    text = draw_text(at, middle, _shorten_path(node.name), look="name", anchor=anchor)
    return [
        draw_frame(left, node.top, _NAME_COLUMN_PERCENT - 1, node.height, [text]),
        draw_box(edge, node.top, 1, node.height, look="node", title=about),
    ]


def _shorten_path(path: str) -> str:
    """Leave out what many names of files have in common."""
    return path.rpartition("/")[2].removesuffix(".safetensors").replace("-of-", "/")
