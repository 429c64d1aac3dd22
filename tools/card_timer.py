"""Times what a call launches on a card, without the host's part: a captured graph is replayed.

Launches of few microseconds would else be timed by how fast the host asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

CACHE_BYTES = 1 << 28
"""More than any card's second cache. Written before each replay, so that no input is in there."""


def seconds_on_card(run: Callable[[], object], repeats: int = 25) -> float:
    """The median of `repeats` replays. `run` must not wait for the card."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # inputs were made there
    with torch.cuda.stream(stream):
        run()  # compiles, and copies tables that later calls find
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        flushed = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
        timed = [_replayed(graph, flushed) for _ in range(repeats)]
    torch.cuda.synchronize()
    return float(median(began.elapsed_time(ended) for began, ended in timed)) / 1e3


def copy_rate() -> float:
    """Bytes a second, read and written, of a kernel that turns the bits of 2 GiB over.

    In a graph a plain copy is not a kernel: it reached 2,772 GB/s on an H200, which can do 4,243.
    """
    big = torch.randint(0, 256, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(big)
    turned = seconds_on_card(lambda: torch.bitwise_not(big, out=target))
    return 2 * big.numel() / turned


def _replayed(
    graph: torch.cuda.CUDAGraph, flushed: torch.Tensor
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    began, ended = (_event() for _ in range(2))
    flushed.zero_()  # takes the card longer than the host takes to ask for what follows
    began.record()
    graph.replay()
    ended.record()
    return began, ended


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
