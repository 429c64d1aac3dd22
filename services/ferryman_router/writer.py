"""Tokens in, an answer out: detokenizes, watches for stop strings, writes the transcript."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ferryman.schedule.request import FinishReason
from ferryman.text.stops import StopStrings
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman.wire.values import Usage
from ferryman_router.asked import Asked
from ferryman_router.transcript import Transcript

Logprobs = tuple[Mapping[int, float], ...]


class Writer:
    """Writes one transcript. Tokens behind a stop string are not part of the answer."""

    __slots__ = ("_detokenizer", "_stops", "has_stopped", "transcript")

    def __init__(self, tokenizer: Tokenizer, asked: Asked, transcript: Transcript) -> None:
        self.transcript = transcript
        self._detokenizer = tokenizer.detokenizer(asked.token_ids[-8:].tolist())
        self._stops = StopStrings(asked.params.stop)
        self.has_stopped = False

    def write(self, offset: int, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        """Takes the next tokens; with a stop string among them, those up to its last one."""
        if len(token_ids) == 1 or not self._stops.is_watching:
            self._write(offset, token_ids, logprobs)
            return
        for index in range(len(token_ids)):
            self._write(offset + index, token_ids[index : index + 1], logprobs[index : index + 1])
            if self.has_stopped:
                return

    def finish(self, reason: FinishReason, usage: Usage) -> None:
        """Ends the answer with what was held back, unless a stop string has cut it off."""
        text = ""
        if not self.has_stopped:
            last = self._stops.feed(self._detokenizer.flush())
            text = last.text + ("" if last.stop else self._stops.flush())
        self.transcript.close(GenerateFinished(reason, usage, text))

    def _write(self, offset: int, token_ids: Sequence[int], logprobs: Logprobs) -> None:
        released = self._stops.feed(self._detokenizer.feed(token_ids))
        self.has_stopped = released.stop is not None
        self.transcript.add(TokenChunk(offset, tuple(token_ids), released.text, logprobs))
