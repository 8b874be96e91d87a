"""Draws bars and curves as SVG, without a library."""

import math
from html import escape

COLOURS = ("#4c78a8", "#54a24b", "#f58518", "#b279a2")
WIDTH, ROW, LEFT = 960, 26, 300


def draw_bars(path, title, bars, aim):
    """Draw a bar for each name and number, and a line at the aim."""
    scale = (WIDTH - LEFT - 70) / max(*(value for _, value in bars), aim)
    height = ROW * (len(bars) + 2)
    parts = [f'<text x="4" y="18" font-weight="bold">{escape(title)}</text>']
    for row, (name, value) in enumerate(bars, 1):
        y = ROW * row + 4
        parts += [
            f'<text x="4" y="{y + 14}">{escape(name.replace("`", ""))}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{value * scale:.1f}" height="18" fill="{COLOURS[0]}"/>',
            f'<text x="{LEFT + value * scale + 6:.1f}" y="{y + 14}">{value:.2f}</text>',
        ]
    at = LEFT + aim * scale
    parts += [
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{ROW}" y2="{height - 22}" stroke="#e45756" stroke-dasharray="4"/>',
        f'<text x="{at:.1f}" y="{height - 8}" text-anchor="middle" fill="#e45756">aim {aim}</text>',
    ]
    write_picture(path, height, parts)


def draw_curve(path, title, curves, unit):
    """Draw named lists of points ``(x, y)``; x grows by doubling, y from zero."""
    xs = sorted({x for points in curves.values() for x, _ in points})
    low, high = math.log(xs[0]), math.log(xs[-1])
    top = max(y for points in curves.values() for _, y in points) * 1.1
    height, right, bottom = 320, WIDTH - 180, 270

    def place(x, y):
        across = (math.log(x) - low) / (high - low) if high > low else 0.5
        return 60 + across * (right - 60), bottom - y / top * (bottom - 40)

    parts = [f'<text x="4" y="18" font-weight="bold">{escape(title)}</text>']
    for step in range(5):
        value = top * step / 4
        y = place(xs[0], value)[1]
        parts.append(f'<line x1="60" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="52" y="{y + 4:.1f}" text-anchor="end" fill="#666666">{value:.3g}</text>')
    for x in xs:
        shown = f"{x:,}" if isinstance(x, int) else f"{x:.1f}"
        parts.append(
            f'<text x="{place(x, 0)[0]:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#666666">{shown}{unit}</text>'
        )
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{c[0]:.1f}" cy="{c[1]:.1f}" r="3" fill="{colour}"/>' for c in (place(*p) for p in points)
        ]
        parts.append(f'<rect x="{right + 20}" y="{40 + 24 * number}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{right + 40}" y="{52 + 24 * number}">{escape(name)}</text>')
    write_picture(path, height, parts)


def write_picture(path, height, parts):
    """Write the parts as a file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
    path.write_text("\n".join([f'{head}font-size="12">', *parts, "</svg>", ""]))
