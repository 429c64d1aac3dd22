"""Calls, checks and arguments where a worker's parts meet: each was once left out by a draw of
planted defects, and no test noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.cache.manifests import small_manifest
from tests.worker.test_reuse import HYBRID, KEY, PAGE, metric, plan_of, unit

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.node import TreeChange
from ferryman.cache.resume import Reason, Uncached
from ferryman.cache.slots import Ledger
from ferryman.cache.units import Tier
from ferryman.errors import LeaseLost
from ferryman.handoff.holder import Hold
from ferryman.handoff.usage import CachedTokens
from ferryman.runtime.metrics import Metrics
from ferryman.schedule.batch import MixedStep, PrefillStep
from ferryman.tiers.prefetch_values import Prefetched, PrefetchOptions, PrefetchPolicy
from ferryman.wire.codec.caches import CacheEvent, cache_event_from_bytes
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.hostcache.attachment import HostCacheOptions
from ferryman.wire.hostcache.copy_pace import StepPace
from ferryman.worker import worker_app
from ferryman.worker.backup import DeviceBackup
from ferryman.worker.cache_metrics import TREE, CacheMetrics
from ferryman.worker.handoff_transport import HandoffTransport
from ferryman.worker.host import HostTierBridge
from ferryman.worker.loop import StepLoop
from ferryman.worker.send_leases import SendLeases
from ferryman.worker.summary import cached_tokens, kept_tokens
from ferryman.worker.telemetry import CacheEvents, Telemetry, WorkerLoad
from ferryman_prefill.server import PrefillServicer

FULL = small_manifest(Kind.FULL, page_size=PAGE)


def test_pages_that_came_with_a_state_count_for_its_tier() -> None:
    plan = plan_of(16, 2, unit(Kind.RECURRENT, 3, Tier.STORAGE))
    assert cached_tokens(HYBRID, plan) == CachedTokens(device=8, storage=8)


@pytest.mark.parametrize(
    ("reason", "position", "kept"),
    [
        (Reason.NO_ROOM, 0, 0),
        (Reason.NO_ROOM, 8, 28),
        (Reason.CACHE_OFF, 0, 0),
        (Reason.QUARANTINED, 0, 0),
        (Reason.NEVER_SEEN, 0, 28),
    ],
)
def test_a_prompt_without_room_or_without_a_cache_keeps_nothing(
    reason: Reason, position: int, kept: int
) -> None:
    lacking = (Uncached(reason, position // PAGE, 8),)
    plan = plan_of(position, 0)._replace(uncached=lacking)
    assert kept_tokens(FULL, plan) == kept


def test_a_step_of_prompts_is_told_with_its_tokens_and_its_seconds() -> None:
    told: list[tuple[int, float]] = []
    pace = SimpleNamespace(
        prefilled=lambda *step: told.append(step), loaded=lambda loads: None, costs=lambda: None
    )
    loop = SimpleNamespace(pace=pace, _scheduler=SimpleNamespace(set_costs=lambda costs: None))
    step = PrefillStep.__new__(PrefillStep)
    chunks = (SimpleNamespace(start=4, end=9), SimpleNamespace(start=0, end=2))
    object.__setattr__(step, "chunks", chunks)
    outcome = SimpleNamespace(forward_seconds=0.25, loaded=())
    StepLoop._note_pace(cast(Any, loop), step, cast(Any, outcome))
    assert told == [(7, 0.25)]


@pytest.mark.parametrize(("seconds", "of_prompts"), [(0.25, 0.15), (0.05, 0.0)])
def test_of_a_mixed_step_prompts_are_told_what_it_takes_beyond_a_decode_step(
    seconds: float, of_prompts: float
) -> None:
    told: list[tuple[int, float]] = []
    pace = SimpleNamespace(
        prefilled=lambda *step: told.append(step),
        loaded=lambda loads: None,
        costs=lambda: None,
        step_seconds=0.1,
    )
    loop = SimpleNamespace(pace=pace, _scheduler=SimpleNamespace(set_costs=lambda costs: None))
    step = MixedStep.__new__(MixedStep)
    prompts = SimpleNamespace(chunks=(SimpleNamespace(start=4, end=9),))
    object.__setattr__(step, "prompts", prompts)
    outcome = SimpleNamespace(forward_seconds=seconds, loaded=())
    StepLoop._note_pace(cast(Any, loop), step, cast(Any, outcome))
    ((num_tokens, told_seconds),) = told
    assert num_tokens == 5
    assert told_seconds == pytest.approx(of_prompts)


async def test_a_send_is_held_to_its_end_and_no_slot_without_a_hold() -> None:
    leases = SendLeases(cast(Any, None), lambda: 0.0)
    with pytest.raises(LeaseLost, match="no longer held"):
        leases.lease("res-1", cast(Any, None))
    leases.begin(Hold("r1", 1, "res-1", 7, 60.0))
    sent = asyncio.get_running_loop().create_future()

    async def sending() -> Any:
        return await sent

    waiting = asyncio.create_task(leases.send("res-1", sending()))
    await asyncio.sleep(0)
    assert len(leases._held["res-1"].sends) == 1
    sent.set_result("sent")
    answer: Any = await waiting
    assert answer == "sent"
    assert not leases._held["res-1"].sends


@pytest.mark.parametrize(
    ("apart", "is_apart"), [((), False), (("d2",), False), (("d1",), True), (("d2", "d3"), True)]
)
def test_one_worker_out_of_reach_says_nothing_of_others_and_two_do(
    apart: tuple[str, ...], is_apart: bool
) -> None:
    transport = SimpleNamespace(_clock=lambda: 5.0, _apart=dict.fromkeys((*apart, "was"), 9.0))
    transport._apart["was"] = 5.0  # over
    assert HandoffTransport._is_apart(cast(Any, transport), "d1") == is_apart


def test_an_attempt_that_is_told_to_stop_refuses_its_reservation() -> None:
    refused: list[str] = []
    attempt = SimpleNamespace(refuse=refused.append)
    servicer = cast(Any, SimpleNamespace(_attempts={"r1.2": attempt}))
    for number in (1, 2):
        order = SimpleNamespace(request_id="r1", attempt=number, reservation_id=f"res-{number}")
        PrefillServicer._refuse(servicer, cast(Any, order))
    assert refused == ["res-2"]


class Shell:
    """Settings, membership and engine of a worker, each value another one than its neighbours."""

    settings = SimpleNamespace(
        hostcache=SimpleNamespace(
            address="host:1",
            prefetch_policy="best_effort",
            prefetch_threshold=77,
            write_policy="write_back",
            call_seconds=0.7,
        ),
        planes="grpc",
        listen=SimpleNamespace(host="0.0.0.0"),
        advertise="me",
        nixl="nixl",
        arena_folder="folder",
    )
    engine = SimpleNamespace(manifest=HYBRID, places="places")
    member = SimpleNamespace(
        role="prefill", worker_id="prefill-1", epoch=7, lifecycle=lambda: "lifecycle"
    )
    access = SimpleNamespace(token="token", security="security")


async def test_a_host_cache_is_told_who_asks_with_its_token_and_its_certificates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[HostCacheOptions, Any]] = []

    @asynccontextmanager
    async def client(options: HostCacheOptions, *more: Any) -> AsyncIterator[Any]:
        told.append((options, more[0]))
        yield SimpleNamespace(statistics=None)

    @asynccontextmanager
    async def tier(*parts: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(backup=SimpleNamespace(statistics=None), parts=parts)

    monkeypatch.setattr(worker_app, "host_cache_client", client)
    monkeypatch.setattr(worker_app, "host_tier_of", tier)
    metrics = cast(Any, SimpleNamespace(watch=lambda name, statistics: None))
    shell = cast(Any, Shell)
    asked = (shell.settings, shell.engine, shell.member, asyncio.Event(), metrics, shell.access)
    async with worker_app._host_tier(*asked):
        options, manifest = cast(Any, told[0])
    assert (options.address, options.worker_id, options.worker_epoch) == ("host:1", "prefill-1", 7)
    assert (options.token, options.security, options.call_seconds) == ("token", "security", 0.7)
    assert options.prefetch == PrefetchOptions(PrefetchPolicy.BEST_EFFORT, 77)
    assert manifest is HYBRID


async def test_a_worker_s_parts_are_those_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[tuple[Any, ...]] = []

    def side(*args: Any) -> str:
        sides.append(args)
        return "side"

    monkeypatch.setattr(worker_app, "plane_side", side)
    monkeypatch.setattr(worker_app, "_host_tier", lambda *args: nullcontext("host"))
    monkeypatch.setattr(worker_app, "Channels", lambda access: nullcontext(f"by {access.token}"))
    shell, watch = cast(Any, Shell), cast(Any, "watch")
    loaded = worker_app.LoadedEngine(shell.engine, "8 asked, 3 run")
    async with AsyncExitStack() as stack:
        parts: Any = await worker_app._parts(
            stack, shell.settings, loaded, shell.member, watch, shell.access
        )
    assert (parts.engine, parts.limit) == (shell.engine, "8 asked, 3 run")
    assert (parts.role, parts.worker_id, parts.epoch) == ("prefill", "prefill-1", 7)
    assert (parts.host, parts.channels, parts.numeric_watch) == ("host", "by token", "watch")
    assert (parts.planes, parts.access) == ("side", shell.access)
    ((choice, places, hosts, nixl, _, folder),) = sides
    assert (choice, places, hosts) == ("grpc", "places", ("0.0.0.0", "me"))
    assert (nixl, folder) == ("nixl", "folder")


def test_an_event_of_the_cache_says_what_came_and_what_left() -> None:
    published: list[CacheEvent] = []
    bus = SimpleNamespace(
        publish=lambda subject, raw: published.append(cache_event_from_bytes(raw))
    )
    subjects = SimpleNamespace(cache=lambda worker_id, epoch: f"cache.{worker_id}.{epoch}")
    member = SimpleNamespace(worker_id="prefill-1", epoch=7, subjects=subjects, bus=bus)
    events = CacheEvents(cast(Any, member))
    here, gone = PageKey(b"h" * 16), PageKey(b"g" * 16)
    events.publish([])
    for _ in range(2):
        events.publish(
            [TreeChange(Kind.FULL, (here, gone), True), TreeChange(Kind.FULL, (gone,), False)]
        )
    assert [event.sequence for event in published] == [1, 2]
    assert {kind: tuple(keys) for kind, keys in published[0].stored.items()} == {Kind.FULL: (here,)}
    assert {kind: tuple(keys) for kind, keys in published[0].removed.items()} == {
        Kind.FULL: (gone,)
    }


@pytest.mark.parametrize(
    ("before", "asked", "brought", "outcome"),
    [(3, 8, 8, "brought"), (3, 8, 3, "missed"), (3, 3, 3, "nothing")],
)
def test_a_prefetch_counts_by_what_it_brought(
    before: int, asked: int, brought: int, outcome: str
) -> None:
    metrics = Metrics("prefill")
    pages = Prefetched(before_pages=before, asked_pages=asked, brought_pages=brought)
    CacheMetrics(HYBRID, metrics).prefetched(pages)
    assert metric(metrics, f'prefetches_total{{outcome="{outcome}"}}') == 1


async def test_a_beat_says_each_number_under_its_own_name() -> None:
    limits = SimpleNamespace(concurrency=SimpleNamespace(max_running=2, rows=3))
    drafts = SimpleNamespace(steps=4, drafted=5, accepted=6)
    free = {Kind.FULL: 7, Kind.RECURRENT: 8}
    ledgers = {
        kind: Ledger(total=10 * n, free=n, leased=9 * n, by_role={"request": n, TREE: 8 * n})
        for kind, n in free.items()
    }
    scheduler = SimpleNamespace(
        limits=limits,
        ledgers=lambda: ledgers,
        statistics=lambda: SimpleNamespace(drafts=drafts),
        is_quarantined=False,
    )
    stream = SimpleNamespace(steps_done=9)
    engine = SimpleNamespace(scheduler=scheduler, stream=stream, manifest=HYBRID, max_len=10)
    pace = SimpleNamespace(seconds_per_token=0.11, step_seconds=0.12, load_seconds_per_byte=0.13)
    load = WorkerLoad(True, num_running=1, num_queued=14, queue_tokens=15, node="node")
    telling = SimpleNamespace(
        _progress=SimpleNamespace(is_stuck=lambda engine, now: False),
        _engine=engine,
        _load=lambda: load,
        _member=SimpleNamespace(role="decode", worker_id="decode-1", epoch=16),
        _address="host:17",
        _pace=pace,
        _start_seconds=18.0,
        _limit="8 asked, 3 run",
    )
    beat = Telemetry.beat(cast(Any, telling))
    assert beat is not None
    assert (beat.limit, beat.cache_usage) == ("8 asked, 3 run", 0.1)
    full, state = (HYBRID.layout(kind).slot_bytes for kind in (Kind.FULL, Kind.RECURRENT))
    assert (beat.role, beat.worker_id, beat.epoch, beat.address) == (
        "decode", "decode-1", 16, "host:17"
    )  # fmt: skip
    assert (beat.num_running, beat.max_running, beat.max_requests) == (1, 2, 3)
    assert (beat.draft_steps, beat.drafted_tokens, beat.accepted_tokens) == (4, 5, 6)
    assert dict(beat.free_slots) == free
    assert dict(beat.pool_slots) == {Kind.FULL: 70, Kind.RECURRENT: 80}
    assert (beat.num_steps, beat.max_len, beat.num_queued, beat.queue_tokens) == (9, 10, 14, 15)
    assert (beat.seconds_per_token, beat.step_seconds) == (0.11, 0.12)
    assert (beat.load_seconds_per_byte, beat.start_seconds, beat.node) == (0.13, 18.0, "node")
    assert (beat.page_bytes, beat.snapshot_bytes) == (full, state)


async def test_what_could_not_be_copied_is_offered_again_and_its_slots_go_back() -> None:
    done: list[Any] = []

    async def store(*_: object, **__: object) -> int:
        raise asyncio.CancelledError

    scheduler = SimpleNamespace(
        lease=lambda slots, holder: done.append(("lease", slots)),
        release=lambda slots, holder: done.append(("release", slots)),
    )
    backup = SimpleNamespace(
        _scheduler=scheduler,
        _client=SimpleNamespace(store=store),
        _failed=lambda names: done.append(("failed", names)),
        _store_unit=lambda *_: None,
        _dropped=(),
        _pace=StepPace(),
        freed=lambda: None,
    )
    held = SimpleNamespace(
        kind=Kind.FULL, page_index=0, key=PageKey(b"k" * 16), handle=SimpleNamespace(slot=3)
    )
    tags = CallTags("r1", 1)
    with pytest.raises(asyncio.CancelledError):
        await DeviceBackup._copied(cast(Any, backup), [held.key], cast(Any, [held]), tags)
    slots = [held.handle]
    failed = ("failed", [(Kind.FULL, held.key)])
    assert done == [("lease", slots), failed, ("release", slots)]


async def test_a_backup_writes_when_there_is_work_and_waits_otherwise() -> None:
    written = 0

    async def write_waiting() -> None:
        nonlocal written
        written += 1
        await asyncio.sleep(0)

    backup = SimpleNamespace(write_waiting=write_waiting, _work=asyncio.Event())
    running = asyncio.create_task(DeviceBackup.run(cast(Any, backup)))
    for number in (1, 2, 3):
        for _ in range(9):
            await asyncio.sleep(0)
        assert written == number
        DeviceBackup.host_usable(cast(Any, backup))
    running.cancel()


@pytest.mark.parametrize(("kinds", "full"), [((Kind.FULL, Kind.RECURRENT), 2), ((), 0)])
def test_a_plan_reuses_its_pages_windows_and_the_state_that_it_copies(
    kinds: tuple[Kind, ...], full: int
) -> None:
    keys = [PageKey(bytes([number]) * 16) for number in range(4)]
    plan = plan_of(8, 2)._replace(window_pages=(1,))
    tier = SimpleNamespace(_manifest=SimpleNamespace(kinds=kinds))
    reused = list(HostTierBridge._reused(cast(Any, tier), keys, plan))
    expected = [(Kind.FULL, key) for key in keys[:full]]
    assert reused == [*expected, (Kind.WINDOW, keys[1]), (Kind.RECURRENT, KEY)]


def test_who_offloads_what_is_retracted_has_it_pinned() -> None:
    pinned: list[bool] = []
    retraction = SimpleNamespace(pin_retracted=lambda: pinned.append(True))
    tier = SimpleNamespace(_scheduler=SimpleNamespace(retraction=retraction))
    HostTierBridge.pin_retracted(cast(Any, tier))
    assert pinned == [True]
