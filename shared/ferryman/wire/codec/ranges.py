"""Pages by kind as runs of consecutive ones. For the recurrent kind page i stands for its end."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest
from ferryman.wire.codec.scalars import kind_from_wire, kind_to_wire
from ferryman.wire.v1 import types_pb2


def ranges_of(kind: Kind, pages: Iterable[int]) -> list[types_pb2.PageRange]:
    """Runs of ascending pages."""
    runs = [list(run) for _, run in groupby(enumerate(pages), lambda pair: pair[1] - pair[0])]
    return [
        types_pb2.PageRange(kind=kind_to_wire(kind), first_page=run[0][1], end_page=run[-1][1] + 1)
        for run in runs
    ]


def pages_from_ranges(
    ranges: Iterable[types_pb2.PageRange], num_pages: int
) -> dict[Kind, list[int]]:
    """Inverse of `ranges_of`. Raises InvalidRequest for pages outside `num_pages`."""
    pages: dict[Kind, list[int]] = {}
    for run in ranges:
        if not run.first_page < run.end_page <= num_pages:
            raise InvalidRequest(
                f"pages [{run.first_page}, {run.end_page}) are none of {num_pages}", "units"
            )
        pages.setdefault(kind_from_wire(run.kind), []).extend(range(run.first_page, run.end_page))
    return pages
