"""Charts as SVG text: bars of shares, and lines of speedups. Colours are classes that the page's styles define, so that both themes fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, TOP, BOTTOM = 232, 150, 38, 22
"""Of one panel of bars, in pixels."""
PLOT_WIDTH, PLOT_HEIGHT, LEFT, RIGHT, FOOT = 860, 300, 48, 200, 36
"""Of the plot of lines; names stand right of it."""
NAME_HEIGHT = 17


def bars(title: str, note: str, shares: Sequence[tuple[str, float]]) -> str:
    """A panel of one bar for each (name, share from 0 to 1), the share written above it."""
    room, step = HEIGHT - TOP - BOTTOM, WIDTH / max(len(shares), 1)
    parts = []
    for n, (name, share) in enumerate(shares):
        height, middle = room * share, step * (n + 0.5)
        size = min(34.0, step * 0.7)
        parts.append(f'<rect class="bar" x="{middle - size / 2:.1f}" y="{TOP + room - height:.1f}" width="{size:.1f}" height="{height:.1f}" rx="2"/>')
        parts.append(f'<text class="value" x="{middle:.1f}" y="{TOP + room - height - 4:.1f}">{share:.0%}</text>')
        parts.append(f'<text class="name" x="{middle:.1f}" y="{HEIGHT - 6}">{escape(name)}</text>')
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares)
    return (
        f'<figure><figcaption><b>{escape(title)}</b> <span class="quiet">{escape(note)}</span></figcaption>'
        f'<svg viewBox="0 18 {WIDTH} {HEIGHT - 18}" role="img" aria-label="{escape(title)}: {escape(told)}">{"".join(parts)}'
        f'<line class="axis" x1="0" x2="{WIDTH}" y1="{TOP + room}" y2="{TOP + room}"/></svg></figure>'
    )


@dataclass(frozen=True)
class Line:
    """Points (x, y) in the order of x, and perhaps one that was measured."""

    name: str
    points: Sequence[tuple[float, float]]
    measured: tuple[float, float] | None = None


def curves(lines: Sequence[Line]) -> str:
    """Lines over drafted tokens, their names at their ends, y from 0; measured points as rings, and a line where plain decoding is."""
    drawn = [p for line in lines for p in (*line.points, *([line.measured] if line.measured else []))]
    most_x, most_y = max(x for x, _ in drawn), max(1.2, 1.1 * max(y for _, y in drawn))
    room = PLOT_HEIGHT - FOOT - 10

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (PLOT_WIDTH - LEFT - RIGHT) * x / most_x, 10 + room * (1 - y / most_y)

    parts = _axes(most_x, most_y, place)
    ends = sorted((place(*line.points[-1])[1], n) for n, line in enumerate(lines))
    heights: dict[int, float] = {}
    for y, n in ends:  # names that would cover each other move down
        heights[n] = max(y, *(h + NAME_HEIGHT for h in heights.values())) if heights else y
    for n, line in enumerate(lines):
        spots = [place(*p) for p in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline class="line c{n}" points="{path}"/>')
        parts += [f'<circle class="dot c{n}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>' for x, y in spots]
        if line.measured is not None:
            x, y = place(*line.measured)
            parts.append(f'<circle class="ring c{n}" cx="{x:.1f}" cy="{y:.1f}" r="6.5"><title>measured: {line.measured[1]:.2f}</title></circle>')
        x, end = spots[-1]
        right = PLOT_WIDTH - RIGHT + 14
        parts.append(f'<polyline class="lead" points="{x + 6:.1f},{end:.1f} {right - 4:.1f},{heights[n]:.1f}"/>')
        parts.append(f'<text class="label c{n}" x="{right}" y="{heights[n] + 4:.1f}">{escape(line.name)}</text>')
    told = "; ".join(f"{line.name}: " + ", ".join(f"{x:g} drafted {y:.2f}" for x, y in line.points) for line in lines)
    legend = '<p class="quiet">Lines: predicted from measured costs and acceptance. Rings: measured, one prompt at a time.</p>'
    return f'<svg class="plot" viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}" role="img" aria-label="{escape(told)}">{"".join(parts)}</svg>{legend}'


def _axes(most_x: float, most_y: float, place: Callable[[float, float], tuple[float, float]]) -> list[str]:
    parts = []
    step = 0.5 if most_y > 1 else 0.25
    for n in range(int(most_y / step) + 1):
        x, y = place(0, n * step)
        parts.append(f'<line class="{"one" if n * step == 1 else "grid"}" x1="{x:.1f}" x2="{PLOT_WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{x - 8:.1f}" y="{y + 4:.1f}">{n * step:g}</text>')
    stride = max(1, round(most_x / 10))
    for n in range(0, int(most_x) + 1, stride):
        x, y = place(n, 0)
        parts.append(f'<text class="name" x="{x:.1f}" y="{y + 16:.1f}">{n}</text>')
    x, y = place(most_x / 2, 0)
    return [*parts, f'<text class="name" x="{x:.1f}" y="{y + 32:.1f}">drafted tokens a pass</text>']
