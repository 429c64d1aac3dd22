"""`python -m tools.bench core`: the cost of the pure core and the slot operations on this machine.

plan      matching a prompt's keys against a trie of 10,000 nodes and planning how to resume
insert    a prompt of which the trie has one half; the oldest pages are evicted between two runs
keys      the page keys of a prompt
step      plan + commit + events of one decode step, requests at random places in their pages
slots     copying and clearing whole recurrent slots, against memcpy of the same bytes
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from ferryman.cache.capacity import Concurrency
from ferryman.cache.keys import PageKey, as_token_ids, page_keys, root_key
from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.cache.node import Branch, Inserted
from ferryman.cache.planner import Planner
from ferryman.cache.resume import EMPTY_HOST, ResumeCosts, ResumePlan
from ferryman.cache.slots import SlotHandle
from ferryman.cache.tree import PrefixTree
from ferryman.schedule.batch import Sampled, StepOutcome, StepPlan
from ferryman.schedule.limits import SchedulerLimits
from ferryman.schedule.request import Request, SamplingParams
from ferryman.schedule.scheduler import Scheduler
from ferryman.schedule.sequence import Goal
from ferryman_bench.report import ReportRow, comparison_row, show, target_row
from ferryman_bench.timer import Timing, seconds_of, time_in_turn
from ferryman_kernels.slots import clear_slots, copy_slots

PAGE_SIZE = 64
TRIE_NODES = 10_000
STORY_PAGES = 64
PLAN_AIMS = {8_192: 5.0, 65_536: 10.0}
INSERT_AIMS = {8_192: 40.0}
KEY_AIMS = {8_192: 80.0}
STEP_AIMS = {32: 150.0, 256: 1_000.0}
STEPS = 400
SLOTS_MOVED = 4
COSTS = ResumeCosts(prefill_seconds_per_token=1e-4, load_seconds_per_byte=1e-10)


def run_bench_core(*, as_json: bool) -> int:
    rows = [*plan_rows(), *insert_rows(), *key_rows(), *step_rows(), *slot_rows()]
    show("bench core", rows, as_json=as_json)
    return 0


def granite_manifest() -> StateManifest:
    """The state of the shape that the benches measure, with float32 recurrent states."""
    pages = [
        SectionSpec(name, layer, (4, PAGE_SIZE, 64), "bfloat16", 0)
        for layer in range(3, 16, 4)
        for name in ("key", "value")
    ]
    states = [
        spec
        for layer in range(16)
        if layer % 4 != 3
        for spec in (
            SectionSpec("conv", layer, (1792, 3), "bfloat16", 0),
            SectionSpec("ssm", layer, (48, 32, 128), "float32", 0),
        )
    ]
    layouts = (lay_out(Kind.FULL, pages), lay_out(Kind.RECURRENT, states))
    return StateManifest("bench", PAGE_SIZE, PAGE_SIZE, 0, layouts)


# Planning.


def plan_rows() -> Iterator[ReportRow]:
    manifest = granite_manifest()
    planner = Planner(manifest, COSTS, 512)
    jobs: dict[str, Callable[[], ResumePlan]] = {}
    aims: dict[str, float] = {}
    for prompt_len, aim in PLAN_AIMS.items():
        keys = _keys_of(prompt_len, story=0)
        tree = _grown_tree(manifest, keys)
        matches = {"all cached": keys, "half cached": _half_new(keys, prompt_len)}
        for what, asked in matches.items():
            name = f"plan {prompt_len:,} tokens, {what}"
            jobs[name] = partial(planner.plan, asked, prompt_len + 1, tree, EMPTY_HOST)
            aims[name] = aim
            assert jobs[name]().position >= prompt_len // 2, "the trie holds what is asked for"
    # Bisection makes them alike. One after the other, the first had a core that had just woken.
    for name, found in time_in_turn(jobs, 2_000).items():
        yield target_row(name, "µs", _micro(found), aims[name])


def _keys_of(prompt_len: int, story: int) -> tuple[PageKey, ...]:
    tokens = np.random.default_rng(story).integers(0, 2**16, prompt_len)
    return page_keys(root_key(granite_manifest()), as_token_ids(tokens), PAGE_SIZE)


def _half_new(keys: tuple[PageKey, ...], prompt_len: int) -> tuple[PageKey, ...]:
    half = len(keys) // 2
    return keys[:half] + _keys_of(prompt_len, story=1)[half:]


def _grown_tree(manifest: StateManifest, keys: tuple[PageKey, ...]) -> PrefixTree:
    """A tree of TRIE_NODES pages with `keys`; a snapshot in the middle and at the end of each
    path."""
    tree = PrefixTree(manifest.kinds)
    _insert(tree, keys)
    story = 2
    while len(tree) < TRIE_NODES:
        _insert(tree, _keys_of(STORY_PAGES * PAGE_SIZE, story))
        story += 1
    return tree


def _insert(tree: PrefixTree, keys: tuple[PageKey, ...]) -> None:
    first, ends = len(tree), (len(keys) // 2 - 1, len(keys) - 1)
    full = {page: SlotHandle(Kind.FULL, first + page, 1) for page in range(len(keys))}
    recurrent = {page: SlotHandle(Kind.RECURRENT, first + page, 1) for page in ends}
    tree.insert(Branch(keys, {Kind.FULL: full, Kind.RECURRENT: recurrent}), 0.0)


# Growing.


def insert_rows() -> Iterator[ReportRow]:
    for prompt_len, aim in INSERT_AIMS.items():
        yield target_row(
            f"insert {prompt_len:,} tokens, half new", "µs", _micro(insert_timing(prompt_len)), aim
        )


def insert_timing(prompt_len: int, repeats: int = 200) -> Timing:
    """Inserts another prompt each time; as many of the oldest pages are evicted in between."""
    keys = _keys_of(prompt_len, story=0)
    half = len(keys) // 2
    tree = _grown_tree(granite_manifest(), keys)
    ends = [_keys_of(prompt_len, story=10_000 + index)[half:] for index in range(repeats + 1)]
    branches = iter([_new_half(keys[:half] + end) for end in ends])
    inserted: list[Inserted] = []

    def insert() -> None:
        inserted.append(tree.insert(next(branches), float(len(inserted))))

    def make_room() -> None:
        assert len(inserted[-1].adopted) == len(keys) - half + 1, "half of it and a snapshot is new"
        tree.evict(Kind.FULL, len(tree) - TRIE_NODES, lambda handle: True)
        tree.drain_changes()

    return time_in_turn({"insert": insert, "make room": make_room}, repeats)["insert"]


def _new_half(keys: tuple[PageKey, ...]) -> Branch:
    half = len(keys) // 2
    full = {page: SlotHandle(Kind.FULL, TRIE_NODES + page, 1) for page in range(half, len(keys))}
    end = {len(keys) - 1: SlotHandle(Kind.RECURRENT, TRIE_NODES, 1)}
    return Branch(keys, {Kind.FULL: full, Kind.RECURRENT: end})


# Keys.


def key_rows() -> Iterator[ReportRow]:
    for prompt_len in PLAN_AIMS:
        tokens = as_token_ids(np.arange(prompt_len))
        name_pages = partial(page_keys, root_key(granite_manifest()), tokens, PAGE_SIZE)
        found = _micro(seconds_of(name_pages, 50))
        yield target_row(f"keys of {prompt_len:,} tokens", "µs", found, KEY_AIMS.get(prompt_len))


# A scheduler's step.


def step_rows() -> Iterator[ReportRow]:
    for running, aim in STEP_AIMS.items():
        yield target_row(f"step of {running} requests", "µs", _micro(step_timing(running)), aim)


def step_timing(running: int) -> Timing:
    """Times decode steps of `running` requests; in each step some reach the end of a page."""
    scheduler = decoding_scheduler(running)

    def step() -> None:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.commit(plan, outcome_of(plan), 0.0)
        scheduler.take_events()

    return seconds_of(step, STEPS)


def decoding_scheduler(running: int) -> Scheduler:
    """A scheduler whose requests have all finished their prompts."""
    manifest, pages = granite_manifest(), 4 + STEPS // PAGE_SIZE
    concurrency = Concurrency(running, 0, 1)
    limits = SchedulerLimits(concurrency, 8_192, PAGE_SIZE * pages, running, 1, prefix_cache=True)
    sizes = {Kind.FULL: 2 * running * pages, Kind.RECURRENT: 4 * running}
    scheduler = Scheduler(manifest, sizes, limits, COSTS, root_key(manifest))
    for index in range(running):
        tokens = as_token_ids(np.full(PAGE_SIZE + index % PAGE_SIZE, index))
        keys = page_keys(root_key(manifest), tokens, PAGE_SIZE)
        sampling = SamplingParams(max_tokens=STEPS + 2)
        request = Request(f"request-{index}", tokens, keys, sampling)
        scheduler.check(request)
        scheduler.submit(request, Goal.DECODE)
    while scheduler.statistics().decoding < running:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.commit(plan, outcome_of(plan), 0.0)
    scheduler.take_events()
    return scheduler


def outcome_of(plan: StepPlan) -> StepOutcome:
    """The outcome of a step as a device would return it."""
    return StepOutcome(plan.step_id, tuple([Sampled(7, {})] * len(plan.draws)))


# Slots.


def slot_rows() -> Iterator[ReportRow]:
    slot_bytes = granite_manifest().layout(Kind.RECURRENT).slot_bytes
    slab = torch.randint(0, 256, (2 * SLOTS_MOVED, slot_bytes), dtype=torch.uint8)
    src, dst = torch.arange(SLOTS_MOVED), torch.arange(SLOTS_MOVED, 2 * SLOTS_MOVED)
    num_bytes = SLOTS_MOVED * slot_bytes
    jobs = {
        "copy": lambda: copy_slots(slab, src, dst),
        "clear": lambda: clear_slots(slab, dst),
        "memcpy": lambda: ctypes.memmove(slab.data_ptr() + num_bytes, slab.data_ptr(), num_bytes),
        "memset": lambda: ctypes.memset(slab.data_ptr() + num_bytes, 0, num_bytes),
    }
    found = time_in_turn(jobs, 30)
    size = f"{SLOTS_MOVED} slots of {slot_bytes / 1e6:.1f} MB"
    for name, peer in (("copy", "memcpy"), ("clear", "memset")):
        pair = {"ours": found[name], peer: found[peer]}
        yield comparison_row(f"{name} {size}", "GB/s", num_bytes / 1e9, peer, pair)


def _micro(timing: Timing) -> tuple[float, float]:
    return timing.median * 1e6, timing.least * 1e6
