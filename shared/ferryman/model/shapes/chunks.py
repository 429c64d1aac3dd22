"""Attention within chunks (Llama 4): a query sees the positions of its own chunk up to itself.

    chunk c = positions c · length … (c + 1) · length - 1, counted from the start of the sequence

For an attention over pages a chunk is a sequence of its own, whose first page is the chunk's. So
kernels get the page tables of chunks, and positions counted from the start of the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman_kernels.ragged import Span


@dataclass(frozen=True, slots=True)
class ChunkOfPages:
    """Chunks of `length` positions, a multiple of `page_size`."""

    length: int
    page_size: int

    @property
    def num_pages(self) -> int:
        return self.length // self.page_size


def check_chunks(length: int, page_size: int) -> None:
    """Raises ConfigError if a page would lie in two chunks."""
    if length % page_size:
        raise ConfigError(
            f"page_size={page_size} does not divide attention_chunk_size {length}: "
            "choose a page size that does"
        )


def chunks_of_spans(
    table: Tensor, spans: Sequence[Span], chunk: ChunkOfPages
) -> tuple[Tensor, list[Span]]:
    """Each span of a request [requests, pages], cut where a chunk ends: a table and a span for each
    part, in the order of the tokens."""
    tables, parts = [], []
    for row, (start, end) in enumerate(spans):
        for index in range(start // chunk.length, -(-end // chunk.length)):
            first = index * chunk.length
            parts.append((max(start, first) - first, min(end - first, chunk.length)))
            tables.append(_pages(table, index, chunk)[row])
    width = max(map(len, tables), default=0)
    padded = [torch.nn.functional.pad(pages, (0, width - len(pages)), value=-1) for pages in tables]
    return torch.stack(padded), parts


def _pages(table: Tensor, index: int, chunk: ChunkOfPages) -> Tensor:
    return table[:, index * chunk.num_pages : (index + 1) * chunk.num_pages]


def chunks_of_positions(
    table: Tensor, positions: Tensor, chunk: ChunkOfPages
) -> tuple[Tensor, Tensor]:
    """The table [tokens, pages] of each token's chunk, and its position [tokens] in there.

    A negative position, which pads a batch, stays negative.
    """
    width = min(chunk.num_pages, table.shape[1])
    first = positions.clamp_min(0) // chunk.length * chunk.num_pages
    columns = first[:, None] + torch.arange(width, device=table.device)
    # Columns beyond the table belong to positions after the query, which no kernel reads.
    return table.gather(1, columns.clamp(max=table.shape[1] - 1)), torch.where(
        positions < 0, positions, positions % chunk.length
    )
