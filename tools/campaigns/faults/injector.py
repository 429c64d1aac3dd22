"""Waits for a stage of some request's life, and strikes the process that is at it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass

from tools.campaigns.faults import effects
from tools.campaigns.faults.conditions import Condition, Conditions
from tools.campaigns.faults.draws import DEEP_SHARE, Draw, FaultKind, draw, partners, widened
from tools.campaigns.faults.effects import LOOK_SECONDS, Partitions
from tools.campaigns.faults.events import EventWatch
from tools.campaigns.faults.isolation import ControlGroups
from tools.campaigns.faults.processes import ROLES, WORKERS, Target
from tools.campaigns.faults.stages import stage_of

from ferryman.handoff.lifecycle import LifecycleEntry

STAGE_SECONDS = 4.0
MOVING = ("moving",)
ENDS = (FaultKind.KILL, FaultKind.DRAIN)
CALM_SECONDS = 31.0
PUBLISHERS = (*ROLES["router"], *WORKERS)
SIGNALS = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.STOP: signal.SIGSTOP,
    FaultKind.DRAIN: signal.SIGTERM,
}


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that took effect. `event` began the stage for which it waited; None without one."""

    kind: FaultKind
    names: tuple[str, ...]
    moment: float
    unix_ms: float
    event: LifecycleEntry | None


@dataclass(frozen=True, slots=True)
class Pace:
    """How many faults, with how many seconds between two on average."""

    num_faults: int
    seconds_between: float


_Begun = tuple[Condition, int, str]  # and the process's id, and the chain of a partition


class Injector:
    """Injects faults into whatever runs there; `conditions` says what was away or cut when."""

    def __init__(
        self,
        target: Target,
        watch: EventWatch,
        conditions: Conditions,
        groups: ControlGroups,
        rng: random.Random,
    ) -> None:
        self._target, self._watch, self._rng = target, watch, rng
        self.conditions, self._groups = conditions, groups
        self._partitions = Partitions(groups)
        self.strikes: list[Strike] = []
        self.without_effect: Counter[str] = Counter()
        self.not_over: list[str] = []
        self._busy: Counter[str] = Counter()
        self._num_returns: dict[str, int] = {}
        self._ready_since: dict[str, float] = {}
        self._is_over = False
        self.spared: Counter[str] = Counter()

    def end(self) -> None:
        """Begins no other fault."""
        self._is_over = True

    async def run(self, pace: Pace) -> None:
        """Injects all faults; returns when every process is back and nothing is cut."""
        async with asyncio.TaskGroup() as group:
            while len(self.strikes) < pace.num_faults and not self._is_over:
                await asyncio.sleep(self._rng.expovariate(1 / pace.seconds_between))
                group.create_task(self._inject(draw(self._rng)))

    async def _inject(self, wanted: Draw) -> None:
        try:
            await self._injected(wanted)
        except effects.NoEffect as error:
            self.not_over.append(str(error))

    async def _injected(self, wanted: Draw) -> None:
        """Raises NoEffect."""
        if wanted.kind is FaultKind.FULL:
            await self._fill(wanted.seconds)
        elif wanted.stages:
            if not await self._strike_at(wanted):
                await self._strike_at(widened(wanted))
        elif wanted.kind is FaultKind.CUT:
            await self._cut_at_once(wanted)
        else:
            await self._strike_at_once(wanted)

    # The choice of a victim.

    def _may_strike(self, wanted: Draw, names: tuple[str, ...], *, is_deep: bool) -> bool:
        """Whether these may be struck now; the reasons against it are counted."""
        reason = self._reason_against(wanted, names, is_deep=is_deep)
        self.spared.update([reason] if reason else [])
        return not reason

    def _reason_against(self, wanted: Draw, names: tuple[str, ...], *, is_deep: bool) -> str:
        """These must be free, and, but for deep faults, a replica of each role must stay. A worker
        that moves its requests is struck while it drains."""
        name, moment = names[0], effects.now()
        if wanted.stages != MOVING and any(self._busy[one] for one in names):
            return "it is struck already"
        bears = wanted.is_loss and name in PUBLISHERS
        if bears and not self._watch.endurance.may_strike(name, time.time() * 1000):
            return "its requests have borne enough"
        if is_deep:
            return ""
        # The launcher waits longer and longer for one that dies again and again.
        is_calm = moment - self._ready_since.get(name, -CALM_SECONDS) > CALM_SECONDS
        if wanted.kind in ENDS and wanted.stages != MOVING and not is_calm:
            return "it has just died"
        is_served = self.conditions.would_serve(names, moment)
        return "" if is_served else "no replica would be left"

    async def _strike_at(self, wanted: Draw) -> bool:
        """Waits for the stage; returns whether it came, after the fault is over."""
        is_deep = self._rng.random() < DEEP_SHARE
        begun: list[tuple[tuple[str, ...], _Begun]] = []

        def is_it(event: LifecycleEntry, name: str) -> bool:
            if stage_of(event) not in wanted.stages:
                return False
            names: tuple[str, ...] = (name,)
            if wanted.kind is FaultKind.CUT:
                names = (name, self._rng.choice(partners(name)))
            if not self._may_strike(wanted, names, is_deep=is_deep):
                return False
            try:
                begun.append((names, self._begin(wanted, names, event)))
            except (ProcessLookupError, subprocess.CalledProcessError) as error:
                self.without_effect[f"{wanted.kind}: {type(error).__name__}"] += 1
                return False
            return True

        if not await self._watch.next(is_it, STAGE_SECONDS):
            return False
        names, struck = begun[0]
        await self._finish(wanted, names, *struck)
        return True

    async def _strike_at_once(self, wanted: Draw) -> None:
        is_deep = self._rng.random() < DEEP_SHARE
        while not self._may_strike(wanted, wanted.names, is_deep=is_deep):
            await asyncio.sleep(LOOK_SECONDS)
        await self._finish(wanted, wanted.names, *self._begin(wanted, wanted.names, None))

    async def _cut_at_once(self, wanted: Draw) -> None:
        """A partition that no request waits for: of the host-cache from broker, index or worker."""
        names = ("hostcache", self._rng.choice(partners("hostcache")))
        while not self._may_strike(wanted, names, is_deep=False):
            await asyncio.sleep(LOOK_SECONDS)
        await self._finish(wanted, names, *self._begin(wanted, names, None))

    # The strike.

    def _begin(self, wanted: Draw, names: tuple[str, ...], event: LifecycleEntry | None) -> _Begun:
        """Strikes at once."""
        kind = wanted.kind
        pid, chain = self._target.pids[names[0]], ""
        self._num_returns[names[0]] = self._target.num_returns(names[0])
        if kind is FaultKind.CUT:
            chain = self._partitions.cut(names[0], pid, names[1], self._target.pids[names[1]])
        else:
            os.kill(pid, SIGNALS[kind])
        self._busy.update(names)
        if wanted.is_loss and names[0] in PUBLISHERS:
            self._watch.endurance.struck(names[0])
        strike = Strike(kind, names, effects.now(), time.time() * 1000, event)
        self.strikes.append(strike)
        return self.conditions.begin(names, strike.moment), pid, chain

    async def _finish(
        self, wanted: Draw, names: tuple[str, ...], condition: Condition, pid: int, chain: str
    ) -> None:
        """Waits until the fault is over, and sees that it was one."""
        strike = next(s for s in self.strikes if s.moment == condition.started)
        try:
            if wanted.kind is FaultKind.CUT:
                await asyncio.sleep(wanted.seconds)
                if not self._partitions.heal(chain):
                    self.without_effect["partition that met no packet"] += 1
                    self.strikes.remove(strike)
            elif wanted.kind is FaultKind.STOP:
                await effects.await_stopped(names[0], pid, wanted.seconds)
            else:
                num_returns = self._num_returns[names[0]]
                await effects.await_return(self._target, self._groups, names[0], pid, num_returns)
                self._ready_since[names[0]] = effects.now()
        finally:
            condition.ended = effects.now()
            self._watch.endurance.back(names[0])
            self._busy.subtract(names)

    async def _fill(self, seconds: float) -> None:
        """One disk is full once at a time."""
        while self._busy["disk"]:
            await asyncio.sleep(LOOK_SECONDS)
        self._busy["disk"] += 1
        folder = self._target.state_dir
        try:
            with effects.full_disk(folder):
                strike = Strike(FaultKind.FULL, ("disk",), effects.now(), time.time() * 1000, None)
                self.strikes.append(strike)
                condition = self.conditions.begin(("disk",), strike.moment)
                while effects.now() < strike.moment + seconds:
                    effects.keep_full(folder)
                    await asyncio.sleep(LOOK_SECONDS)
            condition.ended = effects.now()
        finally:
            self._busy["disk"] -= 1
