"""Engines that answer whole requests: the offline `LLM`, and llama.cpp with batches of ours.

llama.cpp's loop is that of its own server: each step has one token of every request that decodes,
and as many tokens of waiting prompts as its batch has room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams
from ferryman_bench.contender import ContenderModel
from ferryman_bench.llama_peer import BATCH_TOKENS, LlamaContender, LlamaContext, SequenceRows

MEMORY_BYTES = 2 << 30
MAX_RUNNING = 16


class OfflineRequestSite:
    """`LLM` in this process. It gives all tokens of a request at once, so it has no times."""

    def __init__(self, model: ContenderModel) -> None:
        self._llm = LLM(
            model.folder,
            num_threads=model.threads,
            memory_bytes=MEMORY_BYTES,
            max_running=MAX_RUNNING,
            **engine_fields(model.dtype),
        )

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(max_tokens=order["max_tokens"], temperature=0.0, ignore_eos=True)
        began = perf_counter()
        self._llm.generate(order["prompts"], sampling)
        return {"seconds": perf_counter() - began, "arrivals": []}


class LlamaRequestSite:
    """llama.cpp without a server: nothing is tokenized, sent or scheduled beside its batches."""

    def __init__(self, model: ContenderModel) -> None:
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


def engine_fields(dtype: str) -> dict[str, Any]:
    """The engine options for a precision of the bench."""
    if dtype == "int8":
        return {"dtype": "bfloat16", "quantize": "int8"}
    return {"dtype": dtype}
