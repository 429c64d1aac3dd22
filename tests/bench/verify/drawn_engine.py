"""Sound engines without any state: an answer follows from its question, and from noise that is the
same for cold and for warm ones. They are quick, so that hundreds of runs are."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ferryman_bench.endpoint.inquiry import Delivery, Inquiry
from ferryman_bench.endpoint.reply import DrawnToken, Reply, ReportedUsage

NUM_TOKENS = 6
WORDS = ("kite", "lamp", "boat", "drum")
Logits = NDArray[np.float64]


class DrawnEngine:
    """An `AskedEngine` whose answers have the same bits however they are asked for."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng([seed, 3])

    async def ask(self, inquiry: Inquiry, delivery: Delivery = Delivery.WHOLE) -> Reply:
        truth = np.random.Generator(np.random.MT19937(crc32(inquiry.text.encode())))
        logits = self.noisy(2 * truth.normal(size=(NUM_TOKENS, len(WORDS))))
        logits -= logits.max(axis=1, keepdims=True)  # heavy tails would overflow the exponential
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        tokens = tuple(_drawn(dict(zip(WORDS, row, strict=True))) for row in logprobs.tolist())
        text = " ".join(token.text for token in tokens)
        return Reply(text, tokens, "length", ReportedUsage())

    def noisy(self, logits: Logits) -> Logits:
        """The logits [tokens, words] with this engine's noise."""
        return logits


class GaussianEngine(DrawnEngine):
    """Each logit has a little noise."""

    scale = 0.02

    def noisy(self, logits: Logits) -> Logits:
        return logits + self.random.normal(size=logits.shape) * self.scale


class LoudEngine(GaussianEngine):
    """The noise often changes tokens."""

    scale = 0.5


class SeldomEngine(DrawnEngine):
    """One answer of ten has nothing to do with its question."""

    share = 0.1

    def noisy(self, logits: Logits) -> Logits:
        if self.random.random() < self.share:
            return self.random.normal(size=logits.shape) * 2
        return logits


class HeavyEngine(DrawnEngine):
    """Noise with heavy tails: Student's t with one and a half degrees of freedom."""

    def noisy(self, logits: Logits) -> Logits:
        return logits + self.random.standard_t(1.5, size=logits.shape) * 0.05


def _drawn(row: Mapping[str, float]) -> DrawnToken:
    word = max(row, key=row.__getitem__)
    return DrawnToken(word, row[word], row)


SOUND = (DrawnEngine, GaussianEngine, LoudEngine, SeldomEngine, HeavyEngine)
