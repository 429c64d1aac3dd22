"""Masks of a step: which tokens each draw under a grammar may choose.

    output so far   history[row, start : position], on the sampling side already
    mask            what the grammar allows after exactly these tokens
    logits          −inf where the mask is clear, and for ids beyond the tokenizer's vocabulary

The history is the same record that penalties look back on: it holds what a step in flight has just
drawn, the drafts that this one verifies, and all that came by a hand-off or after a retraction. So
a grammar needs nothing else of any of them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ferryman.errors import GrammarTooSlow
from ferryman.grammar.compiler import SHORTER, CompiledGrammar, GrammarCompiler, peak_bytes
from ferryman.grammar.matcher import WORD, GrammarMatcher, Mask, num_words
from ferryman.schedule.batch import SampleRequest
from ferryman.schedule.output_grammar import OutputGrammar

# Of the processor: a usual mask takes 0.00002.
STEP_SECONDS, OUTPUT_SECONDS = 0.25, 0.25
# For no mask is less charged: an equal part of many is short.
MASK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class GuidedDraw:
    """Draw `index` of a step, whose output so far lies in [start, position) of `row`."""

    index: int
    row: int
    start: int
    position: int
    grammar: OutputGrammar
    arrival: int = 0


def guided_draws(draws: Sequence[SampleRequest]) -> tuple[GuidedDraw, ...]:
    """The draws that have a grammar: one row's in the order of its tokens."""
    guided = [
        GuidedDraw(
            index, draw.row, draw.prompt_len, draw.position, draw.params.grammar, draw.arrival
        )
        for index, draw in enumerate(draws)
        if draw.params.grammar is not None
    ]
    return tuple(sorted(guided, key=lambda draw: (draw.row, draw.position)))


@dataclass(frozen=True, slots=True)
class MaskedLogits:
    """`logits` [draws, vocab], and the indices of draws for which no token is left."""

    logits: Tensor
    dead_ends: tuple[int, ...]


@dataclass(slots=True)
class _Place:
    """The place of a row's output in its grammar, and the time by which it held up others: with
    `overtime` None, it has no mask yet."""

    grammar: OutputGrammar
    arrival: int
    compiled: weakref.ref[CompiledGrammar]
    matcher: GrammarMatcher
    overtime: float | None = None

    @property
    def has_paid(self) -> bool:
        """Whether others have waited for it for OUTPUT_SECONDS."""
        return self.overtime is not None and self.overtime > OUTPUT_SECONDS

    def charge(self, seconds: float) -> None:
        """Charges for a mask, but not for the first: that replays an output which was begun
        elsewhere."""
        self.overtime = 0.0 if self.overtime is None else self.overtime + seconds


class GrammarMasks:
    """The places of all rows in their grammars. Used by the forward stream's thread alone.

    A row's place is kept because it is near the next one. It is never trusted: it moves to the
    tokens that the history holds. The next request that has the row begins with a place of its own.

    All requests of a step wait for its masks. Where these take more than STEP_SECONDS together,
    each output pays for what it took beyond an equal part, which is MASK_SECONDS at least; one that
    has paid OUTPUT_SECONDS ends. Its place stays, since its draw is made again to tell whose error
    it was.
    """

    def __init__(
        self, compiler: GrammarCompiler, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """`clock` is the time of the processor: others on this machine cost no output its
        grammar."""
        self._compiler, self._clock = compiler, clock
        self._places: dict[int, _Place] = {}

    def masked(self, logits: Tensor, guided: Sequence[GuidedDraw], history: Tensor) -> MaskedLogits:
        """Reads the history from the device, which waits for what was queued before."""
        self._forget_others({draw.row for draw in guided})
        outputs = _outputs(guided, history)
        mask = np.zeros((len(guided), num_words(logits.shape[-1])), np.uint32)
        dead_ends, times = [], [self._clock()]
        for draw, output, row_mask in zip(guided, outputs, mask, strict=True):
            if not self._fill(draw, output, row_mask):
                dead_ends.append(draw.index)
            times.append(self._clock())
        self._charge(guided, np.diff(times).tolist())
        indices = torch.tensor([draw.index for draw in guided], device=logits.device)
        allowed = unpacked(mask, logits.shape[-1], logits.device)
        some = logits[indices].masked_fill(~allowed, -torch.inf)
        return MaskedLogits(logits.index_copy(0, indices, some), tuple(dead_ends))

    def _forget_others(self, rows: set[int]) -> None:
        """Drops the places in other rows whose grammar no request has any more."""
        self._places = {
            row: place
            for row, place in self._places.items()
            if row in rows or place.compiled() is not None
        }

    def _fill(self, draw: GuidedDraw, output: Sequence[int], row_mask: Mask) -> bool:
        """Whether there is a token after this output. Raises GrammarTooSlow."""
        place = self._place(draw)
        if place.has_paid:
            message = f"the grammar takes too long for each token, others wait for it; {SHORTER}"
            raise GrammarTooSlow(message, "grammar")
        before = peak_bytes()
        try:
            place.matcher.move_to(output)
            is_open = place.matcher.fill(row_mask)
            if (compiled := place.compiled()) is not None:
                compiled.grew(peak_bytes() - before)
            return is_open
        except Exception:
            # Its place is unknown now; the next draw of the row begins anew.
            del self._places[draw.row]
            raise

    def _place(self, draw: GuidedDraw) -> _Place:
        place = self._places.get(draw.row)
        # Another output of the same grammar begins with no debts.
        if place is None or place.arrival != draw.arrival or place.grammar != draw.grammar:
            # The door compiled it and holds it: this call finds it ready.
            compiled = self._compiler.compiled(draw.grammar)
            place = _Place(draw.grammar, draw.arrival, weakref.ref(compiled), compiled.matcher())
            self._places[draw.row] = place
        return place

    def _charge(self, guided: Sequence[GuidedDraw], seconds: Sequence[float]) -> None:
        part = max(MASK_SECONDS, STEP_SECONDS / len(guided))
        if sum(seconds) <= STEP_SECONDS:
            part = sum(seconds)
        for draw, taken in zip(guided, seconds, strict=True):
            self._places[draw.row].charge(max(0.0, taken - part))


def _outputs(guided: Sequence[GuidedDraw], history: Tensor) -> list[list[int]]:
    """The output before each draw, by one transfer."""
    first, end = min(draw.start for draw in guided), max(draw.position for draw in guided)
    rows = sorted({draw.row for draw in guided})
    place_of = {row: place for place, row in enumerate(rows)}
    tokens: NDArray[np.int32] = history[torch.tensor(rows), first:end].cpu().numpy()
    return [
        tokens[place_of[draw.row], draw.start - first : draw.position - first].tolist()
        for draw in guided
    ]


def unpacked(mask: Mask, vocab: int, device: torch.device) -> Tensor:
    """Bits [draws, words] as booleans [draws, vocab] on `device`; a card gets 32 in a word."""
    if device.type == "cpu":
        bits = np.unpackbits(mask.view(np.uint8), axis=1, count=vocab, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    words = torch.from_numpy(mask.view(np.int32)).to(device)
    return bits_of(words, vocab)


def bits_of(words: Tensor, vocab: int) -> Tensor:
    """Words [draws, words] of 32 bits as booleans [draws, vocab]."""
    shifts = torch.arange(WORD, device=words.device, dtype=words.dtype)
    bits = (words[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :vocab].bool()
