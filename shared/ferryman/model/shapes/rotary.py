"""Rotary positions beyond the trained length: frequencies, scaled once at load.

    inv_freq[i] = theta^(-2i / rotary_dim)                             (Su et al. 2021)
    linear:  every wave is `factor` times as long                      (Chen et al. 2023)
    llama3:  long waves are, short ones stay, those between are mixed  (Llama 3.1)
    yarn:    as llama3 by a ramp over i; rotated q and k grow by `attention_factor`
                                                                       (Peng et al. 2023)
    longrope: every wave has a factor of its own; q and k grow         (Ding et al. 2024)
    proportional: waves are of all channels, and only the first of them turn  (Gemma 4)
    alpha:   theta grows by alpha^(rotary_dim / (rotary_dim - 2))      (Hunyuan)

Others change the waves while a text grows: "longrope" has two lists of factors, for texts within
the trained length and beyond it, "dynamic" stretches beyond the trained length. Keys that are in
pages already would have to be rotated again. So a model here has one set of waves, by the length of
its context.

A wave of frequency f has a period of 2π/f positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.shapes.config_fields import ConfigFields


@dataclass(frozen=True, slots=True)
class NoScaling:
    """Waves as they were trained ("default")."""

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        return inv_freq, 1.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All waves are scaled alike."""

    factor: float

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        return inv_freq / self.factor, 1.0


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Scales a wave by the number of its periods within the trained length `trained_len`."""

    factor: float
    low_turns: float
    high_turns: float
    trained_len: int

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        """Waves of up to `low_turns` periods are scaled in full; from `high_turns` on they stay."""
        turns = self.trained_len / (2 * math.pi / inv_freq)
        width = self.high_turns - self.low_turns
        if width:
            kept = ((turns - self.low_turns) / width).clamp(0, 1)
        else:  # nothing lies between (Llama 4)
            kept = (turns > self.low_turns).to(turns.dtype)
        return (1 - kept) * inv_freq / self.factor + kept * inv_freq, 1.0


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Scales by a ramp between the waves with `beta_fast` and with `beta_slow` periods.

    `rounds_ends`: the ramp's ends are rounded to whole indices.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    trained_len: int
    rounds_ends: bool
    attention_factor: float

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
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
        """The index (not whole) of the wave with `turns` periods within the trained length."""
        longest = self.trained_len / (turns * 2 * math.pi)
        return rotary_dim * math.log(longest) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True)
class LongropeScaling:
    """Each wave is `factors[i]` times as long."""

    factors: tuple[float, ...]
    attention_factor: float

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        return inv_freq / inv_freq.new_tensor(self.factors), self.attention_factor


@dataclass(frozen=True, slots=True)
class AlphaScaling:
    """A larger theta: the shortest wave stays, the longest is `alpha` times as long."""

    alpha: float

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        rotary_dim = 2 * len(inv_freq)
        grown = theta * self.alpha ** (rotary_dim / (rotary_dim - 2))
        exponents = torch.arange(0, rotary_dim, 2, dtype=inv_freq.dtype, device=inv_freq.device)
        return 1.0 / grown ** (exponents / rotary_dim), 1.0


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """The first `turning` waves are `factor` times as long; the others do not turn (Gemma 4)."""

    turning: int
    factor: float

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        numbers = torch.arange(len(inv_freq), device=inv_freq.device)
        return torch.where(numbers < self.turning, inv_freq / self.factor, 0.0), 1.0


Stretch = (
    NoScaling
    | LinearScaling
    | Llama3Scaling
    | YarnScaling
    | LongropeScaling
    | AlphaScaling
    | ProportionalScaling
)


def rotary_frequencies(
    theta: float, rotary_dim: int, stretch: Stretch, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """inv_freq [rotary_dim / 2] in `dtype` on the CPU, and its scaling."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=dtype) / rotary_dim
    return stretch.scale(1.0 / theta**exponents, theta)


def read_theta(rope: ConfigFields, default: float, name: str = "rope_theta") -> float:
    """The base of all wave lengths. At 1 all waves are equal; below 1 they become shorter."""
    theta = rope.positive(name, default)
    if theta <= 1.0:
        raise rope.refusal(name, "more than 1")
    return theta


def read_scaling(rope: ConfigFields) -> Stretch:
    """The scaling that `rope_type` names. Raises ConfigError for any other type.

    `rope` holds the rope parameters laid over the fields of the model.
    """
    name = "rope_type" if "rope_type" in rope.raw else "type"
    kind = rope.raw.get(name) or "default"
    if not isinstance(kind, str) or kind not in _READERS:
        raise rope.refusal(name, f"one of {', '.join(_READERS)}")
    return _READERS[kind](rope)


def _read_llama3(rope: ConfigFields) -> Llama3Scaling:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high < low:
        raise rope.refusal("high_freq_factor", f"at least low_freq_factor {low}")
    return Llama3Scaling(_factor(rope), low, high, _trained_len(rope))


def _read_yarn(rope: ConfigFields) -> YarnScaling:
    trained_len = _trained_len(rope)
    grown = rope.whole("max_position_embeddings") / trained_len
    factor = _factor(rope) if rope.raw.get("factor") is not None else grown
    return YarnScaling(
        factor=factor,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        trained_len=trained_len,
        rounds_ends=rope.flag("truncate", True),
        attention_factor=rope.positive("attention_factor", _attention_factor(rope, factor)),
    )


def _read_longrope(rope: ConfigFields) -> LongropeScaling:
    trained_len = rope.whole("original_max_position_embeddings")
    context_len = rope.whole("max_position_embeddings")
    is_long = context_len > trained_len
    growth = rope.positive("factor", context_len / trained_len)
    paper = math.sqrt(1 + math.log(growth) / math.log(trained_len)) if trained_len > 1 else 1.0
    return LongropeScaling(
        _wave_factors(rope, "long_factor" if is_long else "short_factor"),
        rope.positive("attention_factor", paper if growth > 1 else 1.0),
    )


def _wave_factors(rope: ConfigFields, name: str) -> tuple[float, ...]:
    factors = rope.raw.get(name)
    return rope.positives(name, (1.0,) * len(factors) if isinstance(factors, list) else (1.0,))


def _read_dynamic(rope: ConfigFields) -> Stretch:
    """Within the context, which is the trained length, waves stay; a fixed alpha stretches them."""
    if rope.raw.get("alpha"):
        return AlphaScaling(rope.positive("alpha"))
    _factor(rope)
    return NoScaling()


def _attention_factor(rope: ConfigFields, factor: float) -> float:
    """The factor of the paper, or the ratio of two such factors (DeepSeek)."""
    over, under = rope.not_negative("mscale", 0.0), rope.not_negative("mscale_all_dim", 0.0)
    if over and under:
        return yarn_growth(factor, over) / yarn_growth(factor, under)
    return yarn_growth(factor, 1.0)


def yarn_growth(factor: float, scale: float) -> float:
    """The factor by which scores must grow when waves are scaled by `factor`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factor(rope: ConfigFields) -> float:
    return rope.positive("factor")


def _trained_len(rope: ConfigFields) -> int:
    return rope.whole("original_max_position_embeddings", rope.whole("max_position_embeddings"))


_READERS: Mapping[str, Callable[[ConfigFields], Stretch]] = {
    "default": lambda _: NoScaling(),
    "linear": lambda rope: LinearScaling(_factor(rope)),
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "su": _read_longrope,
    "dynamic": _read_dynamic,
    "mrope": lambda _: NoScaling(),
}
