"""The answers with choices, whole or in frames, and those of a chat. Frames are built as bytes, by
hand.

A frame of a token differs from the one before in its text only, so everything around the text is
made once per choice; encoding the text is all that a token costs here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from json.encoder import encode_basestring
from typing import Any, ClassVar

from ferryman.cache.manifest import Exactness
from ferryman.handoff.usage import NONE_CACHED, CachedTokens
from ferryman.wire.public import NOT_PARTED, Parting, TokenChunk
from ferryman.wire.values import Usage
from ferryman_router.answers.errors import broken_frame
from ferryman_router.answers.logprobs import chat_logprobs
from ferryman_router.answers.response_format import (
    AnsweredChoice,
    ResponseFormat,
    as_json,
    in_one_line,
)
from ferryman_router.answers.response_header import NULL, ResponseHeader, json_list
from ferryman_router.request.attempt_result import uncached_tokens
from ferryman_router.request.response import OutputFailed


def usage_object(
    request_id: str,
    usages: Sequence[Usage],
    exactness: Exactness,
    page_size: int,
    ignored: Sequence[str],
    parting: Parting = NOT_PARTED,
) -> dict[str, Any]:
    """The sum over all prompts of a call; `ferryman` has the tiers, the reasons for the rest, the
    `exactness` of all answers together, and if there are any, the tokens that decode had itself,
    the fields that were `ignored` and the place where the prompt parts from an earlier one."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    drafted = sum(usage.drafted_tokens for usage in usages)
    accepted = sum(usage.accepted_tokens for usage in usages)
    reasons: dict[str, int] = {}
    tiers = _by_tier(usage.cached for usage in usages)
    at_decode = _by_tier(usage.at_decode for usage in usages)
    for usage in usages:
        for reason, tokens in uncached_tokens(usage, page_size).items():
            reasons[reason] = reasons.get(reason, 0) + tokens
    # OpenAI's names first; its clients pass over what is ours.
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached.total for usage in usages),
            "cache_write_tokens": sum(usage.written_tokens for usage in usages),
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "ferryman": {
            "request_id": request_id,
            "cached_tokens": tiers,
            "uncached_reasons": reasons,
            "exactness": exactness.value,
            **({"decode_cached_tokens": at_decode} if any(at_decode.values()) else {}),
            **({"ignored": list(ignored)} if ignored else {}),
            **({"parts": _parts(parting)} if parting else {}),
        },
    }


def _by_tier(counts: Iterable[CachedTokens]) -> dict[str, int]:
    tiers = NONE_CACHED.by_tier
    for count in counts:
        for tier, tokens in count.by_tier.items():
            tiers[tier] += tokens
    return tiers


def _parts(parting: Parting) -> dict[str, Any]:
    return {
        "token": parting.position,
        "in": parting.place,
        "from": parting.request_id,
        "missed_tokens": parting.missed_tokens,
        "before": parting.before,
        "ours": parting.ours,
        "theirs": parting.theirs,
    }


def so_far(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The usage that a frame before the end shows."""
    total = prompt_tokens + completion_tokens
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return as_json({**counts, "total_tokens": total})


DONE = b"data: [DONE]\n\n"
NOTHING_MORE = b',"logprobs":null,"finish_reason":null}]}\n\n'


class ChoicesFormat(ResponseFormat):
    """An answer with choices: the two older endpoints of OpenAI."""

    whole_kind: ClassVar[str]
    frame_kind: ClassVar[str]

    def __init__(self, heading: ResponseHeader) -> None:
        self._heading = heading
        common = self._named(self.frame_kind) | {"model": heading.model}
        self._common = b"data: " + as_json(common)[:-1] + b',"choices":'

    @abstractmethod
    def choice(self, index: int, answer: AnsweredChoice) -> bytes: ...

    def end(self, usage: dict[str, Any]) -> bytes:
        if not self._heading.shows_usage:
            return DONE
        return self._common + b'[],"usage":' + as_json(self._usage(usage)) + b"}\n\n" + DONE

    def failure(self, broken: OutputFailed) -> bytes:
        return broken_frame(broken)

    def whole(self, answers: Sequence[AnsweredChoice], usage: dict[str, Any]) -> bytes:
        choices = [self.choice(at, answer) for at, answer in enumerate(answers)]
        head = {"model": self._heading.model, "usage": self._usage(usage)}
        return (
            as_json(self._named(self.whole_kind) | head)[:-1]
            + b',"choices":['
            + b",".join(choices)
            + b"]}"
        )

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage as it is shown after the choices."""
        return usage

    @property
    def bytes_per_token(self) -> int:
        num_logprobs = self._heading.num_logprobs
        ids = 8 if self._heading.prompts else 0
        return ids + (8 if num_logprobs is None else 100 * (1 + num_logprobs))

    def _named(self, kind: str) -> dict[str, Any]:
        return {"id": self._heading.answer_id, "object": kind, "created": self._heading.created}


class ChatFormat(ChoicesFormat):
    """`/v1/chat/completions`."""

    whole_kind, frame_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, heading: ResponseHeader) -> None:
        super().__init__(heading)
        self._before = cache(lambda index: self._open(index) + b'"delta":{"content":')

    def first(self, index: int) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""}'
        more, prompt = self._heading.details([], NULL, NULL), self._heading.prompt_ids(index)
        return self._open(index) + delta + more + b"}]" + prompt + b"}\n\n"

    def tokens(self, index: int, chunk: TokenChunk) -> bytes:
        if self._heading.is_plain:
            if not chunk.text:
                return b""
            return self._before(index) + json_text(chunk.text) + b"}" + NOTHING_MORE
        more = self._heading.details([chunk], self._shown_logprobs([chunk]), NULL)
        return self._before(index) + json_text(chunk.text) + b"}" + more + b"}]}\n\n"

    def last(self, index: int, answer: AnsweredChoice) -> bytes:
        text = answer.end.text
        held = self._before(index) + json_text(text) + b"}" + NOTHING_MORE if text else b""
        more = self._heading.ending([], NULL, answer, answer.end.reason)
        return held + self._open(index) + b'"delta":{}' + more + b"}]}\n\n"

    def choice(self, index: int, answer: AnsweredChoice) -> bytes:
        message = {"role": "assistant", "content": whole_text(answer)}
        return self._choice(index, message, answer.end.reason, answer)

    def whole(self, answers: Sequence[AnsweredChoice], usage: dict[str, Any]) -> bytes:
        """All choices of a chat have one prompt."""
        body = super().whole(answers, usage)
        scored = self._heading.prompt_logprobs(answers[0].prompt)
        return body[:-1] + self._heading.prompt_ids(0) + scored + b"}"

    def _choice(
        self, index: int, message: dict[str, Any], reason: str, answer: AnsweredChoice
    ) -> bytes:
        named, chunks = as_json({"index": index, "message": message}), answer.chunks
        logprobs = self._shown_logprobs(chunks)
        return named[:-1] + self._heading.ending(chunks, logprobs, answer, reason) + b"}"

    def _shown_logprobs(self, chunks: Sequence[TokenChunk]) -> bytes:
        num_logprobs = self._heading.num_logprobs
        return b"null" if num_logprobs is None else self._logprobs(chunks, num_logprobs)

    def _logprobs(self, chunks: Sequence[TokenChunk], num_logprobs: int) -> bytes:
        return (
            b'{"content":'
            + json_list(chat_logprobs(chunks, self._heading.names, num_logprobs))
            + b"}"
        )

    def _open(self, index: int) -> bytes:
        return self._common + b'[{"index":%d,' % index


def whole_text(answer: AnsweredChoice) -> str:
    return "".join([chunk.text for chunk in answer.chunks]) + answer.end.text


def json_text(text: str) -> bytes:
    return in_one_line(encode_basestring(text)).encode()
