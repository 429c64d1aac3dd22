"""CPU time that a token costs outside the model: by hand, a minute or two.

    python -m tools.campaigns.token_path --against ../other --rounds 5

    router     CPU of a router's process for a token of 64 streams over HTTP, workers are fakes
    loop 64    CPU of a decode worker's process for a step of 64 requests, its steps take no time
    loop 1     the same with one request

The measured process does nothing else: fakes, callers and readers have a process of their own. With
`--against` another checkout (with a `.venv` of its own) is measured by this same file; the two take
turns, and each round gives one ratio, so that a machine whose speed drifts slows both alike. This
file imports names of tests and of the product that both checkouts have.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

NUM_STREAMS = 64
NUM_TOKENS = 400
STEP_SECONDS = 0.02
STEPS = {64: 800, 1: 3000}
WARM_STEPS = 100
MAX_LEN = 4096
PAGE_SIZE = 64
PROMPT_LEN = 8
ACCEPTED = b"HTTP/1.1 200"


@dataclass(frozen=True)
class Checkout:
    """A working tree, and how its interpreter runs this file."""

    root: Path

    def command(self, *arguments: str) -> list[str]:
        # -P: not this file's folder, but the checkout is where `tests` is looked for.
        python = self.root / ".venv/bin/python"
        return [str(python), "-P", str(Path(__file__).resolve()), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.root)}

    def measured(self, what: Sequence[str]) -> float:
        """Microseconds of CPU for each token, or each step."""
        run = subprocess.run(
            self.command("--measure", *what),
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            check=True,
        )
        return float(run.stdout)


# A router, its workers and its callers.


async def router_seconds_per_token() -> float:
    """A router in its own process; 64 streams of 400 tokens, a step of all of them each 20 ms."""
    from tests.harness.router import FakePrefill, living
    from tests.servers import nats_server

    from ferryman.wire.nats.connection import NatsOptions
    from ferryman.wire.nats.nats_bus import nats_bus
    from ferryman.wire.nats.subjects import Subjects

    with nats_server() as nats_url:
        child = await _child("--serve", "router", nats_url)
        where = await _heard(child)
        script = tuple(where["script"])
        subjects = Subjects(where["cluster"])
        decode = _stepping_decode(script)
        async with (
            nats_bus(NatsOptions(nats_url)) as bus,
            living(FakePrefill(script), bus, subjects),
            living(decode, bus, subjects),
        ):
            await _told(child, "joined 2")
            await _streams(where["port"], 4, 20, decode)
            began = (await _told(child, "cpu"))["cpu"]
            await _streams(where["port"], NUM_STREAMS, NUM_TOKENS, decode)
            spent = float((await _told(child, "cpu"))["cpu"] - began)
        await _ended(child)
    return spent / (NUM_STREAMS * NUM_TOKENS)


def _stepping_decode(script: tuple[int, ...]) -> Any:
    """A fake decode worker that steps as a real one: one frame for all requests, at a steady pace,
    once as many of them are here as are expected."""
    from tests.harness.router import FakeDecode

    from ferryman.handoff.offsets import EMPTY_HASH, TokenFrame, extend_hash
    from ferryman.schedule.request import FinishReason
    from ferryman.wire.values import RequestTokens, StreamContinues, StreamFinished

    class SteppingDecode(FakeDecode):
        def __init__(self) -> None:
            super().__init__(script)
            self.num_expected = 0
            self._here: dict[str, tuple[Any, list[int]]] = {}
            self._all_here = asyncio.Event()

        async def _decode(self, running: Any) -> None:
            self._here[running.request.request_id] = running, [EMPTY_HASH]
            if len(self._here) == self.num_expected:
                self._all_here.set()

        async def run_steps(self) -> None:
            await self._all_here.wait()
            due = time.monotonic()
            while self._here:
                due += STEP_SECONDS
                await asyncio.sleep(due - time.monotonic())
                frame = [self._next(*each) for each in list(self._here.values())]
                first = next(iter(self.running.values()), None)
                if first is not None:
                    self._queue(first.router_id).put_nowait(frame)
                for entry in frame:
                    if not isinstance(entry.ending, StreamContinues):
                        del self._here[entry.request_id]
                        self.over[entry.request_id] = self.running.pop(entry.request_id)
            self._all_here.clear()

        def _next(self, running: Any, hashes: list[int]) -> Any:
            offset = len(hashes) - 1
            token = self.script[offset % len(self.script)]
            hashes.append(extend_hash(hashes[-1], [token]))
            frame = TokenFrame(running.attempt, offset, (token,), hashes[-1])
            request = running.request
            is_last = offset + 1 == request.sampling.max_tokens
            usage = replace(running.usage, completion_tokens=offset + 1)
            ending = StreamFinished(FinishReason.LENGTH, usage) if is_last else StreamContinues()
            return RequestTokens(request.request_id, frame, (), ending)

    return SteppingDecode()


async def _streams(port: int, num_streams: int, num_tokens: int, decode: Any) -> None:
    decode.num_expected = num_streams
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        group.create_task(decode.run_steps())
        for _ in range(num_streams):
            group.create_task(_read_stream(port, num_tokens))


async def _read_stream(port: int, num_tokens: int) -> None:
    """Asks for a stream, reads it to its end, and parses nothing of it."""
    asked = {
        "messages": [{"role": "user", "content": "the ferry"}],
        "max_tokens": num_tokens,
        "stream": True,
        "ignore_eos": True,
    }
    body = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-length: {len(body)}\r\n"
    writer.write(
        f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + body
    )
    answer = await reader.read(-1)
    writer.close()
    if not answer.startswith(ACCEPTED) or b"[DONE]" not in answer:
        raise RuntimeError(f"the router answered {answer[:2000]!r}")


async def _serve_router(nats_url: str) -> None:
    from tests.harness.router import QUICK, cluster, model_folder

    # A busy machine is no lost worker.
    names = ("beat_timeout_seconds", "no_worker_seconds", "stream_patience_seconds")
    patient = QUICK.model_copy(update=dict.fromkeys(names, 60.0))
    with tempfile.TemporaryDirectory() as directory:
        folder = model_folder(Path(directory))
        made_by = cluster(nats_url, folder, num_prefills=0, num_decodes=0, limits=patient)
        async with made_by as made:
            where = {"port": made.router.http_port, "cluster": made.subjects.cluster}
            _say({**where, "script": list(made.script)})
            while word := await asyncio.to_thread(sys.stdin.readline):
                while word.startswith("joined") and len(list(made.fleet)) < int(word.split()[1]):
                    await asyncio.sleep(0.01)
                _say({"cpu": time.process_time()})


# A decode worker and its reader.


async def loop_seconds_per_step(num_running: int) -> float:
    """A prefill and a decode worker in one process of their own; this one reads the tokens."""
    from ferryman.wire.grpc.rpc import channel
    from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc

    child = await _child("--serve", "workers", str(num_running))
    where = await _heard(child)
    async with channel(where["address"]) as to_decode:
        asked = decode_pb2.TokensRequest(router_id="router-1", worker_epoch=where["epoch"])
        call = decode_pb2_grpc.DecodeServiceStub(to_decode).Tokens(asked)
        await call.initial_metadata()
        reading = asyncio.create_task(_read_all(call))
        spent = (await _told(child, "go"))["seconds"]
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await _ended(child)
    return float(spent)


async def _read_all(call: Any) -> None:
    async for _message in call:
        pass


class InstantEngine:
    """Steps that take no time and keep no state: each draw is the number of its step."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def begin(self, plan: Any) -> None:
        pass

    def launch(self, plan: Any) -> Any:
        from tests.doubles.fake_engine import FakeStep

        from ferryman.schedule.batch import Sampled, StepOutcome

        self.gate.wait()
        token = plan.step_id % 500
        return FakeStep(StepOutcome(plan.step_id, tuple(Sampled(token, {}) for _ in plan.draws)))


@contextmanager
def _instant_engine(instant: InstantEngine, num_running: int) -> Iterator[Any]:
    """An engine for the given number of requests of 4,096 tokens."""
    from tests.doubles.stamps import fake_manifest
    from tests.harness.pair import fake_engine

    from ferryman.cache.capacity import Concurrency
    from ferryman.cache.keys import root_key
    from ferryman.cache.resume import FIRST_GUESS
    from ferryman.engine.stream import ForwardStream
    from ferryman.schedule.scheduler import Scheduler

    manifest = fake_manifest(PAGE_SIZE)
    num_slots = (num_running + 1) * (MAX_LEN // PAGE_SIZE + 4)
    with fake_engine(manifest, num_slots=num_slots) as engine, ForwardStream(instant) as stream:
        old = engine.scheduler
        limits = replace(
            old.limits,
            concurrency=Concurrency(num_running, 4, old.limits.concurrency.tracking),
            max_len=MAX_LEN,
            max_waiting=num_running,
        )
        slots = dict.fromkeys(manifest.kinds, num_slots)
        scheduler = Scheduler(manifest, slots, limits, FIRST_GUESS, root_key(manifest))
        yield replace(engine, scheduler=scheduler, stream=stream, max_len=MAX_LEN)


async def _serve_workers(num_running: int) -> None:
    from tests.harness.pair import paired, worker_on

    from ferryman_decode.server import DecodeServicer
    from ferryman_prefill.server import PrefillServicer

    instant = InstantEngine()
    with (
        _instant_engine(InstantEngine(), num_running) as for_prefill,
        _instant_engine(instant, num_running) as engine,
    ):
        async with (
            worker_on(for_prefill, "prefill", PrefillServicer) as prefill,
            worker_on(engine, "decode", DecodeServicer) as decode,
            paired(prefill, decode) as pair,
        ):
            _say({"address": decode.address, "epoch": decode.parts.epoch})
            await asyncio.to_thread(sys.stdin.readline)
            instant.gate.clear()
            for number in range(num_running):
                await pair.run_prefill(pair.order(_request(engine, number)))
            instant.gate.set()
            await _until_step(engine, WARM_STEPS)
            first, began = engine.scheduler.statistics().decode_steps, time.process_time()
            await _until_step(engine, WARM_STEPS + STEPS[num_running])
            spent = time.process_time() - began
            statistics_now = engine.scheduler.statistics()
            assert statistics_now.decoding == num_running, statistics_now
            _say({"seconds": spent / (statistics_now.decode_steps - first)})
            await asyncio.to_thread(sys.stdin.readline)


def _request(engine: Any, number: int) -> Any:
    import numpy as np

    from ferryman.schedule.request import Request, SamplingParams

    token_ids = np.arange(number, number + PROMPT_LEN).astype("<u4")
    sampling = SamplingParams(max_tokens=MAX_LEN - PROMPT_LEN, temperature=0.0)
    return Request(f"r{number}", token_ids, (), sampling)


async def _until_step(engine: Any, num_steps: int) -> None:
    while engine.scheduler.statistics().decode_steps < num_steps:
        await asyncio.sleep(0.05)


# Processes.


async def _child(*arguments: str) -> Process:
    here = Checkout(Path.cwd())
    command = here.command(*arguments)
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=1 << 20)


async def _heard(child: Process) -> dict[str, Any]:
    assert child.stdout is not None
    line = await asyncio.wait_for(child.stdout.readline(), 120)
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _told(child: Process, word: str) -> dict[str, Any]:
    assert child.stdin is not None
    child.stdin.write(f"{word}\n".encode())
    return await _heard(child)


async def _ended(child: Process) -> None:
    assert child.stdin is not None
    child.stdin.close()
    await asyncio.wait_for(child.wait(), 60)


def _say(said: object) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


# The measurements that the command line offers.

MEASURES = {"router": ("router",), "loop 64": ("loop", "64"), "loop 1": ("loop", "1")}


def compare(here: Checkout, other: Checkout | None, rounds: int, names: Sequence[str]) -> None:
    print(f"CPU {_cpu_name()}, {os.cpu_count()} of them; microseconds, medians of {rounds} rounds")
    for name in names:
        ours, theirs = [], []
        for number in range(rounds):
            # The order alternates too: the second one finds warm files.
            for is_ours in (True, False) if number % 2 else (False, True):
                if is_ours:
                    ours.append(here.measured(MEASURES[name]) * 1e6)
                elif other is not None:
                    theirs.append(other.measured(MEASURES[name]) * 1e6)
        line = f"{name:8}  here {statistics.median(ours):8.1f} ({min(ours):.1f}..{max(ours):.1f})"
        if theirs:
            ratios = [mine / old for mine, old in zip(ours, theirs, strict=True)]
            line += (
                f"  there {statistics.median(theirs):8.1f}  ratio {statistics.median(ratios):.3f}"
            )
            line += f" ({min(ratios):.3f}..{max(ratios):.3f})"
        print(line, flush=True)


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout with its own .venv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=MEASURES, help="one of the measures")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.measure, options.serve:
        case ["router"], None:
            print(asyncio.run(router_seconds_per_token()))
        case ["loop", num_running], None:
            print(asyncio.run(loop_seconds_per_step(int(num_running))))
        case None, ["router", nats_url]:
            asyncio.run(_serve_router(nats_url))
        case None, ["workers", num_running]:
            asyncio.run(_serve_workers(int(num_running)))
        case _:
            other = Checkout(options.against.resolve()) if options.against else None
            names = [options.only] if options.only else list(MEASURES)
            compare(Checkout(Path(__file__).resolve().parents[2]), other, options.rounds, names)


if __name__ == "__main__":
    main()
