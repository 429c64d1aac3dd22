"""A request on this worker: its router, its tokens so far, and its ending."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import replace

from ferryman.errors import InvalidRequest, PermissionDenied
from ferryman.grammar.compiler import CompiledGrammar
from ferryman.handoff.offsets import EMPTY_HASH, TokenFrame, extend_hash
from ferryman.handoff.usage import NONE_CACHED, CachedTokens
from ferryman.schedule.batch import Sampled
from ferryman.schedule.drafting import NOTHING_DRAFTED, DraftCounts
from ferryman.schedule.request import FinishReason
from ferryman.wire.grpc.role_tokens import refuse_call
from ferryman.wire.grpc.rpc import tags_for
from ferryman.wire.values import (
    Ending,
    Failure,
    PrefillOrder,
    RequestTokens,
    ReserveOrder,
    StreamContinues,
    StreamFinished,
    Usage,
)

_GOES_ON = StreamContinues()


def name_of(request_id: str, attempt: int) -> str:
    """The name of an attempt in the schedule, where attempts of one request are different
    requests."""
    return f"{request_id}.{attempt}"


class DecodeRequest:
    """The tokens from offset `base` on, and the running hash after the last."""

    def __init__(
        self,
        order: ReserveOrder | PrefillOrder,
        grammar: CompiledGrammar | None = None,
        held: CachedTokens = NONE_CACHED,
    ) -> None:
        """It holds its grammar until it is over, so that the engine finds it compiled. This worker
        `held` tokens of its prompt before the hand-off."""
        self.context = order.context
        self.grammar = grammar
        self.tags = tags_for(order.context)
        self.router_id, self.signature = order.router_id, order.signature
        self._moved = order.drawn_token_id if isinstance(order, ReserveOrder) else None
        self.name = name_of(order.context.request_id, order.context.attempt)
        self.base = order.request.num_generated
        self.ending: Ending = StreamContinues(held) if held.total else _GOES_ON
        self._held = held
        self._usage = Usage(prompt_tokens=order.request.prompt_len, at_decode=held)
        first = order.request.prompt_len - order.request.num_generated
        generated = order.request.token_ids[first:].tolist()
        self._running_hash = extend_hash(EMPTY_HASH, generated)
        self._token_ids: list[int] = []
        self._logprobs: list[Mapping[int, float]] = []

    @property
    def num_tokens(self) -> int:
        """Generated tokens over all attempts."""
        return self.base + len(self._token_ids)

    @property
    def is_over(self) -> bool:
        return not isinstance(self.ending, StreamContinues)

    def check_signature(self, signature: bytes) -> None:
        """Raises PermissionDenied for the signature of another attempt; it is counted."""
        if not hmac.compare_digest(signature, self.signature.value):
            refuse_call(PermissionDenied(f"its router signed {self.name} otherwise"))

    def check_first(self, token_id: int) -> None:
        """Raises InvalidRequest if the request moves, and its last token was another one."""
        if self._moved is not None and token_id != self._moved:
            text = f"{self.name} goes on behind token {self._moved}, not {token_id}"
            raise InvalidRequest(text, "first")

    @property
    def usage(self) -> Usage:
        """The account of its prompt, as prefill gave it."""
        return self._usage

    @property
    def last(self) -> Sampled:
        """The token drawn last. Raises IndexError before the first."""
        return Sampled(self._token_ids[-1], self._logprobs[-1])

    def committed(self, usage: Usage) -> None:
        """Stores prefill's account of the prompt, beside this worker's own."""
        self._usage = replace(usage, at_decode=self._held)

    def drawn(self, sampled: Sampled) -> int:
        """Appends the next token; returns how many were drawn here."""
        self._token_ids.append(sampled.token_id)
        self._logprobs.append(sampled.logprobs)
        self._running_hash = extend_hash(self._running_hash, (sampled.token_id,))
        return len(self._token_ids)

    def finish(self, reason: FinishReason, drafts: DraftCounts = NOTHING_DRAFTED) -> None:
        """Sets the ending, unless there is one already."""
        if not self.is_over:
            usage = replace(
                self._usage,
                completion_tokens=self.num_tokens,
                drafted_tokens=drafts.drafted,
                accepted_tokens=drafts.accepted,
            )
            self.ending, self.grammar = StreamFinished(reason, usage), None

    def fail(self, failure: Failure) -> None:
        if not self.is_over:
            self.ending, self.grammar = failure, None

    def tokens_from(self, offset: int) -> RequestTokens:
        """All tokens from `offset` on, and the ending if there is one; with the first, what this
        worker held."""
        start = max(0, offset - self.base)
        token_ids, logprobs = tuple(self._token_ids[start:]), tuple(self._logprobs[start:])
        frame = TokenFrame(self.context.attempt, self.base + start, token_ids, self._running_hash)
        if not all(logprobs):
            logprobs = ()
        ending = _GOES_ON if start and not self.is_over else self.ending
        return RequestTokens(self.context.request_id, frame, logprobs, ending)
