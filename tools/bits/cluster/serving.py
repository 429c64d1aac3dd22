"""A cluster that serves a model, as the ways use it: streams of answers, and what is kept where."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.harness.cluster import Cluster, Generated, generate
from tests.waiting import until
from tools.bits.cluster.served_answer import ServedAnswer, Tried, greedy, served_answer
from tools.bits.compared_answer import NotTried
from tools.bits.models import BitsModel, Prompt

from ferryman.client import Client
from ferryman.ids import make_request_id
from ferryman.wire.nats.subjects import Subjects

DEADLINE_SECONDS = 1_200.0
"""However slow this machine is just now."""
ROUNDS = 8

Attempt = Callable[[Sequence[Prompt]], Awaitable[list[Tried]]]
"""Asks these prompts in a way; gives a result for each, in their order."""


async def when(condition: Callable[[], bool]) -> None:
    """As `until`, with as much patience as answers have."""
    await until(condition, DEADLINE_SECONDS)


@dataclass(frozen=True, slots=True)
class AnswerStream:
    """An answer that is on its way. `found` is what has come of it."""

    prompt: Prompt
    request_id: str
    num_tokens: int
    found: Generated
    reading: asyncio.Task[Generated]

    @property
    def num_come(self) -> int:
        return len(self.found.token_ids)

    @property
    def is_under_way(self) -> bool:
        return 0 < self.num_come < self.num_tokens

    async def end(self) -> ServedAnswer:
        return served_answer(self.prompt, self.request_id, await self.reading)


@dataclass(frozen=True, slots=True)
class ServedCase:
    """A model that a cluster serves, asked through its router. Answers have `num_tokens`."""

    model: BitsModel
    num_tokens: int
    cluster: Cluster
    client: Client

    def begin(self, prompts: Sequence[Prompt], num_tokens: int = 0) -> list[AnswerStream]:
        """Asks for all at once; `num_tokens` if not as many as all answers have."""
        return [self._stream(prompt, num_tokens or self.num_tokens) for prompt in prompts]

    def _stream(self, prompt: Prompt, num_tokens: int) -> AnswerStream:
        name, found = make_request_id(), Generated()
        reading = generate(
            self.client,
            prompt,
            greedy(num_tokens),
            request_id=name,
            deadline_seconds=DEADLINE_SECONDS,
            into=found,
        )
        return AnswerStream(prompt, name, num_tokens, found, asyncio.create_task(reading))

    async def ask(self, prompts: Sequence[Prompt], num_tokens: int = 0) -> list[ServedAnswer]:
        """The answers to all, asked at once."""
        streams = self.begin(prompts, num_tokens)
        return list(await asyncio.gather(*(stream.end() for stream in streams)))

    async def until_taken(self, attempt: Attempt) -> list[Tried]:
        """For each prompt its first answer that took a way which does not strike all, or what
        hindered the last one."""
        results: dict[Prompt, Tried] = {}
        left = list(self.model.prompts)
        for _ in range(ROUNDS):
            results.update(zip(left, await attempt(left), strict=True))
            left = [prompt for prompt in left if isinstance(results[prompt], NotTried)]
            if not left:
                break
        return [results[prompt] for prompt in self.model.prompts]

    async def staff_as_started(self) -> None:
        """As many workers as the cluster had in the beginning."""
        shape = self.cluster.shape
        await self.staff(prefill=shape.num_prefill, decode=shape.num_decode, both=shape.num_both)

    async def staff(self, **wanted: int) -> None:
        """Starts and stops workers on the first node until so many of each role are there."""
        for role, number in wanted.items():
            there = self.cluster.of_role(role)
            for worker in there[number:]:
                await asyncio.to_thread(worker.stop)
            started = [self.cluster.start(role) for _ in range(number - len(there))]
            for worker in started:
                await asyncio.to_thread(worker.await_ready)
        await self.settle()

    async def settle(self) -> None:
        """Until the router knows of all workers that run, and each maps its node's arena."""
        both = len(self.cluster.of_role("both"))
        counts = {role: len(self.cluster.of_role(role)) + both for role in ("prefill", "decode")}
        await asyncio.to_thread(self.cluster.await_workers, **counts)
        await asyncio.to_thread(self.cluster.await_attached)

    async def forget(self) -> None:
        """Drops what the devices and all tiers keep, once nobody uses it."""
        await self.forget_devices()
        for node in range(self.cluster.shape.num_nodes):
            await self.flush_hostcache(node, "all")

    async def forget_devices(self) -> None:
        await asyncio.to_thread(self.cluster.assert_ledgers_balance)
        for role in ("prefill", "decode", "both"):
            await self.cluster.flush_device(role)

    async def flush_hostcache(self, node: int, what: str) -> None:
        """Its arena ("host"), or its storage too ("all")."""
        worker_id = str(self.cluster.hostcache(node).ready["worker_id"])
        order = Subjects().control(worker_id, "flush")
        async with self.cluster.bus() as bus:
            await bus.request(order, what.encode(), timeout_seconds=60)
