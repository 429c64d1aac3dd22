"""The planner: the cheapest way to have a position, and what to do when pools are short of it.

Candidates are the page ends at which every part of the resume set is on the device or the host
(`candidates`). The cost of one is the seconds to load what is not on the device and to compute what
is behind it. Planning has no side effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ferryman.cache.candidates import Candidate, Search
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.placement import Placement
from ferryman.cache.resume import (
    Clear,
    CopyFrom,
    Costs,
    DeviceView,
    HostView,
    Initialiser,
    LoadFrom,
    Reason,
    Receive,
    ResumePlan,
    Shortfall,
    Uncached,
    resume_set,
)
from ferryman.cache.uncached import uncached_spans
from ferryman.cache.window_budget import (
    NO_WINDOWS,
    WindowDemand,
    WindowPool,
    WindowUse,
    fitting_chunk,
    window_demand,
)
from ferryman.errors import ConfigError

# Looking up a member of an enumeration takes 70 ns; a plan does it twenty times.
_FULL, _WINDOW, _RECURRENT = Kind.FULL, Kind.WINDOW, Kind.RECURRENT


ENDS_ONLY = Placement()
ROOMY = WindowPool()


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans for one model on one worker; a step computes at most `step_tokens` of a prompt.

    `num_decoded` counts the positions that decoding computes here behind a prompt at most;
    `num_drafts` of them at once are drafts, each with a slot for the state behind it.
    """

    manifest: StateManifest
    costs: Costs
    step_tokens: int
    placement: Placement = ENDS_ONLY
    has_junctions: bool = True
    windows: WindowPool = ROOMY
    num_drafts: int = 0

    def __post_init__(self) -> None:
        grid = self.placement.grid
        if grid < 0 or grid % self.manifest.page_size:
            raise ConfigError(
                f"snapshot_grid={grid} must be a multiple of the page size, "
                f"{self.manifest.page_size} tokens, or 0 for none"
            )

    def plans(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        device: DeviceView,
        host: HostView,
        *,
        num_decoded: int = 0,
    ) -> Iterator[ResumePlan]:
        """The best plan, and then what asks less of the pools, in the order in which to try them.

        Snapshots go first, those that save least before others, then the loads. What the window
        pool could never hold is left out; when nothing else is left, chunks become shorter.
        """
        least = plan = self.plan(keys, prompt_len, device, host, num_decoded=num_decoded)
        if self._could_fit(plan):
            yield plan
        for snapshots in self.placement.fewer(plan.snapshots, prompt_len):
            least = self._budgeted(plan._replace(snapshots=snapshots))
            if self._could_fit(least):
                yield least
        if not self._could_fit(least):
            yield self._in_shorter_chunks(least)
        if plan.loads:
            without = self._declined(plan, host)
            yield from self.plans(keys, prompt_len, device, without, num_decoded=num_decoded)

    def plan(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        device: DeviceView,
        host: HostView,
        *,
        num_decoded: int = 0,
    ) -> ResumePlan:
        """The cheapest way to have position `prompt_len`, one token at least being computed."""
        page_size = self.manifest.page_size
        matched = device.match_depth(keys)
        seen = host.pages_from(matched) if _FULL in self.manifest.kinds else host.end_from(matched)
        limit = min(seen, (prompt_len - 1) // page_size)
        search = Search(self.manifest, self.costs, keys, prompt_len, device, host, matched, limit)
        best, unloaded, refused = search.choose()
        junction = seen if self.has_junctions and best.depth < min(seen, limit) else best.depth
        plan = ResumePlan(
            position=best.depth * page_size,
            prompt_len=prompt_len,
            anchor_pages=min(best.depth, matched),
            window_pages=best.window_pages,
            loads=best.loads,
            initialiser=self._initialiser(keys, best),
            snapshots=self._snapshots(keys, prompt_len, best.depth, junction, device),
            uncached=uncached_spans(
                best.depth, limit, seen, prompt_len / page_size, refused, host.shortfall
            ),
            demand={},
            seconds=best.seconds,
            final_len=prompt_len + num_decoded,
            chunk_len=self.step_tokens,
            load_bytes=best.load_bytes,
            load_seconds=best.load_seconds,
            compute_seconds=best.compute_seconds,
            recompute_seconds=unloaded.compute_seconds - best.compute_seconds
            if best.loads
            else 0.0,
        )
        return self._budgeted(plan)

    def plan_cold(self, prompt_len: int, reason: Reason, *, num_decoded: int = 0) -> ResumePlan:
        """Computes everything and keeps nothing: without a prefix cache, or when what was cached
        proved corrupt. What does not fit even so can never run here."""
        seconds = prompt_len * self.costs.prefill_seconds_per_token
        pages = -(-prompt_len // self.manifest.page_size)
        bare = ResumePlan(
            position=0,
            prompt_len=prompt_len,
            anchor_pages=0,
            window_pages=(),
            loads=(),
            initialiser=Clear(),
            snapshots=(),
            uncached=(Uncached(reason, 0, pages),),
            demand={},
            seconds=seconds,
            final_len=prompt_len + num_decoded,
            chunk_len=self.step_tokens,
            compute_seconds=seconds,
        )
        keepless = self._keepless
        plan = keepless._budgeted(bare)
        return plan if self._could_fit(plan) else keepless._in_shorter_chunks(plan)

    def plan_receive(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        device: DeviceView,
        *,
        num_decoded: int = 0,
    ) -> ResumePlan:
        """Decode's half of a hand-off at n: what is here stays, all the rest will be received."""
        page_size, needs = self.manifest.page_size, resume_set(self.manifest, prompt_len)
        matched = device.match_depth(keys[: prompt_len // page_size])
        window_pages = tuple(
            page
            for page in range(needs.window.first, min(needs.window.end, matched))
            if device.has(_WINDOW, keys[page])
        )
        plan = ResumePlan(
            position=prompt_len,
            prompt_len=prompt_len,
            anchor_pages=matched,
            window_pages=window_pages,
            loads=(),
            initialiser=Receive(),
            snapshots=(),
            uncached=(),
            demand={},
            seconds=0.0,
            final_len=prompt_len + num_decoded,
            chunk_len=self.step_tokens,
        )
        budgeted = self._budgeted(plan)
        if self._could_fit(budgeted):
            return budgeted
        # A pool that has just room for it keeps nothing for the next turn, nor for others.
        return self._keepless._budgeted(plan._replace(window_pages=()))

    # Spelling out the choice.

    def _initialiser(self, keys: Sequence[PageKey], best: Candidate) -> Initialiser:
        if best.depth == 0 or _RECURRENT not in self.manifest.kinds:
            return Clear()
        for unit in best.loads:
            if unit.kind is _RECURRENT:
                return LoadFrom(unit)
        return CopyFrom(keys[best.depth - 1])

    @property
    def _point_kind(self) -> Kind | None:
        """What makes a page end a resume point; None where every page end is one."""
        for kind in (_RECURRENT, _WINDOW):
            if kind in self.manifest.kinds:
                return kind
        return None

    def _snapshots(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        depth: int,
        junction: int,
        device: DeviceView,
    ) -> tuple[int, ...]:
        """The end is the deepest page end before the prompt's: there a repeat of it resumes.

        When a page ends with the prompt, that is an end too, unless it is held already.
        """
        page_size = self.manifest.page_size
        pages, rest = divmod(prompt_len, page_size)
        if depth == pages or self._point_kind is None:
            return ()
        ends: tuple[int, ...] = ((pages if rest else pages - 1) * page_size,)
        if not rest and not device.has(self._point_kind, keys[pages - 1]):
            ends = (*ends, prompt_len)
        return self.placement.positions(depth * page_size, junction * page_size, ends, prompt_len)

    def _declined(self, plan: ResumePlan, host: HostView) -> HostView:
        """There is no room for the loads of `plan`: the host has nothing to give, and why."""
        end = max(plan.position // self.manifest.page_size, host.shortfall.end_page)
        return HostView(shortfall=Shortfall(end, Reason.NO_ROOM))

    # Counting slots.

    @property
    def _keepless(self) -> Planner:
        """Where nothing of what is decoded is kept."""
        return replace(self, windows=self.windows._replace(uncertain_len=-1))

    def _budgeted(self, plan: ResumePlan) -> ResumePlan:
        """With the fresh slots it needs: what is reused on the device is not among them."""
        demand, kinds, windows = {}, self.manifest.kinds, NO_WINDOWS
        if _FULL in kinds:
            demand[_FULL] = -(-plan.prompt_len // self.manifest.page_size) - plan.anchor_pages
        if _WINDOW in kinds:
            windows = self._windows(plan)
            demand[_WINDOW] = windows.most
        if _RECURRENT in kinds:
            scratch = min(self.num_drafts, plan.final_len - plan.prompt_len)
            demand[_RECURRENT] = 1 + len(plan.snapshots) + scratch
        return plan._replace(demand=demand, windows=windows)

    def _windows(self, plan: ResumePlan) -> WindowDemand:
        return window_demand(self.manifest, self._window_use(plan), plan.chunk_len)

    def _window_use(self, plan: ResumePlan) -> WindowUse:
        return WindowUse(
            plan.position,
            plan.prompt_len,
            plan.final_len,
            plan.snapshots,
            plan.window_pages,
            self.windows.uncertain_len,
            self.num_drafts,
        )

    def _window_room(self, plan: ResumePlan) -> int:
        """What the pool has at most besides the pages that the plan reuses."""
        return self.windows.num_slots - len(plan.window_pages)

    def _could_fit(self, plan: ResumePlan) -> bool:
        return plan.windows.most <= self._window_room(plan)

    def _in_shorter_chunks(self, plan: ResumePlan) -> ResumePlan:
        use, room = self._window_use(plan), self._window_room(plan)
        length = fitting_chunk(self.manifest, use, plan.chunk_len, room)
        return self._budgeted(plan._replace(chunk_len=length))
