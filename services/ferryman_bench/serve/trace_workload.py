"""A recorded trace as a workload: the same arrivals, lengths and shared beginnings, in words.

Traces have names of parts in place of texts. Equal names make equal words, so prompts share what
they shared when they were recorded.
"""

from __future__ import annotations

from pathlib import Path

from ferryman.errors import ConfigError
from ferryman_bench.serve.workload import WORDS, LoadSession, LoadTurn
from ferryman_simulator.mooncake import BLOCK_TOKENS
from ferryman_simulator.options import Format
from ferryman_simulator.run import read_trace
from ferryman_simulator.trace import TracedRequest

DEFAULT_PAGE = 16


def trace_sessions(
    path: Path,
    *,
    speed: float = 1.0,
    most: int = 0,
    block_tokens: int = BLOCK_TOKENS,
    page_size: int = DEFAULT_PAGE,
) -> list[LoadSession]:
    """One session a request, `speed` times as fast as recorded; the first `most`, or all for 0.

    A request of a lifecycle log or a Mooncake trace asks for as many tokens as its answer had.
    Raises BadTrace, and ConfigError for a trace that is empty.
    """
    trace = read_trace(path, Format.AUTO, block_tokens=block_tokens, page_size=page_size)
    requests = list(trace.requests)[: most or None]
    if not requests:
        raise ConfigError(f"--trace {path}: no request in it ended well")
    return [
        LoadSession(
            (LoadTurn(prompt_text(request), max(1, request.output_len)),),
            arrival_seconds=request.arrival_seconds / speed,
        )
        for request in requests
    ]


def prompt_text(request: TracedRequest) -> str:
    """The prompt in words, one for each token of it."""
    tokens = request.content.first(request.prompt_len).token_ids()
    return " ".join(WORDS[int(token) % len(WORDS)] for token in tokens)
