"""All that probes have shown about one way of reuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ferryman_bench.endpoint.inquiry import Inquiry
from ferryman_bench.endpoint.reply import Reply
from ferryman_bench.verify.difference import difference_of, odd_index, spread_of
from ferryman_bench.verify.wager import Wager
from ferryman_bench.verify.ways import SentInquiry, WarmReply

COLD_REPLIES = 3
CHANCE = 1 / (COLD_REPLIES + 1)


class WayResult(StrEnum):
    """The result of a way, from the best on."""

    UNTRIED = "not tried"
    BITS = "bits"
    ROUNDING = "rounding"
    NOISE = "noise"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class WayProbe:
    """One probe: the warm answer, and COLD_REPLIES cold ones to the same question."""

    warm: WarmReply
    warm_fields: Mapping[str, Any]
    colds: tuple[Reply, ...]

    @property
    def nats(self) -> float:
        """The least difference of the warm answer from a cold one."""
        return min(difference_of(self.warm.reply, cold).nats for cold in self.colds)

    @property
    def cold_nats(self) -> float:
        """The largest difference among cold answers."""
        return spread_of(self.colds)

    def odd(self, floor: float) -> int | None:
        """The index of the odd answer, 0 for the warm one."""
        return odd_index((self.warm.reply, *self.colds), floor)

    @property
    def question(self) -> Inquiry:
        return self.warm.question

    @property
    def sent(self) -> tuple[SentInquiry, ...]:
        return self.warm.sent


@dataclass(frozen=True, slots=True)
class WayRecord:
    """The probes of one way. `worst` is the odd one with the largest difference.

    `largest_nats` and `largest_cold_nats` are of all probes; `num_reusing` probes reported cached
    tokens, `num_drafting` accepted drafts.
    """

    name: str
    wager: Wager = field(default_factory=lambda: Wager(CHANCE))
    probes: int = 0
    num_different: int = 0
    num_suspect: int = 0
    largest_nats: float = 0.0
    largest_cold_nats: float = 0.0
    num_reusing: int = 0
    num_drafting: int = 0
    worst: WayProbe | None = None

    def after(self, probe: WayProbe, floor: float, *, has_logprobs: bool) -> WayRecord:
        """The record with one more probe.

        Without log probabilities every probe counts, so that rare changes of rounding do not add
        up; with them those that have an odd answer.
        """
        odd, usage = probe.odd(floor), probe.warm.reply.usage
        is_win = odd == 0
        is_counted = odd is not None or not has_logprobs
        is_worst = is_win and (self.worst is None or probe.nats > self.worst.nats)
        return replace(
            self,
            wager=self.wager.after(is_win) if is_counted else self.wager,
            probes=self.probes + 1,
            num_different=self.num_different + (probe.nats > 0),
            num_suspect=self.num_suspect + (probe.nats > floor),
            largest_nats=max(self.largest_nats, probe.nats),
            largest_cold_nats=max(self.largest_cold_nats, probe.cold_nats),
            num_reusing=self.num_reusing + bool(usage.cached_tokens),
            num_drafting=self.num_drafting + bool(usage.drafted_tokens),
            worst=probe if is_worst else self.worst,
        )

    def result(self, floor: float, *, rate: float, num_ways: int) -> WayResult:
        if self.wager.has_won(rate, num_ways):
            return WayResult.CHANGED
        if not self.probes:
            return WayResult.UNTRIED
        if self.largest_nats == 0:
            return WayResult.BITS
        return WayResult.ROUNDING if self.largest_nats <= floor else WayResult.NOISE
