"""A request on this worker: whose it is, what it has said so far, and how it ended."""

from __future__ import annotations

from dataclasses import replace

from ferryman.handoff.offsets import EMPTY_HASH, TokenFrame, extend_hash
from ferryman.schedule.batch import Sampled
from ferryman.schedule.drafting import NOTHING_DRAFTED, DraftCounts
from ferryman.schedule.request import FinishReason
from ferryman.wire.values import (
    Ending,
    Failure,
    Finished,
    GoesOn,
    RequestTokens,
    ReserveOrder,
    Usage,
)


def name_of(request_id: str, attempt: int) -> str:
    """Attempts of one request are different requests to the schedule."""
    return f"{request_id}.{attempt}"


class RunningRequest:
    """Tokens from offset `base` on, each with the running hash behind it."""

    def __init__(self, order: ReserveOrder) -> None:
        self.context = order.context
        self.router_id = order.router_id
        self.name = name_of(order.context.request_id, order.context.attempt)
        self.base = order.request.num_generated
        self.ending: Ending = GoesOn()
        self._usage = Usage(prompt_tokens=order.request.prompt_len)
        first = order.request.prompt_len - order.request.num_generated
        generated = order.request.token_ids[first:].tolist()
        self._hashes = [extend_hash(EMPTY_HASH, generated)]
        self._sampled: list[Sampled] = []

    @property
    def num_tokens(self) -> int:
        """Generated tokens over all attempts."""
        return self.base + len(self._sampled)

    @property
    def is_over(self) -> bool:
        return not isinstance(self.ending, GoesOn)

    def committed(self, usage: Usage) -> None:
        """Prefill's account of the prompt."""
        self._usage = usage

    def drawn(self, sampled: Sampled) -> None:
        self._sampled.append(sampled)
        self._hashes.append(extend_hash(self._hashes[-1], [sampled.token_id]))

    def finish(self, reason: FinishReason, drafts: DraftCounts = NOTHING_DRAFTED) -> None:
        """The first ending counts."""
        if not self.is_over:
            usage = replace(
                self._usage,
                completion_tokens=self.num_tokens,
                drafted_tokens=drafts.drafted,
                accepted_tokens=drafts.accepted,
            )
            self.ending = Finished(reason, usage)

    def fail(self, failure: Failure) -> None:
        if not self.is_over:
            self.ending = failure

    def tokens_from(self, offset: int) -> RequestTokens:
        """All tokens from `offset` on, and the ending if there is one."""
        start = max(0, offset - self.base)
        sampled = self._sampled[start:]
        frame = TokenFrame(
            attempt=self.context.attempt,
            offset=self.base + start,
            token_ids=tuple(one.token_id for one in sampled),
            running_hash=self._hashes[-1],
        )
        with_logprobs = bool(sampled) and all(one.logprobs for one in sampled)
        logprobs = tuple(one.logprobs for one in sampled) if with_logprobs else ()
        return RequestTokens(self.context.request_id, frame, logprobs, self.ending)
