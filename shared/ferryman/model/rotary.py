"""Rotary positions beyond the trained length: frequencies, stretched once at load.

    inv_freq[i] = theta^(-2i / rotary_dim)                             (Su et al. 2021)
    linear:  every wave is `factor` times as long                      (Chen et al. 2023)
    llama3:  long waves are, short ones stay, those between are mixed  (Llama 3.1)
    yarn:    as llama3 by a ramp over i; what turns grows by `attention_factor`
                                                                       (Peng et al. 2023)

A wave of frequency f comes round every 2π/f positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.fields import Fields


@dataclass(frozen=True, slots=True)
class Unstretched:
    """Waves as they were trained ("default")."""

    def stretch(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        return inv_freq, 1.0


@dataclass(frozen=True, slots=True)
class LinearStretch:
    """All waves alike."""

    factor: float

    def stretch(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        return inv_freq / self.factor, 1.0


@dataclass(frozen=True, slots=True)
class Llama3Stretch:
    """By how often a wave comes round within the trained length `trained_len`."""

    factor: float
    low_turns: float
    high_turns: float
    trained_len: int

    def stretch(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        """Up to `low_turns` a wave is stretched, from `high_turns` on it stays."""
        turns = self.trained_len / (2 * math.pi / inv_freq)
        kept = ((turns - self.low_turns) / (self.high_turns - self.low_turns)).clamp(0, 1)
        return (1 - kept) * inv_freq / self.factor + kept * inv_freq, 1.0


@dataclass(frozen=True, slots=True)
class YarnStretch:
    """By a ramp between the waves that come round `beta_fast` and `beta_slow` times.

    `rounds_ends`: the ramp's ends are whole indices.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    trained_len: int
    rounds_ends: bool
    attention_factor: float

    def stretch(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        rotary_dim = 2 * len(inv_freq)
        low, high = (
            self._index(turns, rotary_dim, theta) for turns in (self.beta_fast, self.beta_slow)
        )
        if self.rounds_ends:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        width = high - low or 0.001
        index = torch.arange(len(inv_freq), dtype=inv_freq.dtype, device=inv_freq.device)
        kept = 1 - ((index - low) / width).clamp(0, 1)
        stretched = inv_freq / self.factor * (1 - kept) + inv_freq * kept
        return stretched, self.attention_factor

    def _index(self, turns: float, rotary_dim: int, theta: float) -> float:
        """Which wave comes round `turns` times within the trained length: not a whole number."""
        longest = self.trained_len / (turns * 2 * math.pi)
        return rotary_dim * math.log(longest) / (2 * math.log(theta))


Stretch = Unstretched | LinearStretch | Llama3Stretch | YarnStretch


def rotary_frequencies(
    theta: float, rotary_dim: int, stretch: Stretch, *, like: Tensor
) -> tuple[Tensor, float]:
    """inv_freq [rotary_dim / 2] in the dtype and on the device of `like`, and its scaling."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=like.dtype, device=like.device) / rotary_dim
    return stretch.stretch(1.0 / theta**exponents, theta)


def read_stretch(rope: Fields) -> Stretch:
    """The stretch that `rope_type` names; any other type is refused by its name.

    `rope` holds the rope parameters, and the fields of the model beneath them.
    """
    name = "rope_type" if "rope_type" in rope.raw else "type"
    kind = rope.raw.get(name) or "default"
    if kind not in _READERS:
        raise rope.refusal(name, f"one of {', '.join(_READERS)}")
    return _READERS[kind](rope)


def _read_llama3(rope: Fields) -> Llama3Stretch:
    low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
    if high <= low:
        raise rope.refusal("high_freq_factor", f"more than low_freq_factor {low}")
    return Llama3Stretch(_factor(rope), low, high, _trained_len(rope))


def _read_yarn(rope: Fields) -> YarnStretch:
    trained_len = _trained_len(rope)
    grown = rope.whole("max_position_embeddings") / trained_len
    factor = _factor(rope) if rope.raw.get("factor") is not None else grown
    return YarnStretch(
        factor=factor,
        beta_fast=rope.real("beta_fast", 32.0),
        beta_slow=rope.real("beta_slow", 1.0),
        trained_len=trained_len,
        rounds_ends=rope.flag("truncate", True),
        attention_factor=rope.real("attention_factor", _attention_factor(rope, factor)),
    )


def _attention_factor(rope: Fields, factor: float) -> float:
    """What the paper found, or the ratio of two such (DeepSeek)."""
    over, under = rope.real("mscale", 0.0), rope.real("mscale_all_dim", 0.0)
    if over and under:
        return yarn_growth(factor, over) / yarn_growth(factor, under)
    return yarn_growth(factor, 1.0)


def yarn_growth(factor: float, scale: float) -> float:
    """By how much scores are to grow when waves are stretched by `factor`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factor(rope: Fields) -> float:
    factor = rope.real("factor")
    if factor <= 0:
        raise rope.refusal("factor", "more than 0")
    return factor


def _trained_len(rope: Fields) -> int:
    return rope.whole("original_max_position_embeddings", rope.whole("max_position_embeddings"))


_READERS: Mapping[str, Callable[[Fields], Stretch]] = {
    "default": lambda _: Unstretched(),
    "linear": lambda rope: LinearStretch(_factor(rope)),
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}
