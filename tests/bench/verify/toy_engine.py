"""A small language model with the three kinds of state, and an engine that reuses them.

It has pages of values with positions, which it attends to, a window, and a recurrent state with a
snapshot at each page end. Its weights are fixed random numbers, so every token of a prompt moves
the log probabilities of its answer. It is exact: a hit gives the bits of a cold run.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ferryman_bench.endpoint.inquiry import Delivery, Inquiry
from ferryman_bench.endpoint.reply import DrawnToken, Reply, ReportedUsage
from ferryman_bench.story import COLOURS, PLACES

Array = NDArray[np.float64]
PAGE = 8
WINDOW = 3 * PAGE
WIDTH = 12
CODES = 1 << 10
CAPACITY = 300
CUT_TOKENS = 3
WORDS = (*PLACES, *COLOURS)
DECAY = 0.9
_random = np.random.default_rng(7)
EMBEDDINGS: Array = _random.normal(size=(CODES, WIDTH))
OUT: Array = _random.normal(size=(3 * WIDTH, len(WORDS)))
SPEEDS: Array = 0.1 ** np.linspace(0.0, 2.0, WIDTH)


@dataclass(frozen=True)
class ToyPage:
    """Values [PAGE, WIDTH] of a page's positions, and the recurrent state [WIDTH] at its end."""

    values: Array
    state: Array


@dataclass
class ToySequence:
    """A running request. The first `hit` of its tokens came from the cache.

    `shift` and `window` are 0 and WINDOW in a sound engine.
    """

    codes: list[int]
    salt: str
    hit: int = 0
    values: list[Array] = field(default_factory=list)
    state: Array = field(default_factory=lambda: np.zeros(WIDTH))
    shift: int = 0
    window: int = WINDOW


class ToyEngine:
    """An `AskedEngine`. Subclasses are unsound in one way each, or noisy."""

    def __init__(self, seed: int = 0) -> None:
        self.pages: OrderedDict[object, ToyPage] = OrderedDict()
        self.running: list[ToySequence] = []
        self.random = np.random.default_rng(seed)

    async def ask(self, inquiry: Inquiry, delivery: Delivery = Delivery.WHOLE) -> Reply:
        codes = [code_of(word) for word in inquiry.text.split()]
        sequence = self.begun(codes, str(inquiry.fields.get("cache_salt", "")))
        self.running.append(sequence)
        limit = CUT_TOKENS if delivery is Delivery.CUT else inquiry.max_tokens
        tokens: list[DrawnToken] = []
        try:
            for _ in range(limit):
                # Others run their step now, as in a batch.
                await asyncio.sleep(0)
                tokens.append(self.step(sequence))
            if delivery is Delivery.CUT:
                self.hung_up(sequence)
        finally:
            self.running.remove(sequence)
        tokens = self.delivered(tokens, delivery)
        text = " ".join(token.text for token in tokens)
        usage = ReportedUsage(len(codes), limit, sequence.hit)
        return Reply(text, tuple(tokens), "length", usage)

    def key(self, codes: Sequence[int], num_pages: int, salt: str) -> object:
        """The name of a page: all tokens up to its end."""
        return salt, tuple(codes[: num_pages * PAGE])

    def begun(self, codes: list[int], salt: str) -> ToySequence:
        """The sequence after its prompt but for the last token."""
        sequence = ToySequence(codes[:-1], salt)
        pages: list[ToyPage] = []
        while (len(pages) + 1) * PAGE < len(codes):
            page = self.looked_up(self.key(codes, len(pages) + 1, salt))
            if page is None:
                break
            pages.append(page)
        self.resume(sequence, pages)
        for place in range(sequence.hit, len(sequence.codes)):
            self.take(sequence, place)
        sequence.codes.append(codes[-1])
        return sequence

    def looked_up(self, key: object) -> ToyPage | None:
        page = self.pages.get(key)
        if page is not None:
            self.pages.move_to_end(key)
        return page

    def resume(self, sequence: ToySequence, pages: list[ToyPage]) -> None:
        """Goes on behind `pages`."""
        if pages:
            sequence.hit = len(pages) * PAGE
            sequence.values = [value for page in pages for value in page.values]
            sequence.state = pages[-1].state

    def take(self, sequence: ToySequence, place: int) -> None:
        """Takes the token at `place` into the state; keeps the page that it ends."""
        embedding = EMBEDDINGS[sequence.codes[place]]
        sequence.values.append(embedding * np.cos((place + sequence.shift) * SPEEDS))
        sequence.state = DECAY * sequence.state + embedding
        if (place + 1) % PAGE == 0:
            values = np.array(sequence.values[place + 1 - PAGE : place + 1])
            num_pages = (place + 1) // PAGE
            self.keep(
                self.key(sequence.codes, num_pages, sequence.salt), ToyPage(values, sequence.state)
            )

    def keep(self, key: object, page: ToyPage) -> None:
        self.pages[key] = page
        self.pages.move_to_end(key)
        while len(self.pages) > CAPACITY:
            self.pages.popitem(last=False)

    def step(self, sequence: ToySequence) -> DrawnToken:
        """Takes the last token in, and draws the next."""
        self.take(sequence, len(sequence.codes) - 1)
        logits = self.logits(sequence)
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        best = np.argsort(-logprobs)[:5]
        likeliest = {WORDS[index]: float(logprobs[index]) for index in best}
        word = WORDS[best[0]]
        sequence.codes.append(code_of(word))
        return DrawnToken(word, likeliest[word], likeliest)

    def logits(self, sequence: ToySequence) -> Array:
        values = np.array(sequence.values)
        scores = values @ EMBEDDINGS[sequence.codes[-1]]
        weights = np.exp(scores - scores.max())
        attended = weights @ values / weights.sum()
        window = values[-sequence.window :].sum(axis=0) / WINDOW
        seen: Array = np.concatenate([attended, 4 * window, sequence.state / 3])
        return seen @ OUT

    def hung_up(self, sequence: ToySequence) -> None:
        """The client has gone."""

    def delivered(self, tokens: list[DrawnToken], delivery: Delivery) -> list[DrawnToken]:
        return tokens


def code_of(word: str) -> int:
    return crc32(word.encode()) % CODES


class NoisyEngine(ToyEngine):
    """Sound: each logit has noise, the same for cold and for warm answers."""

    scale = 0.3

    def logits(self, sequence: ToySequence) -> Array:
        return super().logits(sequence) + self.random.normal(size=len(WORDS)) * self.scale


class RoundedEngine(ToyEngine):
    """Sound: the last digits follow from the shapes of products, so from the hit and the batch."""

    scale = 0.03

    def logits(self, sequence: ToySequence) -> Array:
        shape = np.random.default_rng([sequence.hit, len(self.running), len(sequence.codes)])
        return super().logits(sequence) + shape.normal(size=len(WORDS)) * self.scale
