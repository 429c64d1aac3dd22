"""llama.cpp answers whole requests in steps as its server makes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from tools.bench.__main__ import run
from tools.bench.llama_contender import BATCH_TOKENS, LlamaContext, SequenceRows
from tools.bench.llama_requests import LlamaRequest, answer_step


class CountedContext:
    """Notes the rows of every step, and draws the number of the step."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int, int, bool]]] = []

    def step(self, rows: Sequence[SequenceRows]) -> NDArray[np.int32]:
        said = [(row.sequence, row.position, len(row.token_ids), row.draws) for row in rows]
        self.steps.append(said)
        return np.full(sum(row.draws for row in rows), len(self.steps), np.int32)


def test_prompts_fill_the_batch_behind_the_requests_that_decode() -> None:
    context = CountedContext()
    long = np.zeros(BATCH_TOKENS - 100, np.int32)
    requests = [LlamaRequest(index, long, 3) for index in range(2)]
    while live := [request for request in requests if not request.is_finished]:
        answer_step(cast(LlamaContext, context), live)
    rest = len(long) - 100
    assert context.steps == [
        # The second prompt gets the room that the first one leaves.
        [(0, 0, len(long), True), (1, 0, 100, False)],
        [(0, len(long), 1, True), (1, 100, rest, True)],
        [(0, len(long) + 1, 1, True), (1, len(long), 1, True)],
        [(1, len(long) + 1, 1, True)],
    ]
    assert [len(request.arrivals) for request in requests] == [3, 3]


def test_requests_without_llama_cpp_end_before_a_model_is_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert run(["requests"]) == 2
    assert capsys.readouterr().err.startswith("error: llama.cpp is not installed: pip install")
