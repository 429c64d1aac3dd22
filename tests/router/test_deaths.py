"""The death of a worker is one event, however it is heard of; a broken connection is no death.

The retry budget of these clusters is the smallest there is: what is charged to it would show.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tests.client.fake_router import Wire
from tests.harness.router import (
    QUICK,
    SENTENCE,
    Die,
    FakeDecode,
    FakePrefill,
    FakeRouterWorker,
    FaultStage,
    Pause,
    Refuse,
    RouterCluster,
    cluster,
    frames,
    living,
    no_slots,
)
from tests.waiting import until

from ferryman.errors import DeadlineExceeded
from ferryman.handoff.request import RequestState
from ferryman.ids import make_epoch
from ferryman.settings.router import LimitSettings
from ferryman_router import components
from ferryman_router.request.context import Probation
from ferryman_router.routing.fleet import WorkerName

LONG = SENTENCE * 2
NUM_STREAMS = 12
# One retry at a time; a queue that is full with two; and nobody waits for the clock.
MEAN = QUICK.model_copy(
    update={
        "retry_floor": 1,
        "retry_share": 1e-6,
        "max_queued": NUM_STREAMS,
        "no_worker_seconds": 60.0,
        "stream_patience_seconds": 2.0,
    }
)

# Nobody dies here, so a worker may take its time to answer.
DEATHLESS = MEAN.model_copy(update={"stream_patience_seconds": 30.0})


@asynccontextmanager
async def mean_cluster(
    nats_url: str, folder: Path, num_each: int, limits: LimitSettings = MEAN
) -> AsyncIterator[RouterCluster]:
    """Its prefill workers say that they are quick, so that none of the streams waits."""
    async with cluster(
        nats_url, folder, num_prefills=num_each, num_decodes=num_each, limits=limits
    ) as made:
        for prefill in made.prefills:
            prefill.seconds_per_token = 1e-6
        quick = {one.worker_id for one in made.prefills}
        await until(
            lambda: (
                quick <= {one.beat.worker_id for one in made.fleet if one.beat.seconds_per_token}
            )
        )
        yield made


@pytest.fixture
async def four(nats_url: str, folder: Path) -> AsyncIterator[RouterCluster]:
    async with mean_cluster(nats_url, folder, 2) as made:
        yield made


async def begun(made: RouterCluster, num_attempts: int) -> None:
    """So many attempts have come as far as prefill's gate, and the router knows it."""
    (gate,), requests = made.prefills[0].faults, made.router.components.frontend.requests
    await gate.reached(num_attempts)
    await until(lambda: all(one.history.state is RequestState.PREFILLING for one in requests))


def num_chunks(made: RouterCluster) -> int:
    """The chunks that the readers of all requests under way have."""
    return sum(len(one.output_log.chunks) for one in made.router.components.frontend.requests)


def counted(made: RouterCluster, name: str, **labels: str) -> float:
    """A counter of the router's, as `/metrics` shows it; without labels, over all of them."""
    shown = made.router.components.frontend.ctx.metrics.render().decode()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    lines = [line for line in shown.splitlines() if line.startswith(f"ferryman_router_{name}")]
    found = [line for line in lines if all(each in line for each in wanted)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def begin(made: RouterCluster, max_tokens: int = 6) -> list[asyncio.Task[str]]:
    """Requests that differ, all at once; what each of them answers."""

    async def one(number: int) -> str:
        response = await made.complete(f"{LONG}{'the ' * number}", max_tokens=max_tokens)
        assert response.status_code == 200, response.text
        answer: str = response.json()["choices"][0]["text"]
        return answer

    return [asyncio.create_task(one(number)) for number in range(NUM_STREAMS)]


async def assert_whole(
    made: RouterCluster, answers: list[asyncio.Task[str]], num_tokens: int = 6
) -> None:
    async with asyncio.timeout(120):
        assert await asyncio.gather(*answers) == [made.expected(num_tokens)] * NUM_STREAMS


async def test_all_streams_of_a_dead_decode_worker_go_on_elsewhere(four: RouterCluster) -> None:
    gate = Pause(FaultStage.NEXT_TOKEN)
    for decode in four.decodes:
        decode.suffers(gate)
    answers = begin(four)
    await until(lambda: sum(len(one.running) for one in four.decodes) == NUM_STREAMS)
    victim = max(four.decodes, key=lambda one: len(one.running))
    num_lost = len(victim.running)
    assert num_lost > MEAN.retry_floor
    victim.die()
    gate.release()
    await assert_whole(four, answers)
    assert counted(four, "retries_total", cause="worker_lost") == num_lost
    assert counted(four, "lost_workers_total") == 1, "one death is one event"


async def test_prompts_of_a_dead_prefill_worker_are_computed_elsewhere(four: RouterCluster) -> None:
    gate = Pause(FaultStage.COMMIT)
    for prefill in four.prefills:
        prefill.suffers(gate)
    answers = begin(four)
    await gate.reached(NUM_STREAMS)
    victim = max(four.prefills, key=lambda one: gate.happened_at[one.worker_id])
    assert gate.happened_at[victim.worker_id] > MEAN.retry_floor
    victim.die()
    gate.release()
    await assert_whole(four, answers)
    assert counted(four, "lost_workers_total") == 1


async def test_hand_offs_to_a_dead_decode_worker_are_not_charged_to_prefill(
    four: RouterCluster,
) -> None:
    """Prefill hears first that decode is gone, and says so for each of its prompts."""
    gate = Pause(FaultStage.COMMIT)
    for prefill in four.prefills:
        prefill.suffers(gate)
    answers = begin(four)
    await gate.reached(NUM_STREAMS)
    victim = max(four.decodes, key=lambda one: len(one.reserved))
    assert len(victim.reserved) > MEAN.retry_floor
    victim.die()
    gate.release()
    await assert_whole(four, answers)
    assert counted(four, "lost_workers_total") == 1


async def test_slots_promised_at_three_dead_decode_workers_make_no_suspect(
    nats_url: str, folder: Path
) -> None:
    """Prefill was at work on the request, and decode was not yet."""
    async with mean_cluster(nats_url, folder, 1) as made, AsyncExitStack() as stack:
        gate = made.prefills[0].suffers(Pause(FaultStage.COMMIT))
        asking = asyncio.create_task(made.complete(LONG, max_tokens=4))
        decode = made.decodes[0]
        for nth in (1, 2, 3):
            await begun(made, nth)
            decode.die()
            decode = FakeDecode(made.script)
            await stack.enter_async_context(living(decode, made.bus, made.subjects))
        await begun(made, 4)
        gate.release()
        assert (await asking).json()["choices"][0]["text"] == made.expected(4)
        assert counted(made, "lost_workers_total") == 3


async def test_a_request_that_kills_its_workers_takes_no_other_along_twice(
    nats_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All streams run where the first worker dies, at the same place. The killer is the first to be
    tried again, and no other is sent before it has ended."""
    monkeypatch.setattr(components, "Probation", lambda: Probation(turn_seconds=1e6))
    async with mean_cluster(nats_url, folder, 1) as made, AsyncExitStack() as stack:
        requests = made.router.components.frontend.requests
        (prefill,), (first,) = made.prefills, made.decodes
        killer_tokens, gate = 7, first.suffers(Pause(FaultStage.NEXT_TOKEN))
        death = first.suffers(Die(FaultStage.TOKEN, offset=1, max_tokens=killer_tokens))
        killer = asyncio.create_task(made.complete(LONG, max_tokens=killer_tokens))
        await until(lambda: len(first.running) == 1)
        answers = begin(made)
        await until(lambda: len(first.running) == 1 + NUM_STREAMS)
        await until(lambda: num_chunks(made) == 1 + NUM_STREAMS)
        again = prefill.suffers(Pause(FaultStage.COMMIT))
        second, third = FakeDecode(made.script), FakeDecode(made.script)
        next_death = second.suffers(Die(FaultStage.TOKEN, offset=1, max_tokens=killer_tokens))
        await stack.enter_async_context(living(second, made.bus, made.subjects))
        gate.release()
        await again.reached(1)
        *others, tried = sorted(len(runner.attempts) for runner in requests)
        assert others == [1] * NUM_STREAMS
        assert tried > 1
        assert next_death.happened == 0
        again.release()
        async with asyncio.timeout(60):
            response = await killer
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "suspect"
        assert death.happened == next_death.happened == 1
        await stack.enter_async_context(living(third, made.bus, made.subjects))
        await assert_whole(made, answers)


async def test_a_suspect_that_is_turned_away_has_another_turn(
    nats_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(components, "Probation", lambda: Probation(turn_seconds=1e6))
    async with mean_cluster(nats_url, folder, 1) as made, AsyncExitStack() as stack:
        made.decodes[0].suffers(Die(FaultStage.TOKEN, offset=2))
        second = FakeDecode(made.script)
        refusal = second.suffers(no_slots())
        asking = asyncio.create_task(made.complete(LONG, max_tokens=4))
        await until(lambda: made.decodes[0].dead.is_set())
        await stack.enter_async_context(living(second, made.bus, made.subjects))
        async with asyncio.timeout(60):
            assert (await asking).json()["choices"][0]["text"] == made.expected(4)
        assert refusal.happened == 1


async def test_a_worker_that_comes_back_has_not_died(nats_url: str, folder: Path) -> None:
    """It is lost for its silence, again and again at one place, and beats on in the same life."""
    async with mean_cluster(nats_url, folder, 1) as made:
        (prefill,) = made.prefills
        gate = prefill.suffers(Pause(FaultStage.COMMIT))
        asking = asyncio.create_task(made.complete(LONG, max_tokens=4))
        for nth in range(1, 7):
            await begun(made, nth)
            name = WorkerName(prefill.worker_id, prefill.epoch)
            made.router.components.listener.apply(made.fleet.lose(name, "silent"))
        await begun(made, 7)
        gate.release()
        assert (await asking).json()["choices"][0]["text"] == made.expected(4)
        assert counted(made, "lost_workers_total", cause="silent") == 6


async def test_a_full_queue_takes_back_what_a_dead_worker_had(nats_url: str, folder: Path) -> None:
    limits = MEAN.model_copy(update={"max_queued": 2})
    async with mean_cluster(nats_url, folder, 1, limits) as made:
        (victim,) = made.decodes
        victim.suffers(Pause(FaultStage.NEXT_TOKEN))
        answers = begin(made)
        await until(lambda: len(victim.running) == NUM_STREAMS)
        victim.is_ready = False  # it goes on with what it has, and gets nothing new
        await until(
            lambda: all(one.beat.is_ready == (one.beat.role == "prefill") for one in made.fleet)
        )
        newer = [asyncio.create_task(made.complete(max_tokens=1)) for _ in range(2)]
        await made.until_queued(2)
        refused = await made.complete(max_tokens=1)
        assert refused.status_code == 429, "the queue is full"
        victim.die()
        await made.until_queued(3)  # the first that it had; the others wait for their turns
        late = FakeDecode(made.script)
        async with living(late, made.bus, made.subjects):
            await assert_whole(made, answers)
            assert [(await one).status_code for one in newer] == [200, 200]


class DeathWay:
    """The way to a worker: a port in front of it that can be closed and opened again."""

    def __init__(self, worker: FakeRouterWorker) -> None:
        self._worker, self._direct = worker, worker.address
        self._wire = Wire(int(worker.address.rpartition(":")[2]))
        self._port = 0

    async def open(self) -> None:
        self._relay = await asyncio.start_server(self._wire.relay, "127.0.0.1", self._port)
        self._port = self._relay.sockets[0].getsockname()[1]
        self._worker.address = f"127.0.0.1:{self._port}"

    def cut(self) -> None:
        """All connections end; new ones are taken."""
        self._wire.cut()

    async def close(self) -> None:
        """All connections end, and nobody listens any more."""
        self._relay.close()
        self._wire.cut()
        await self._relay.wait_closed()

    async def end(self) -> None:
        self._worker.address = self._direct
        self._relay.close()
        await self._wire.close()


@asynccontextmanager
async def way_to(made: RouterCluster, worker: FakeRouterWorker) -> AsyncIterator[DeathWay]:
    """A new life of the worker, which the router meets behind it."""
    way = DeathWay(worker)
    await way.open()
    worker.epoch = make_epoch()
    await until(lambda: any(one.beat.epoch == worker.epoch for one in made.fleet))
    yield way
    await way.end()


async def test_connections_that_break_are_no_death(nats_url: str, folder: Path) -> None:
    """As when the router stood still: all calls break at once, and everybody lives."""
    async with mean_cluster(nats_url, folder, 1, DEATHLESS) as made:
        (prefill,) = made.prefills
        gate = prefill.suffers(Pause(FaultStage.COMMIT))
        async with way_to(made, prefill) as way:
            answers = begin(made)
            for nth in (1, 2):  # two deaths would be too many
                await begun(made, nth * NUM_STREAMS)
                way.cut()
            await begun(made, 3 * NUM_STREAMS)
            gate.release()
            await assert_whole(made, answers)
        assert counted(made, "lost_workers_total", cause="unreachable") == 0
        assert counted(made, "retries_total", cause="cut_off") == 2 * NUM_STREAMS


async def test_a_request_that_is_cut_off_three_times_fails(nats_url: str, folder: Path) -> None:
    async with mean_cluster(nats_url, folder, 1, DEATHLESS) as made:
        (prefill,) = made.prefills
        prefill.suffers(Pause(FaultStage.COMMIT))
        async with way_to(made, prefill) as way:
            asking = asyncio.create_task(made.complete(LONG, max_tokens=4))
            for nth in (1, 2, 3):
                await begun(made, nth)
                way.cut()
            response = await asking
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "retries_exhausted"


async def test_another_life_at_a_known_address_is_a_death(four: RouterCluster) -> None:
    """The router has not heard a beat of the new life yet when its orders are refused."""
    for prefill in four.prefills:
        prefill.is_silent, prefill.epoch = True, make_epoch()
    answers = begin(four)
    await until(lambda: counted(four, "lost_workers_total", cause="restarted") == 2)
    refused = sum(one.num_wrong_epochs for one in four.prefills)
    assert refused > MEAN.retry_floor
    for prefill in four.prefills:
        prefill.is_silent = False
    await assert_whole(four, answers)


async def test_a_worker_that_beats_out_of_reach_is_not_believed(
    nats_url: str, folder: Path
) -> None:
    """It would be sent requests, and lose them, once a second; until no patience is left."""
    limits = MEAN.model_copy(update={"no_worker_seconds": 1.0})
    async with mean_cluster(nats_url, folder, 1, limits) as made:
        (decode,) = made.decodes
        gate = decode.suffers(Pause(FaultStage.NEXT_TOKEN))
        async with way_to(made, decode) as way:
            body = {"prompt": LONG, "max_tokens": 9, "stream": True}
            reading = asyncio.create_task(made.http.post("/v1/completions", json=body))
            await until(lambda: num_chunks(made) == 1)
            await way.close()
            async with asyncio.timeout(120):
                response = await reading
            *said, broken = frames(response.text)
            error = broken["error"]
            assert (error["reason"], error["retryable"]) == ("NoWorker", True)
            assert error["offset"] == 1
            assert "".join(one["choices"][0]["text"] for one in said) == made.expected(1)
            num_lost = counted(made, "lost_workers_total", cause="unreachable")
            assert num_lost == 1, "it beats on, and is not believed"
            gate.release()
            await way.open()
            await made.until_joined(decode)
            assert (await made.complete(LONG, max_tokens=4)).status_code == 200


async def test_with_the_last_decode_worker_gone_a_stream_ends_with_its_offset(
    nats_url: str, folder: Path
) -> None:
    async with cluster(nats_url, folder) as made:  # patience: 0.3 s
        decode = made.decodes[0]
        decode.suffers(Pause(FaultStage.NEXT_TOKEN))
        body = {"prompt": LONG, "max_tokens": 9, "stream": True}
        reading = asyncio.create_task(made.http.post("/v1/completions", json=body))
        await until(lambda: num_chunks(made) == 1)
        decode.die()
        async with asyncio.timeout(120):
            response = await reading
        *said, broken = frames(response.text)
        error = broken["error"]
        assert (error["reason"], error["code"]) == ("NoWorker", "no_worker")
        assert error["offset"] == 1
        assert "".join(one["choices"][0]["text"] for one in said) == made.expected(1)
        assert error["stage"] in ("committed", "decoding", "migrating")


async def test_with_the_last_prefill_worker_gone_those_who_wait_are_told(
    nats_url: str, folder: Path
) -> None:
    async with cluster(nats_url, folder) as made:
        death = made.prefills[0].suffers(Die(FaultStage.COMMIT))
        async with asyncio.timeout(120):
            response = await made.complete(LONG, max_tokens=9)
        assert death.happened == 1
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")


async def test_a_worker_that_comes_in_time_takes_the_stream_up(nats_url: str, folder: Path) -> None:
    async with mean_cluster(nats_url, folder, 1) as made:
        made.decodes[0].suffers(Die(FaultStage.TOKEN, offset=3))
        asking = asyncio.create_task(made.complete(LONG, max_tokens=9))
        await made.until_queued(1)
        async with living(FakeDecode(made.script), made.bus, made.subjects):
            assert (await asking).json()["choices"][0]["text"] == made.expected(9)


async def test_a_worker_whose_call_runs_out_of_time_does_not_end_the_request(
    one_pair: RouterCluster,
) -> None:
    """Its own call to another worker did: the caller's deadline is minutes away."""
    prefill: FakePrefill = one_pair.prefills[0]
    too_slow = DeadlineExceeded("a call of the fake took too long")
    fault = prefill.suffers(Refuse(FaultStage.RESERVED, too_slow, times=1))
    response = await one_pair.complete(LONG, max_tokens=4)
    assert fault.happened == 1
    assert response.json()["choices"][0]["text"] == one_pair.expected(4)
