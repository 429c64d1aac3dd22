"""A plot of ratios as SVG, written by hand: no library is needed for bars."""

from __future__ import annotations

from html import escape

from ferryman_bench.comparison import CellResult, ContestResult
from ferryman_bench.hardware import Machine

WIDTH, LEFT, RIGHT, TOP = 720, 150, 60, 64
BAR, GAP = 14, 12
COLOURS = ("#8a8f98", "#2f6fb0", "#c2703d")
FONT = "font-family='sans-serif' font-size='12'"


def ratio_plot(result: ContestResult, machine: Machine) -> str:
    """Bars of our speed as a multiple of each peer's, by cell, and a line at 1."""
    peers = result.contenders[1:]
    ratios = [cell.ratio(peer) for cell in result.results for peer in peers]
    scale = (WIDTH - LEFT - RIGHT) / max([1.0, *ratios])
    each = BAR * len(peers) + GAP
    bottom = TOP + each * len(result.results)
    body = [*_legend(peers), _level(LEFT + scale, bottom)]
    for number, cell in enumerate(result.results):
        body += _bars(cell, peers, TOP + number * each, scale)
    body.append(_text(8, 18, f"Ferryman's speed as a multiple: {result.title}", "start"))
    body.append(_text(8, bottom + 14, str(machine), "start"))
    return _picture(body, bottom + 24)


def _picture(body: list[str], height: int) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
        f"viewBox='0 0 {WIDTH} {height}'>\n"
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _bars(cell: CellResult, peers: tuple[str, ...], top: int, scale: float) -> list[str]:
    """A cell's name, and for each peer a bar with its ratio behind it."""
    found = [_text(LEFT - 8, top + BAR * len(peers) / 2 + 4, cell.cell.name, "end")]
    for index, peer in enumerate(peers):
        ratio, above = cell.ratio(peer), top + index * BAR
        found += [
            f"<rect x='{LEFT}' y='{above}' width='{ratio * scale:.1f}' height='{BAR - 2}' "
            f"fill='{_colour(index)}'/>",
            _text(LEFT + ratio * scale + 4, above + 11, f"{ratio:.2f}", "start"),
        ]
    return found


def _level(left: float, bottom: int) -> str:
    return (
        f"<line x1='{left:.1f}' y1='{TOP - 6}' x2='{left:.1f}' y2='{bottom}' stroke='black' "
        "stroke-dasharray='3 3'/>"
    )


def _legend(peers: tuple[str, ...]) -> list[str]:
    found = []
    for index, peer in enumerate(peers):
        left = LEFT + index * 130
        found.append(f"<rect x='{left}' y='32' width='12' height='12' fill='{_colour(index)}'/>")
        found.append(_text(left + 18, 42, peer, "start"))
    return found


def _text(left: float, base: float, text: str, anchor: str) -> str:
    return (
        f"<text x='{left:.1f}' y='{base:.1f}' {FONT} text-anchor='{anchor}'>{escape(text)}</text>"
    )


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
