"""Answers of `/v1/completions`: texts, with the log probabilities of their tokens beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ferryman.text.detokenizer import Detokenizer
from ferryman.wire.public import TokenChunk
from ferryman_router.answers.logprobs import (
    PlacedChunk,
    TextOffsets,
    completion_lists,
    completion_logprobs,
    echoed_logprobs,
    echoed_offsets,
)
from ferryman_router.answers.openai_responses import (
    NOTHING_MORE,
    ChoicesFormat,
    json_text,
    whole_text,
)
from ferryman_router.answers.response_format import AnsweredChoice, ScoredPrompt, as_json
from ferryman_router.answers.response_header import NULL, ResponseHeader, json_list

MakeDetokenizer = Callable[[Sequence[int]], Detokenizer]


class StreamedText:
    """The text of one choice as far as it was sent, and the tokens that begin behind it.

    Text may be held back as the beginning of a stop string, and is cut off if it was one: where its
    tokens begin is known when it is sent, or at the end.
    """

    def __init__(self, offsets: TextOffsets, num_chars: int) -> None:
        self._offsets, self.num_chars = offsets, num_chars
        self._waiting: list[PlacedChunk] = []

    def sent(self, text: str, chunk: TokenChunk) -> list[PlacedChunk]:
        """Takes a chunk and the text that is sent with it; the chunks that begin in the text."""
        self.num_chars += len(text)
        self._waiting.append(PlacedChunk(chunk, self._offsets.of(chunk.token_ids)))
        num_placed = sum(part.begin <= self.num_chars for part in self._waiting)
        placed, self._waiting = self._waiting[:num_placed], self._waiting[num_placed:]
        return placed

    def end(self, text: str) -> list[PlacedChunk]:
        """Takes the last text; the chunks that are left."""
        self.num_chars += len(text)
        placed, self._waiting = self._waiting, []
        return placed


class CompletionFormat(ChoicesFormat):
    """`/v1/completions`. `prompt_tails` are the ends of the prompts, behind which `detokenizer`
    makes the texts once more, to count their characters."""

    whole_kind = frame_kind = "text_completion"

    def __init__(
        self,
        heading: ResponseHeader,
        prompt_tails: Sequence[Sequence[int]],
        detokenizer: MakeDetokenizer,
    ) -> None:
        super().__init__(heading)
        self._prompt_tails, self._detokenizer = prompt_tails, detokenizer
        self._streamed: dict[int, StreamedText] = {}

    def first(self, index: int) -> bytes:
        """The echo with log probabilities waits for those."""
        prompt = self._heading.prompt_ids(index)
        echo = "" if self._heading.num_logprobs is not None else self._echo(index)
        if not prompt and not echo:
            return b""
        more = self._heading.details([], self._no_logprobs, NULL)
        return self._open(index) + json_text(echo) + more + prompt + b"}]}\n\n"

    def scored(self, index: int, prompt: ScoredPrompt) -> bytes:
        num_logprobs = self._heading.num_logprobs
        if num_logprobs is None or not self._heading.echoes:
            return b""
        logprobs = _lists(self._echoed(index, prompt, num_logprobs))
        more = self._heading.details([], logprobs, NULL)
        return self._open(index) + json_text(self._echo(index)) + more + b"}]}\n\n"

    def tokens(self, index: int, chunk: TokenChunk) -> bytes:
        text, num_logprobs = json_text(chunk.text), self._heading.num_logprobs
        if num_logprobs is None:
            if self._heading.is_plain:
                return self._open(index) + text + NOTHING_MORE if chunk.text else b""
            return (
                self._open(index) + text + self._heading.details([chunk], NULL, NULL) + b"}]}\n\n"
            )
        streamed = self._text(index)
        placed = streamed.sent(chunk.text, chunk)
        if not placed and not chunk.text:
            return b""
        logprobs = self._lists(placed, num_logprobs, streamed.num_chars)
        more = self._heading.details([part.chunk for part in placed], logprobs, NULL)
        return self._open(index) + text + more + b"}]}\n\n"

    def last(self, index: int, answer: AnsweredChoice) -> bytes:
        end, num_logprobs = answer.end, self._heading.num_logprobs
        placed, logprobs = list[PlacedChunk](), NULL
        if num_logprobs is not None:
            placed = (streamed := self._text(index)).end(end.text)
            logprobs = self._lists(placed, num_logprobs, streamed.num_chars)
        chunks = [part.chunk for part in placed]
        more = self._heading.ending(chunks, logprobs, answer, end.reason)
        return self._open(index) + json_text(end.text) + more + b"}]}\n\n"

    def choice(self, index: int, answer: AnsweredChoice) -> bytes:
        num_logprobs = self._heading.num_logprobs
        text = self._echo(index) + whole_text(answer)
        named = as_json({"index": index, "text": text})
        logprobs = NULL
        if num_logprobs is not None:
            logprobs = self._logprobs(index, answer, num_logprobs, len(text))
        more = self._heading.ending(answer.chunks, logprobs, answer, answer.end.reason)
        more += self._heading.prompt_ids(index) + self._heading.prompt_logprobs(answer.prompt)
        return named[:-1] + more + b"}"

    @property
    def _no_logprobs(self) -> bytes:
        """The lists of a frame without tokens: empty, as clients expect, if other frames have
        some."""
        is_shown = self._heading.num_logprobs is not None
        return _lists(completion_lists([], self._heading.names)) if is_shown else NULL

    def _lists(self, placed: Sequence[PlacedChunk], num_logprobs: int, text_len: int) -> bytes:
        return _lists(completion_logprobs(placed, self._heading.names, num_logprobs, text_len))

    def _logprobs(
        self, index: int, answer: AnsweredChoice, num_logprobs: int, text_len: int
    ) -> bytes:
        offsets = self._offsets(index)
        placed = [PlacedChunk(chunk, offsets.of(chunk.token_ids)) for chunk in answer.chunks]
        of_output = completion_logprobs(placed, self._heading.names, num_logprobs, text_len)
        if not self._heading.echoes or answer.prompt is None:
            return _lists(of_output)
        of_prompt = self._echoed(index, answer.prompt, num_logprobs)
        return _lists({name: [*of_prompt[name], *of_output[name]] for name in of_output})

    def _echoed(
        self, index: int, prompt: ScoredPrompt, num_logprobs: int
    ) -> Mapping[str, Sequence[object]]:
        tokens = prompt.token_ids.tolist()
        offsets = echoed_offsets(tokens, self._detokenizer(()), self._echo(index))
        return echoed_logprobs(prompt, self._heading.names, num_logprobs, offsets)

    def _text(self, index: int) -> StreamedText:
        if index not in self._streamed:
            begin = len(self._echo(index))
            self._streamed[index] = StreamedText(self._offsets(index), begin)
        return self._streamed[index]

    def _offsets(self, index: int) -> TextOffsets:
        detokenizer = self._detokenizer(self._prompt_tails[index])
        return TextOffsets(detokenizer, len(self._echo(index)))

    def _echo(self, index: int) -> str:
        return self._heading.echoes[index] if self._heading.echoes else ""

    def _open(self, index: int) -> bytes:
        return self._common + b'[{"index":%d,"text":' % index


def _lists(named: Mapping[str, Sequence[object]]) -> bytes:
    """An object of lists."""
    fields = (as_json(name) + b":" + json_list(values) for name, values in named.items())
    return b"{" + b",".join(fields) + b"}"
