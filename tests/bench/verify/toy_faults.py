"""Toy engines that are unsound in one way each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tests.bench.verify.toy_engine import (
    CAPACITY,
    PAGE,
    WINDOW,
    Array,
    ToyEngine,
    ToyPage,
    ToySequence,
)

from ferryman_bench.endpoint.inquiry import Delivery, Inquiry
from ferryman_bench.endpoint.reply import DrawnToken, Reply


class NeighboursPage(ToyEngine):
    """A hit reads one page of the sequence that was stored last."""

    def resume(self, sequence: ToySequence, pages: list[ToyPage]) -> None:
        if len(pages) > 1:
            last = next(reversed(self.pages.values()))
            pages[1] = ToyPage(last.values, pages[1].state)
        super().resume(sequence, pages)


class LastPageDropped(ToyEngine):
    """The last page of a hit is not read."""

    def resume(self, sequence: ToySequence, pages: list[ToyPage]) -> None:
        super().resume(sequence, pages)
        if pages:
            sequence.values[-PAGE:] = [np.zeros_like(value) for value in pages[-1].values]


class StaleSnapshot(ToyEngine):
    """The recurrent state of a hit is that of one page before."""

    def resume(self, sequence: ToySequence, pages: list[ToyPage]) -> None:
        super().resume(sequence, pages)
        if len(pages) > 1:
            sequence.state = pages[-2].state


class OffByOne(ToyEngine):
    """Tokens behind a hit have positions that are one too high."""

    def resume(self, sequence: ToySequence, pages: list[ToyPage]) -> None:
        super().resume(sequence, pages)
        sequence.shift = 1 if pages else 0


class TruncatedKeys(ToyEngine):
    """A page is named by its place and its last two tokens, so others have its name."""

    def key(self, codes: Sequence[int], num_pages: int, salt: str) -> object:
        end = num_pages * PAGE
        return salt, num_pages, tuple(codes[end - 2 : end])


class EarlierTurn(ToyEngine):
    """Pages that decoding fills have the recurrent state of the prompt's end."""

    def begun(self, codes: list[int], salt: str) -> ToySequence:
        sequence = super().begun(codes, salt)
        self._ends[id(sequence)] = len(codes), sequence.state
        return sequence

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._ends: dict[int, tuple[int, Array]] = {}

    def take(self, sequence: ToySequence, place: int) -> None:
        end, state = self._ends.get(id(sequence), (0, sequence.state))
        is_decoding = sequence in self.running and place >= end
        before = sequence.state
        super().take(sequence, place)
        if is_decoding and (place + 1) % PAGE == 0:
            key = self.key(sequence.codes, (place + 1) // PAGE, sequence.salt)
            self.pages[key] = ToyPage(self.pages[key].values, state)
        assert sequence.state is not before


class MixedBatch(ToyEngine):
    """In a batch a step sometimes reads the recurrent state of another sequence."""

    def logits(self, sequence: ToySequence) -> Array:
        others = [other for other in self.running if other is not sequence]
        if others and len(sequence.codes) % 4 == 0:
            own, sequence.state = sequence.state, others[0].state
            logits = super().logits(sequence)
            sequence.state = own
            return logits
        return super().logits(sequence)


class ReusedSlot(ToyEngine):
    """A name goes on pointing at a slot that was given to another page."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._slots: list[ToyPage] = []
        self._names: dict[object, int] = {}
        self._next = 0

    def looked_up(self, key: object) -> ToyPage | None:
        return self._slots[self._names[key]] if key in self._names else None

    def keep(self, key: object, page: ToyPage) -> None:
        if len(self._slots) < CAPACITY:
            self._slots.append(page)
        else:
            self._slots[self._next % CAPACITY] = page
        self._names[key] = self._next % CAPACITY
        self._next += 1


class WindowDropped(ToyEngine):
    """A window has lost its oldest page after a hit."""

    def resume(self, sequence: ToySequence, pages: list[ToyPage]) -> None:
        super().resume(sequence, pages)
        sequence.window = WINDOW - PAGE if pages else WINDOW


class LostToken(ToyEngine):
    """Every third stream loses a token."""

    streams = 0

    def delivered(self, tokens: list[DrawnToken], delivery: Delivery) -> list[DrawnToken]:
        if delivery is not Delivery.STREAMED:
            return tokens
        self.streams += 1
        return tokens[:1] + tokens[2:] if self.streams % 3 == 0 else tokens


class StateAhead(ToyEngine):
    """When a client hangs up, the last page of its prompt gets the state of the tokens after it."""

    def hung_up(self, sequence: ToySequence) -> None:
        num_pages = sequence.hit // PAGE or (len(sequence.codes) - PAGE) // PAGE
        key = self.key(sequence.codes, num_pages, sequence.salt)
        if key in self.pages:
            self.pages[key] = ToyPage(self.pages[key].values, sequence.state)


FAULTS: tuple[type[ToyEngine], ...] = (
    NeighboursPage,
    LastPageDropped,
    StaleSnapshot,
    OffByOne,
    TruncatedKeys,
    EarlierTurn,
    MixedBatch,
    ReusedSlot,
    WindowDropped,
    LostToken,
    StateAhead,
)


class StaleSeldom(StaleSnapshot):
    """One hit of eight has a recurrent state that is too old."""

    hits = 0

    def resume(self, sequence: ToySequence, pages: list[ToyPage]) -> None:
        self.hits += 1
        if self.hits % 8:
            ToyEngine.resume(self, sequence, pages)
        else:
            super().resume(sequence, pages)


class Wordless(ToyEngine):
    """An engine that gives text alone, of the engine in it."""

    def __init__(self, engine: ToyEngine) -> None:
        super().__init__()
        self._engine = engine

    async def ask(self, inquiry: Inquiry, delivery: Delivery = Delivery.WHOLE) -> Reply:
        return replace(await self._engine.ask(inquiry, delivery), tokens=())
