"""An answer of an endpoint, read from a whole body or from the pieces of a stream."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """One token of an answer: its text, its log probability, and those of the likeliest tokens."""

    text: str
    logprob: float
    alternatives: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """Counts as the server reports them. None: it does not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    drafted_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. `tokens` is empty if the server gives no log probabilities.

    `arrivals` are seconds from the start of the request, one for each piece of text; `seconds` is
    the time to the end of the answer. `num_calls` counts calls of tools.
    """

    text: str
    tokens: tuple[DrawnToken, ...]
    finish_reason: str
    usage: ReportedUsage
    arrivals: tuple[float, ...] = ()
    seconds: float = 0.0
    num_calls: int = 0


@dataclass(slots=True)
class ReplyReader:
    """Collects the pieces of an answer; a whole body is one piece.

    A server may give several tokens in a piece, or text and log probabilities in different ones.
    """

    texts: list[str] = field(default_factory=list)
    tokens: list[DrawnToken] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    finish_reason: str = ""
    usage: ReportedUsage = ReportedUsage()
    num_calls: int = 0

    def add(self, piece: Mapping[str, Any], seconds: float) -> None:
        """Adds one piece, which came `seconds` after the request was sent."""
        if piece.get("usage") or piece.get("timings"):
            self.usage = _usage(piece)
        for choice in (piece.get("choices") or ())[:1]:
            message = choice.get("delta") or choice.get("message") or {}
            text = _text(choice, message)
            calls = [call for call in message.get("tool_calls") or () if call.get("id")]
            drawn = list(_tokens(choice.get("logprobs") or {}))
            self.tokens += drawn
            self.num_calls += len(calls)
            if text or message.get("tool_calls"):
                self.texts.append(text)
                self.arrivals.append(seconds)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def reply(self, seconds: float) -> Reply:
        """The answer, which ended `seconds` after the request was sent."""
        return Reply(
            "".join(self.texts),
            tuple(self.tokens),
            self.finish_reason,
            self.usage,
            tuple(self.arrivals),
            seconds,
            self.num_calls,
        )


def _text(choice: Mapping[str, Any], message: Mapping[str, Any]) -> str:
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    return str(thought) + str(message.get("content") or choice.get("text") or "")


def _tokens(logprobs: Mapping[str, Any]) -> Iterator[DrawnToken]:
    """Tokens in the form of chats, which some servers use for completions too, or in that of
    completions."""
    for entry in logprobs.get("content") or ():
        above = {top["token"]: _finite(top["logprob"]) for top in entry.get("top_logprobs") or ()}
        yield DrawnToken(entry["token"], _finite(entry["logprob"]), above)
    texts, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    for text, value, top in zip(texts, values, tops, strict=False):
        likeliest = {name: _finite(number) for name, number in (top or {}).items()}
        yield DrawnToken(text, _finite(value), likeliest)


def _finite(value: float | None) -> float:
    """JSON has no infinity, so servers write null or a large number for it."""
    return value if value is not None and math.isfinite(value) else -9999.0


def _usage(piece: Mapping[str, Any]) -> ReportedUsage:
    usage = piece.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    drawn = usage.get("completion_tokens_details") or {}
    timings = piece.get("timings") or {}
    cached = details.get("cached_tokens", timings.get("cache_n"))
    drafted = drawn.get("accepted_prediction_tokens", timings.get("draft_n_accepted"))
    return ReportedUsage(
        usage.get("prompt_tokens"), usage.get("completion_tokens"), cached, drafted
    )
