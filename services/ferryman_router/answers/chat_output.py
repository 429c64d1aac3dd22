"""Answers of a chat whose text is read: thoughts and calls have fields of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ferryman.schedule.request import FinishReason
from ferryman.text.tool_calls.call_ids import CallSource, openai_id
from ferryman.text.tool_calls.deltas import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
)
from ferryman.text.tool_calls.formats import OutputSyntax, ToolUse
from ferryman.text.tool_calls.grammar import OutputParser
from ferryman.text.tool_calls.thought import PromptTail
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman_router.answers.openai_responses import ChatFormat
from ferryman_router.answers.response_format import AnsweredChoice, as_json
from ferryman_router.answers.response_header import NULL, ResponseHeader
from ferryman_router.bodies.parsed_request import AnswerOptions

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class OutputReading:
    """The reading of each choice's text, in which `use` says what tools may be called.
    `prompt_tails` are the ends of their prompts: one may have begun a thought. Calls have numbers
    from `first_number` on."""

    syntax: OutputSyntax
    use: ToolUse
    answer: AnswerOptions
    prompt_tails: Sequence[str]
    first_number: int = 0

    def parser(self, index: int) -> OutputParser:
        """The parser of one choice."""
        tail, continued = self.prompt_tails[index], self.answer.continued
        prompt = PromptTail(tail, continued, self.first_number)
        return self.syntax.parser(self.use, prompt)

    def shown(self, deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
        """The deltas without what the caller does not take: calls after the first one, or
        thoughts."""
        return [delta for delta in deltas if self._is_shown(delta)]

    def _is_shown(self, delta: OutputDelta) -> bool:
        if isinstance(delta, ReasoningDelta):
            return self.answer.shows_thoughts
        if isinstance(delta, CallStarted | ArgumentsDelta):
            return self.answer.tools.is_parallel or delta.index == 0
        return True

    def call_id(self, answer_id: str, index: int, called: CallStarted) -> str:
        """An id for a call that no other call of its conversation has."""
        named = f"{answer_id}/{index}/{called.index}".encode()
        digest = blake2b(named, digest_size=DIGEST_BYTES).hexdigest()
        make = self.syntax.tools.call_id if self.syntax.tools else openai_id
        return make(CallSource(digest, called.name, called.number))


class ParsedChatFormat(ChatFormat):
    """`/v1/chat/completions` of a model that thinks, or with tools."""

    def __init__(self, heading: ResponseHeader, reading: OutputReading) -> None:
        super().__init__(heading)
        self._reading = reading
        self._parsers = [reading.parser(index) for index in range(len(reading.prompt_tails))]
        self._num_thought = [0] * len(self._parsers)

    def tokens(self, index: int, chunk: TokenChunk) -> bytes:
        return self._frames(index, self._read(index, self._parsers[index], chunk), [chunk])

    def last(self, index: int, answer: AnsweredChoice) -> bytes:
        parser, end = self._parsers[index], answer.end
        held = self._frames(index, last_deltas(parser, end), [])
        reason = _finish_reason(end, parser.num_calls)
        return held + self._frame(index, {}, self._heading.ending([], NULL, answer, reason))

    def choice(self, index: int, answer: AnsweredChoice) -> bytes:
        chunks, end, _ = answer
        parser = self._reading.parser(index)
        deltas = [delta for chunk in chunks for delta in self._read(index, parser, chunk)]
        deltas += last_deltas(parser, end)
        message = self._message(index, self._reading.shown(deltas))
        reason = _finish_reason(end, parser.num_calls)
        return self._choice(index, message, reason, answer)

    def _read(self, index: int, parser: OutputParser, chunk: TokenChunk) -> list[OutputDelta]:
        """The deltas of a chunk. Its tokens, and those before, are of thoughts if it has some."""
        deltas = list(parser.feed(chunk.text))
        if any(isinstance(delta, ReasoningDelta) for delta in deltas):
            self._num_thought[index] = chunk.offset + len(chunk.token_ids)
        return deltas

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage with the tokens of thoughts, shown or not, as OpenAI counts them."""
        of_output = usage["completion_tokens_details"]
        of_output = {**of_output, "reasoning_tokens": sum(self._num_thought)}
        return {**usage, "completion_tokens_details": of_output}

    def _frames(
        self, index: int, deltas: Iterable[OutputDelta], chunks: Sequence[TokenChunk]
    ) -> bytes:
        """A frame for each delta. The tokens are in the first; if their text is held back, in one
        without text."""
        visible_deltas = [self._delta(index, delta) for delta in self._reading.shown(deltas)]
        if not visible_deltas and chunks and not self._heading.is_plain:
            visible_deltas = [{}]
        frames = []
        for delta in visible_deltas:
            logprobs = self._shown_logprobs(chunks) if chunks else NULL
            frames.append(self._frame(index, delta, self._heading.details(chunks, logprobs, NULL)))
            chunks = []
        return b"".join(frames)

    def _frame(self, index: int, delta: dict[str, Any], details: bytes) -> bytes:
        return self._open(index) + b'"delta":' + as_json(delta) + details + b"}]}\n\n"

    def _delta(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        match delta:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning_content": text}
            case CallStarted(call) as called:
                return {"tool_calls": [{"index": call, **self._call(index, called)}]}
            case ArgumentsDelta(call, text):
                return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}

    def _message(self, index: int, deltas: Iterable[OutputDelta]) -> dict[str, Any]:
        content, thought, calls = "", "", list[dict[str, Any]]()
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    content += text
                case ReasoningDelta(text):
                    thought += text
                case CallStarted() as called:
                    calls.append(self._call(index, called))
                case ArgumentsDelta(call, text):
                    calls[call]["function"]["arguments"] += text
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if not content and (thought or calls):
            message["content"] = None
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return message

    def _call(self, index: int, called: CallStarted) -> dict[str, Any]:
        """A call that has no arguments yet."""
        return {
            "id": self._reading.call_id(self._heading.answer_id, index, called),
            "type": "function",
            "function": {"name": called.name, "arguments": ""},
        }


def last_deltas(parser: OutputParser, end: GenerateFinished) -> tuple[OutputDelta, ...]:
    """The deltas of an answer's end. A stop string cuts it, too: the model would have gone on."""
    is_cut = end.reason is not FinishReason.STOP or bool(end.matched_stop)
    return (*parser.feed(end.text), *parser.flush(is_cut=is_cut))


def _finish_reason(end: GenerateFinished, num_calls: int) -> str:
    return "tool_calls" if num_calls and end.reason is FinishReason.STOP else str(end.reason)
