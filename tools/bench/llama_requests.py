"""Whole requests by llama.cpp in batches of ours, beside those of `ferryman bench requests`.

The loop is that of its own server: each step has one token of every request that decodes,
and as many tokens of waiting prompts as its batch has room for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tools.bench.contender_process import LLAMA_BATCHES, contender_process
from tools.bench.gguf.conversion import convert_folder
from tools.bench.llama_contender import (
    BATCH_TOKENS,
    LlamaContender,
    LlamaContext,
    SequenceRows,
    check_llama_cpp,
)

from ferryman.errors import ConfigError
from ferryman_bench.engine_process import BenchModel, EngineProcess
from ferryman_bench.offline_engine import offline_engine
from ferryman_bench.request_load import RequestBenchOptions, run_bench_requests
from ferryman_bench.subject import RandomModel


def run_bench_with_llama(choice: RequestBenchOptions, *, as_json: bool) -> int:
    """Measures the offline engine, llama.cpp and the clusters. Raises ConfigError without
    llama.cpp, and for a model of somebody's: a file for llama.cpp is written beside it."""
    if not isinstance(choice.model, RandomModel):
        raise ConfigError("--model: llama.cpp is measured with shapes; leave it out")
    check_llama_cpp()
    return run_bench_requests(choice, as_json=as_json, engines=offline_and_llama)


@contextmanager
def offline_and_llama(model: BenchModel) -> Iterator[list[EngineProcess]]:
    """The offline engine and llama.cpp's batches, for the length of a block."""
    convert_folder(model.folder, model.dtype)
    with offline_engine(model) as engines, contender_process(LLAMA_BATCHES, model) as llama:
        yield [*engines, llama]


class LlamaRequestSite:
    """llama.cpp without a server: nothing is tokenized, sent or scheduled beside its batches."""

    def __init__(self, model: BenchModel) -> None:
        self._contender = LlamaContender(model)

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        prompts = [np.array(prompt, np.int32) for prompt in order["prompts"]]
        longest = max(map(len, prompts)) + order["max_tokens"]
        # Memory is taken before the clock starts, as every server takes it.
        context = self._contender.context(len(prompts), longest)
        began = perf_counter()
        requests = [
            LlamaRequest(index, prompt, order["max_tokens"]) for index, prompt in enumerate(prompts)
        ]
        while live := [request for request in requests if not request.is_finished]:
            answer_step(context, live)
        return {
            "seconds": perf_counter() - began,
            "arrivals": [[at - began for at in request.arrivals] for request in requests],
        }


class LlamaRequest:
    """The progress of one request; `arrivals` are the times of its tokens."""

    def __init__(self, sequence: int, prompt: NDArray[np.int32], max_tokens: int) -> None:
        self._sequence, self._next, self._max_tokens = sequence, prompt, max_tokens
        self._position = 0
        self.arrivals: list[float] = []

    @property
    def is_finished(self) -> bool:
        return len(self.arrivals) == self._max_tokens

    @property
    def is_decoding(self) -> bool:
        return bool(self.arrivals)

    def rows(self, room: int) -> SequenceRows:
        """The next tokens to compute, at most `room`."""
        part = self._next[:room]
        return SequenceRows(self._sequence, part, self._position, len(part) == len(self._next))

    def computed(self, rows: SequenceRows) -> None:
        self._position += len(rows.token_ids)
        self._next = self._next[len(rows.token_ids) :]

    def drew(self, token_id: int, now: float) -> None:
        self._next = np.array([token_id], np.int32)
        self.arrivals.append(now)


def answer_step(context: LlamaContext, live: Sequence[LlamaRequest]) -> None:
    """One step of the requests that decode, then of prompts as far as the batch has room."""
    room, taken = BATCH_TOKENS, []
    for request in sorted(live, key=lambda each: not each.is_decoding):
        if room:
            rows = request.rows(room)
            taken.append((request, rows))
            room -= len(rows.token_ids)
    drawn = iter(context.step([rows for _, rows in taken]).tolist())
    now = perf_counter()
    for request, rows in taken:
        request.computed(rows)
        if rows.draws:
            request.drew(next(drawn), now)
