"""The planner: the cheapest way to reach a position, and alternatives when pools are short.

Candidates are the page ends at which every part of the resume set is on the device or the host
(`candidates`). The cost of one is the seconds to load the units that are not on the device and to
compute the tokens after it. Planning has no side effects. SGLang's `match_prefix` answers a part
of the same question.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ferryman.cache.candidates import ResumeCandidate, ResumeSearch
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.placement import Placement
from ferryman.cache.resume import (
    EMPTY_DEVICE,
    EMPTY_HOST,
    ClearState,
    CopyState,
    DeviceView,
    HostView,
    Initialiser,
    LoadState,
    Reason,
    ReceiveState,
    ResumeCosts,
    ResumePlan,
    ResumeSet,
    Shortfall,
    Uncached,
    max_resume_pages,
    resume_set,
    uncached_spans,
)
from ferryman.cache.units import HostUnit
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

    Up to `num_drafts` tokens of a request are drafts at once, each with a slot for the state after
    it. A request that is received from prefill takes these slots when it runs, and none before.
    """

    manifest: StateManifest
    costs: ResumeCosts
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
        forks: Sequence[int] = (),
    ) -> Iterator[ResumePlan]:
        """The best plan, then plans that ask less of the pools, in the order in which to try them.

        Snapshots are given up first, those that save least before others, then the loads. Plans
        that the window pool could never hold are left out; if no other plan is left, chunks become
        shorter.

        `num_decoded` bounds the positions that are decoded on this worker after the prompt; at
        `forks` other prompts are likely to part from this one.
        """
        least = plan = self.plan(
            keys, prompt_len, device, host, num_decoded=num_decoded, forks=forks
        )
        if self._fits(plan):
            yield plan
        for snapshots in self.placement.fewer(plan.snapshots, prompt_len):
            least = self._budgeted(plan._replace(snapshots=snapshots))
            if self._fits(least):
                yield least
        if not self._fits(least):
            yield self._in_shorter_chunks(least)
        if plan.loads:
            without = self._declined(plan, host)
            yield from self.plans(
                keys, prompt_len, device, without, num_decoded=num_decoded, forks=forks
            )

    def plan(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        device: DeviceView,
        host: HostView,
        *,
        num_decoded: int = 0,
        forks: Sequence[int] = (),
    ) -> ResumePlan:
        """The cheapest way to reach position `prompt_len`; at least one token is computed."""
        page_size = self.manifest.page_size
        matched = device.match_depth(keys)
        seen = host.pages_from(matched) if _FULL in self.manifest.kinds else host.end_from(matched)
        limit = min(seen, max_resume_pages(prompt_len, page_size))
        search = ResumeSearch(
            self.manifest, self.costs, keys, prompt_len, device, host, matched, limit
        )
        best, unloaded, refused = search.choose()
        places = (fork // page_size * page_size for fork in forks)
        likely = self.placement.worthwhile(best.depth * page_size, places)
        aligned = [place // page_size for place in likely]
        # The pages match deeper than any resume point: the path forks there. A snapshot at the fork
        # serves all later prompts on either branch.
        junction = seen if self.has_junctions and best.depth < min(seen, limit) else best.depth
        plan = ResumePlan(
            position=best.depth * page_size,
            prompt_len=prompt_len,
            anchor_pages=min(best.depth, matched),
            window_pages=best.window_pages,
            loads=best.loads,
            initialiser=self._initialiser(keys, best),
            snapshots=self._snapshots(keys, prompt_len, best.depth, (junction, *aligned), device),
            uncached=uncached_spans(best.depth, limit, seen, prompt_len / page_size, refused, host),
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

    def plans_anew(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        reason: Reason,
        *,
        num_decoded: int = 0,
        forks: Sequence[int] = (),
    ) -> Iterator[ResumePlan]:
        """Plans of a request that has to compute all its positions, for `reason`. It keeps its
        state for others as every request does."""
        spans = (Uncached(reason, 0, -(-prompt_len // self.manifest.page_size)),)
        for plan in self.plans(
            keys, prompt_len, EMPTY_DEVICE, EMPTY_HOST, num_decoded=num_decoded, forks=forks
        ):
            yield plan._replace(uncached=spans)

    def plan_cold(self, prompt_len: int, reason: Reason, *, num_decoded: int = 0) -> ResumePlan:
        """Computes everything and keeps nothing: for a worker without a prefix cache, and for units
        that proved corrupt. A prompt whose cold plan does not fit can never run here."""
        seconds = prompt_len * self.costs.prefill_seconds_per_token
        pages = -(-prompt_len // self.manifest.page_size)
        bare = ResumePlan(
            position=0,
            prompt_len=prompt_len,
            anchor_pages=0,
            window_pages=(),
            loads=(),
            initialiser=ClearState(),
            snapshots=(),
            uncached=(Uncached(reason, 0, pages),),
            demand={},
            seconds=seconds,
            final_len=prompt_len + num_decoded,
            chunk_len=self.step_tokens,
            compute_seconds=seconds,
        )
        unretained = self._without_retention
        plan = unretained._budgeted(bare)
        return plan if self._fits(plan) else unretained._in_shorter_chunks(plan)

    def plan_receive(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        device: DeviceView,
        host: HostView = EMPTY_HOST,
        *,
        num_decoded: int = 0,
    ) -> ResumePlan:
        """Decode's part of a hand-off at n: cached state is reused, the host's is loaded, all the
        rest is received.

        The plan does not weigh the loads: a copy within the node is never slower than a transfer
        that ends in the same memory.
        """
        page_size, needs = self.manifest.page_size, resume_set(self.manifest, prompt_len)
        matched = device.match_depth(keys[: prompt_len // page_size])
        window_pages = tuple(
            page
            for page in range(needs.window.first, min(needs.window.end, matched))
            if device.has(_WINDOW, keys[page])
        )
        reused = {_FULL: range(matched), _WINDOW: window_pages}
        loads = _loads_to_receive(needs, host, prompt_len // page_size, reused)
        plan = ResumePlan(
            position=prompt_len,
            prompt_len=prompt_len,
            anchor_pages=matched,
            window_pages=window_pages,
            loads=loads,
            initialiser=ReceiveState(),
            snapshots=(),
            uncached=(),
            demand={},
            seconds=0.0,
            final_len=prompt_len + num_decoded,
            chunk_len=self.step_tokens,
            load_bytes=sum(unit.num_bytes for unit in loads),
        )
        budgeted = self._budgeted(plan)
        if self._fits(budgeted):
            return budgeted
        # The pool has room for this request alone: it keeps nothing for the next turn or for
        # others.
        return self._without_retention._budgeted(plan._replace(window_pages=()))

    # Parts of the plan.

    def _initialiser(self, keys: Sequence[PageKey], best: ResumeCandidate) -> Initialiser:
        if best.depth == 0 or _RECURRENT not in self.manifest.kinds:
            return ClearState()
        for unit in best.loads:
            if unit.kind is _RECURRENT:
                return LoadState(unit)
        return CopyState(keys[best.depth - 1])

    @property
    def _point_kind(self) -> Kind | None:
        """The kind of state that makes a page end a resume point; None if every page end is one."""
        for kind in (_RECURRENT, _WINDOW):
            if kind in self.manifest.kinds:
                return kind
        return None

    def _snapshots(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        depth: int,
        forks: Iterable[int],
        device: DeviceView,
    ) -> tuple[int, ...]:
        """Positions of snapshots; `depth` and `forks` are in pages. The deepest page end before the
        prompt's end is always among them: a repeat of the prompt resumes there.

        If a page ends exactly with the prompt, that position is added unless it is cached already.
        """
        page_size = self.manifest.page_size
        pages, rest = divmod(prompt_len, page_size)
        if depth == pages or self._point_kind is None:
            return ()
        ends: tuple[int, ...] = ((pages if rest else pages - 1) * page_size,)
        if not rest and not device.has(self._point_kind, keys[pages - 1]):
            ends = (*ends, prompt_len)
        places = [fork * page_size for fork in forks]
        return self.placement.positions(depth * page_size, places, ends, prompt_len)

    def _declined(self, plan: ResumePlan, host: HostView) -> HostView:
        """A view without host units, because there is no room for the loads of `plan`."""
        end = max(plan.position // self.manifest.page_size, host.shortfall.end_page)
        refused = Shortfall(end, Reason.NO_ROOM)
        return HostView(shortfall=refused, unlike_pages=host.unlike_pages)

    # Counting slots.

    @property
    def _without_retention(self) -> Planner:
        """This planner for a worker that keeps nothing of what it decodes."""
        return replace(self, windows=self.windows._replace(uncertain_len=-1))

    def _budgeted(self, plan: ResumePlan) -> ResumePlan:
        """The plan with the fresh slots it needs; slots reused on the device are not counted."""
        demand, kinds, windows = {}, self.manifest.kinds, NO_WINDOWS
        if _FULL in kinds:
            demand[_FULL] = -(-plan.prompt_len // self.manifest.page_size) - plan.anchor_pages
        if _WINDOW in kinds:
            windows = self._windows(plan)
            demand[_WINDOW] = windows.most
        if _RECURRENT in kinds:
            scratch = min(self.num_drafts, plan.final_len - plan.prompt_len)
            if isinstance(plan.initialiser, ReceiveState):
                scratch = 0
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
        """The slots of the window pool without the pages that the plan reuses."""
        return self.windows.num_slots - len(plan.window_pages)

    def _fits(self, plan: ResumePlan) -> bool:
        return plan.windows.most <= self._window_room(plan)

    def _in_shorter_chunks(self, plan: ResumePlan) -> ResumePlan:
        use, room = self._window_use(plan), self._window_room(plan)
        length = fitting_chunk(self.manifest, use, plan.chunk_len, room)
        return self._budgeted(plan._replace(chunk_len=length))


def _loads_to_receive(
    needs: ResumeSet, host: HostView, num_pages: int, reused: Mapping[Kind, Container[int]]
) -> tuple[HostUnit, ...]:
    """The host's units of a resume set that the device lacks, among the prompt's first `num_pages`
    pages.

    The recurrent state at the prompt's end is not among them: prefill always computes a token, and
    so it always has the state after it.
    """
    spans = {_FULL: needs.full, _WINDOW: needs.window}
    return tuple(
        host.units[kind, page]
        for kind, span in spans.items()
        for page in range(span.first, min(span.end, num_pages))
        if page not in reused[kind] and (kind, page) in host.units
    )
