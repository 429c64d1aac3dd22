"""The part that all frames of an answer with choices repeat, and the fields of a choice besides
its text: log probabilities, token ids, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ferryman.cache.keys import TokenIds
from ferryman.schedule.request import FinishReason
from ferryman.wire.public import TokenChunk
from ferryman_router.answers.logprobs import TokenNames, position_fields
from ferryman_router.answers.response_format import AnsweredChoice, ScoredPrompt, as_json

NULL = b"null"


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """The part that every frame of an answer repeats. `num_logprobs` None: none are shown.
    `prompts` are the token ids of each choice's prompt; empty: no token ids are shown.
    `shows_usage` says whether a stream ends with the usage; `echoes` are the texts of the prompts
    if they come back with the answers, else empty. `num_prompt_logprobs` is as `num_logprobs`, of
    the prompts' own tokens. `stop_token_ids` are those that an answer names as the reason of its
    end: the caller's own."""

    answer_id: str
    model: str
    created: int
    num_logprobs: int | None
    names: TokenNames
    prompts: Sequence[TokenIds] = ()
    shows_usage: bool = False
    echoes: Sequence[str] = ()
    num_prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether a frame has nothing of its tokens but their text."""
        return self.num_logprobs is None and not self.prompts

    def details(self, chunks: Sequence[TokenChunk], logprobs: bytes, reason: bytes) -> bytes:
        """The fields of a choice besides its text, with a comma before them."""
        fields = b',"logprobs":' + logprobs + b',"finish_reason":' + reason
        if not self.prompts:
            return fields
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        return fields + b',"token_ids":' + as_json(ids)

    def ending(
        self, chunks: Sequence[TokenChunk], logprobs: bytes, answer: AnsweredChoice, reason: str
    ) -> bytes:
        """The details where an answer ends: with the stop string or token that ended it."""
        matched = as_json(self._stop_reason(answer))
        return self.details(chunks, logprobs, as_json(reason)) + b',"stop_reason":' + matched

    def _stop_reason(self, answer: AnsweredChoice) -> str | int | None:
        if answer.end.matched_stop:
            return answer.end.matched_stop
        if answer.end.reason is not FinishReason.STOP or not answer.chunks:
            return None
        last = answer.chunks[-1].token_ids[-1]
        return last if last in self.stop_token_ids else None

    def prompt_logprobs(self, prompt: ScoredPrompt | None) -> bytes:
        """The field with a comma before it; empty when it is not shown."""
        num_shown = self.num_prompt_logprobs
        if num_shown is None or prompt is None:
            return b""
        entries = (
            position_fields(position, self.names) for position in prompt.positions(num_shown)
        )
        return b',"prompt_logprobs":' + json_list(entries)

    def prompt_ids(self, index: int) -> bytes:
        """The field with a comma before it; empty when it is not shown."""
        if not self.prompts:
            return b""
        return b',"prompt_token_ids":' + as_json(self.prompts[index].tolist())


def json_list(entries: Iterable[object]) -> bytes:
    """Entry by entry: encoded in one call, a long list would keep the interpreter's lock."""
    return b"[" + b",".join(map(as_json, entries)) + b"]"
