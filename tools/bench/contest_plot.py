"""A plot of a contest's ratios."""

from __future__ import annotations

from typing import Any

from tools.bench.contest_result import ContestResult

from ferryman_bench.hardware import Machine
from ferryman_simulator.report import load_pyplot

COLOURS = ("#8a8f98", "#2f6fb0", "#c2703d")
_WIDTH_INCHES, _MARGIN_INCHES, _BAR_INCHES = 9.0, 1.6, 0.2
# The share of a cell's height that its bars fill.
_FILLED = 0.7


def ratio_figure(result: ContestResult, machine: Machine) -> Any:
    """Bars of our speed as a multiple of each peer's, by cell, and a line at 1."""
    peers, cells = result.contenders[1:], result.results
    height = _MARGIN_INCHES + _BAR_INCHES * len(cells) * (len(peers) + 1)
    figure, axes = load_pyplot().subplots(figsize=(_WIDTH_INCHES, height))
    bar_height = _FILLED / max(1, len(peers))
    for index, peer in enumerate(peers):
        centres = [row + (index + 0.5) * bar_height - _FILLED / 2 for row in range(len(cells))]
        ratios = [cell.ratio(peer) for cell in cells]
        bars = axes.barh(centres, ratios, bar_height, color=COLOURS[index % 3], label=peer)
        axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linestyle="--")
    axes.set_yticks(range(len(cells)), [cell.cell.name for cell in cells])
    axes.invert_yaxis()
    axes.set_title(f"Ferryman's speed as a multiple: {result.title}", loc="left", fontsize=10)
    axes.set_xlabel(str(machine), fontsize=8)
    if peers:
        axes.legend(frameon=False)
    figure.tight_layout()
    return figure
