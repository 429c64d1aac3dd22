"""Many streams at once through one cluster, while something happens to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.harness.cluster import Cluster, one_process

from ferryman.client import Client
from ferryman.ids import make_request_id
from ferryman.schedule.request import SamplingParams
from ferryman.wire.public import TokenChunk

# Long enough that many streams are still under way when a worker has heard that it drains: a quiet
# machine draws a token in 2 ms.
MAX_TOKENS = 256
Prompts = Sequence[Sequence[int]]


def sampling_of(number: int) -> SamplingParams:
    """Every other one is drawn at random, each with a seed of its own."""
    if number % 2:
        return SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=number, ignore_eos=True)
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)


def undisturbed(cluster: Cluster, prompts: Prompts) -> list[list[int]]:
    """The answers of one process without a cache."""
    with one_process(cluster.model, memory_bytes=1 << 28) as llm:
        samplings = [sampling_of(number) for number in range(len(prompts))]
        return [list(one.token_ids) for one in llm.generate(list(prompts), samplings)]


@dataclass
class Streams:
    """Answers as they come. `many` is set once `wanted` of them, if any, have `far` tokens."""

    wanted: int = 0
    far: int = 1
    many: asyncio.Event = field(default_factory=asyncio.Event)
    _num_far: int = 0

    async def read(
        self, client: Client, prompt: Sequence[int], sampling: SamplingParams, request_id: str
    ) -> list[int]:
        token_ids: list[int] = []
        async for event in client.generate(list(prompt), sampling, request_id=request_id):
            if isinstance(event, TokenChunk):
                assert event.offset == len(token_ids), "each token once and in order"
                before = len(token_ids)
                token_ids += event.token_ids
                self._count(before, len(token_ids))
        return token_ids

    def _count(self, before: int, after: int) -> None:
        self._num_far += before < self.far <= after
        if self._num_far >= self.wanted > 0:
            self.many.set()


async def answers_though_disturbed(
    cluster: Cluster, disturb: Callable[[], None], prompts: Prompts, streams: Streams
) -> tuple[list[list[int]], int]:
    """All answers, and how many requests needed a further attempt."""
    name = make_request_id()
    async with Client(cluster.grpc) as client:
        reading = [
            asyncio.create_task(streams.read(client, prompt, sampling_of(n), f"{name}-{n}"))
            for n, prompt in enumerate(prompts)
        ]
        async with asyncio.timeout(300):
            await streams.many.wait()
        disturb()
        async with asyncio.timeout(
            240
        ):  # before the client's own deadline: this one names the wait
            answers = await asyncio.gather(*reading)
        # The lifecycle log alone has requests that ended, and a busy broker takes its time.
        names = [f"{name}-{n}" for n in range(len(prompts))]
        routes = [await client.explain(request_id, deadline_seconds=60.0) for request_id in names]
    return answers, sum(len(each) > 1 for each in routes)


@dataclass
class Frames:
    """One answer by HTTP, frame by frame, at one router."""

    url: str
    said: list[Mapping[str, Any]] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, prompt: Sequence[int], max_tokens: int) -> None:
        """To the end of the stream."""
        body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=240) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.said.append(json.loads(line.removeprefix("data: ")))
                    self.has_begun.set()

    @property
    def words(self) -> list[str]:
        choices = [frame["choices"][0] for frame in self.said if "choices" in frame]
        return "".join(choice["text"] for choice in choices).split()
