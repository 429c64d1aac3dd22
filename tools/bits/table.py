"""The table of bits: each way's answers compared with the cold run's, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from tools.bits.compared_answer import (
    ComparedAnswer,
    Expected,
    NotTried,
    have_equal_bits,
    have_equal_tokens,
)
from tools.bits.measured_engine import ColdRuns, MeasuredCase, options_of
from tools.bits.models import saved_model
from tools.bits.step_record import StepRecord
from tools.bits.ways import ReuseWay

from ferryman.errors import ConfigError

EMPTY = "–"


@dataclass(slots=True)
class BitsCell:
    """The answers of one way for one model in one dtype, counted.

    `tried` were compared: `equal` of them have the cold run's tokens, `bits` its tokens and the
    bits of the numbers that came with them. The others were not tried, by reason; `is_possible`
    unless none could be.
    """

    way: str
    model: str
    dtype: str
    tried: int = 0
    equal: int = 0
    bits: int = 0
    not_tried: Counter[str] = field(default_factory=Counter)
    is_possible: bool = True

    @property
    def is_exact(self) -> bool:
        """Whether all that was tried is equal to the bit, and something was. A way that cannot be
        taken is no breach."""
        return self.bits == self.tried > 0 or not self.is_possible

    @property
    def text(self) -> str:
        return f"{self.equal} {self.bits} /{self.tried}" if self.tried else EMPTY

    def refuse(self, error: ConfigError) -> None:
        """The model cannot be served so, or not in this way."""
        self.not_tried[str(error)] += 1
        self.is_possible = False

    def count(self, tried: ComparedAnswer | NotTried, cold: Expected) -> None:
        if isinstance(tried, NotTried):
            self.not_tried[tried.reason] += 1
            self.is_possible = self.is_possible and tried.is_possible
            return
        expected = cold.answer(tried.prompt)
        self.tried += 1
        self.equal += have_equal_tokens(tried, expected)
        self.bits += have_equal_bits(tried, expected)


def cells_of(case: MeasuredCase, ways: Sequence[ReuseWay]) -> Iterator[BitsCell]:
    """The cells of a column."""
    cells = (BitsCell(way.name, case.model.name, case.dtype) for way in ways)
    try:
        opened = case.engine()
    except ConfigError as error:
        for cell in cells:
            cell.refuse(error)
            yield cell
        return
    with opened as engine:
        cold = ColdRuns(engine, case.num_tokens)
        for way, cell in zip(ways, cells, strict=True):
            try:
                for tried in way.run(case):
                    cell.count(tried, cold)
            except ConfigError as error:
                cell.refuse(error)
            yield cell


def measured_cells(
    models: Sequence[str],
    dtypes: Sequence[str],
    ways: Sequence[ReuseWay],
    record: StepRecord,
    *,
    num_prompts: int,
    num_tokens: int,
    device: str = "cpu",
) -> Iterator[BitsCell]:
    """All cells, column by column."""
    everywhere = options_of(device)
    for name in models:
        with saved_model(name, num_prompts) as model:
            for dtype in dtypes:
                case = MeasuredCase(model, dtype, num_tokens, record, everywhere)
                yield from cells_of(case, ways)


def as_text(cells: Sequence[BitsCell]) -> str:
    """A table for each dtype: ways down, models across."""
    lines = ["equal tokens, equal bits / answers tried"]
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        lines += ["", *_rows(dtype, [cell for cell in cells if cell.dtype == dtype])]
    return "\n".join([*lines, *_reasons(cells)])


def _rows(dtype: str, cells: Sequence[BitsCell]) -> Iterator[str]:
    models = list(dict.fromkeys(cell.model for cell in cells))
    by_place: Mapping[tuple[str, str], BitsCell] = {(cell.way, cell.model): cell for cell in cells}
    ways = list(dict.fromkeys(cell.way for cell in cells))
    first = max(map(len, [dtype, *ways]))
    widths = [max(len(name), 9) for name in models]
    head = zip(models, widths, strict=True)
    yield "  ".join([dtype.ljust(first), *(name.rjust(width) for name, width in head)])
    for way in ways:
        row = [by_place[way, model].text for model in models]
        shown = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        yield "  ".join([way.ljust(first), *shown])


def _reasons(cells: Sequence[BitsCell]) -> Iterator[str]:
    """A line for each way and reason: how many answers were not tried, and of which columns."""
    places: dict[tuple[str, str], list[str]] = {}
    counts = Counter[tuple[str, str]]()
    for cell in cells:
        for reason, count in cell.not_tried.items():
            counts[cell.way, reason] += count
            places.setdefault((cell.way, reason), []).append(f"{cell.model} {cell.dtype}")
    if counts:
        yield "\nnot tried:"
    for (way, reason), count in counts.items():
        columns = places[way, reason]
        more = f" and {len(columns) - 2} more" if len(columns) > 2 else ""
        yield f"  {way}: {count}, {reason} ({', '.join(columns[:2])}{more})"


def as_values(cells: Iterable[BitsCell]) -> list[dict[str, object]]:
    """The cells for JSON."""
    names = [column.name for column in fields(BitsCell)]
    return [
        {**{name: getattr(cell, name) for name in names}, "is_exact": cell.is_exact}
        for cell in cells
    ]
