"""Writes the few elements of SVG that the pictures of reports consist of.

Places across are shares of the width in percent, places down are pixels: a picture grows with the window, and its text
keeps its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from shardctl.report.visible import escape_control_characters

if TYPE_CHECKING:
    from collections.abc import Iterable


def draw_picture(parts: Iterable[str], *, height: float, label: str) -> Markup:
    """Put elements together to a picture of `height` pixels; `label` is what it says to those who do not see it."""
    head = f'<svg role="img" width="100%" height="{height:g}" aria-label="{_escape(label)}">'
    return Markup("{}{}</svg>").format(Markup(head), Markup("").join(map(Markup, parts)))  # noqa: S704 - escaped


def draw_box(left: float, top: float, width: float, height: float, *, look: str, title: str = "") -> str:
    """Draw a rectangle; `look` is a class of the style sheet, `title` is shown under the pointer."""
    place = f'x="{left:.2f}%" y="{top:g}" width="{max(width, 0):.2f}%" height="{height:g}"'
    return f'<rect class="{look}" {place}>{_write_title(title)}</rect>'


def draw_line(left: float, top: float, right: float, bottom: float, *, look: str) -> str:
    """Draw a straight line."""
    return f'<line class="{look}" x1="{left:.2f}%" y1="{top:g}" x2="{right:.2f}%" y2="{bottom:g}"/>'


def draw_dot(left: float, top: float, radius: float, *, look: str, title: str = "") -> str:
    """Draw a disc with a radius in pixels."""
    return f'<circle class="{look}" cx="{left:.2f}%" cy="{top:.1f}" r="{radius:g}">{_write_title(title)}</circle>'


def draw_text(left: float, top: float, text: str, *, look: str = "", anchor: str = "start") -> str:
    """Write a line of text whose baseline is at `top`; `anchor` is start, middle or end."""
    return f'<text class="{look}" x="{left:.2f}%" y="{top:g}" text-anchor="{anchor}">{_escape(text)}</text>'


def draw_frame(left: float, top: float, width: float, height: float, parts: Iterable[str]) -> str:
    """Put elements in a frame that cuts off what goes beyond it; they are placed by shares of the frame."""
    place = f'x="{left:.2f}%" y="{top:g}" width="{max(width, 0):.2f}%" height="{height:g}"'
    return f"<svg {place}>{''.join(parts)}</svg>"


def draw_shapes(left: float, top: float, width: float, height: float, shapes: Iterable[str]) -> str:
    """Put shapes whose corners are of 0 to 1000 both ways in a frame that stretches them."""
    place = f'x="{left:.2f}%" y="{top:g}" width="{width:.2f}%" height="{height:g}"'
    return f'<svg {place} viewBox="0 0 1000 1000" preserveAspectRatio="none">{"".join(shapes)}</svg>'


def draw_polygon(corners: Iterable[tuple[float, float]], *, look: str, title: str = "") -> str:
    """Draw a filled shape, for `draw_shapes`."""
    points = " ".join(f"{left:.1f},{top:.1f}" for left, top in corners)
    return f'<polygon class="{look}" points="{points}">{_write_title(title)}</polygon>'


def draw_ribbon(left: tuple[float, float], right: tuple[float, float], *, look: str, title: str = "") -> str:
    """Draw a ribbon from the left edge to the right one, each end a top and a bottom, for `draw_shapes`."""
    above = f"M0,{left[0]:.1f} C500,{left[0]:.1f} 500,{right[0]:.1f} 1000,{right[0]:.1f}"
    below = f"L1000,{right[1]:.1f} C500,{right[1]:.1f} 500,{left[1]:.1f} 0,{left[1]:.1f} Z"
    return f'<path class="{look}" d="{above} {below}">{_write_title(title)}</path>'


def _write_title(text: str) -> str:
    return f"<title>{_escape(text)}</title>" if text else ""


def _escape(text: str) -> str:
    return str(escape(escape_control_characters(text)))
