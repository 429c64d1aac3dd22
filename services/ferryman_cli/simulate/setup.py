"""What is simulated: a prefill and a decode worker, their node's tiers, and what things cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.schedule.limits import SchedulerLimits
from ferryman.tiers.layout import ArenaLayout
from ferryman.tiers.prefetch_values import DEFAULT_WISH, PrefetchWish
from ferryman_cli.simulate.costs import GUESSES, CostModel


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """Pool sizes and limits of one worker; `warnings` say what of them was raised, and why."""

    slots: Mapping[Kind, int]
    limits: SchedulerLimits
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """One cluster of one node. `concurrency` requests run at once, the next beginning when one
    ends; 0 takes each when the trace says. An arena without regions is a node without host tier.
    """

    manifest: StateManifest
    prefill: WorkerShape
    decode: WorkerShape
    arena: ArenaLayout
    costs: CostModel = GUESSES
    storage_bytes: int = 0
    concurrency: int = 0
    write_policy: str = "write_through"
    wish: PrefetchWish = DEFAULT_WISH
    has_junctions: bool = True
