"""A contender: one engine with one model, whose steps are timed in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, Protocol

from ferryman_bench.timer import Job


@dataclass(frozen=True, slots=True)
class BenchCell:
    """One figure to measure: decode steps, or a cold prefill.

    `tokens` is the context that `requests` requests have when decoding begins, or the length of
    one prompt.
    """

    kind: str
    requests: int
    tokens: int

    @property
    def name(self) -> str:
        tokens = str(self.tokens) if self.tokens % 1024 else f"{self.tokens // 1024}k"
        if self.kind == "prefill":
            return f"prefill {tokens}"
        return f"decode {self.requests} at {tokens}"

    @property
    def tokens_per_run(self) -> int:
        """The tokens that one run computes: those of a prompt, or one of each request."""
        return self.tokens if self.kind == "prefill" else self.requests


class Contender(Protocol):
    """An engine that computes prompts and decodes greedily."""

    def logits(self, token_ids: Sequence[int]) -> list[float]:
        """The logits [vocabulary] after a prompt; all contenders have to agree on them."""
        ...

    def prefill(self, prompt_len: int) -> Job:
        """Each run computes a new prompt from nothing."""
        ...

    def decoder(self, requests: int, context_len: int, steps: int) -> Job:
        """Each run is one greedy step of all requests, after `context_len` tokens of each; there
        are at most `steps`."""
        ...


class ContenderSite:
    """The jobs of one contender, prepared and timed on orders that come as JSON objects."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._job: Job = _nothing

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one order."""
        match order["do"]:
            case "logits":
                return {"logits": self._contender.logits(order["token_ids"])}
            case "prepare":
                # The last cell's memory is freed before that of the next is allocated.
                self._job = _nothing
                self._job = self._prepared(BenchCell(**order["cell"]), order["steps"])
                return {}
            case "run":
                return {"runs": [self._timed() for _ in range(order["runs"])]}
            case other:
                raise AssertionError(f"the bench gives no order {other!r}")

    def _prepared(self, cell: BenchCell, steps: int) -> Job:
        if cell.kind == "prefill":
            return self._contender.prefill(cell.tokens)
        return self._contender.decoder(cell.requests, cell.tokens, steps)

    def _timed(self) -> tuple[float, float]:
        """Seconds by the clock, and seconds of processor time over all threads."""
        cpu, wall = process_time(), perf_counter()
        self._job()
        return perf_counter() - wall, process_time() - cpu


def _nothing() -> None:
    """The job before any was prepared."""
