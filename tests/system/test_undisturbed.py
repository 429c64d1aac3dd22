"""A decode worker dies under requests of every sort: each answer is that of the undisturbed run.

Penalties count what was generated before as output, seeds go on, log probabilities and stop strings
are those of one run, and drafts change no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from tests.deploy.shipped_metrics import asked_for, exported
from tests.harness.cluster import (
    Cluster,
    ClusterShape,
    Generated,
    assert_same,
    on_plane,
    one_process,
    running_cluster,
    save_served_model,
)

from ferryman.client import Client
from ferryman.llm import Completion
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.request import FinishReason, SamplingParams
from ferryman.wire.nats.nats_bus import NatsBus
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.public import GenerateFinished, TokenChunk

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

PLAIN = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
WEIGHED = replace(
    PLAIN, temperature=0.8, seed=5, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=3
)
SORTS = {
    "plain": PLAIN,
    "penalties, seed, log probabilities": WEIGHED,
    "presence penalty": replace(PLAIN, presence_penalty=1.5, temperature=0.6, seed=9),
    "log probabilities": replace(PLAIN, logprobs=5),
    "stop string": replace(PLAIN, temperature=1.0, seed=2, logprobs=1),
}
PROMPTS = {sort: [(5 * i + 17 * n) % 120 + 3 for i in range(37)] for n, sort in enumerate(SORTS)}
# The worker dies when every request has this number of tokens.
TOKENS_BEFORE = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "bamba")
    planes = on_plane("grpc")
    decode = {**planes["decode"], "draft": "ngram", "draft_tokens": 3}
    shape = ClusterShape(num_decode=2, settings={**planes, "decode": decode})
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


def test_dashboards_and_alerts_ask_for_metrics_that_services_export(cluster: Cluster) -> None:
    running = [one for one in cluster.services if one.process.poll() is None]
    found = set[str]().union(*(exported(one.metrics()) for one in running))
    assert asked_for() - found == set()


@dataclass
class Wanted:
    """How each sort is asked for, and what one process answers to it."""

    sorts: dict[str, SamplingParams] = field(default_factory=dict)
    answers: dict[str, Completion] = field(default_factory=dict)


@pytest.fixture(scope="module")
def wanted(cluster: Cluster) -> Wanted:
    found = Wanted()
    with one_process(cluster.model) as llm:
        for sort, how in SORTS.items():
            (answer,) = llm.generate([PROMPTS[sort]], how)
            if sort == "stop string":
                how = replace(how, stop=(late_words(answer),))
                (answer,) = llm.generate([PROMPTS[sort]], how)
                assert TOKENS_BEFORE < len(answer.token_ids) < how.max_tokens
            found.sorts[sort], found.answers[sort] = how, answer
    return found


def late_words(answer: Completion) -> str:
    """Two words that stand together for the first time well behind where the worker dies."""
    words = answer.text.split()
    pairs = [f"{one} {other}" for one, other in pairwise(words)]
    return next(pair for pair in pairs[150:] if answer.text.count(pair) == 1)


class TextReader:
    """Collects one answer; `is_under_way` once it has TOKENS_BEFORE tokens."""

    def __init__(self) -> None:
        self.found = Generated()
        self.is_under_way = asyncio.Event()
        self.text: list[str] = []

    async def read(self, events: AsyncIterator[object]) -> None:
        async for event in events:
            if isinstance(event, TokenChunk):
                assert event.offset == len(self.found.token_ids), "each token once and in order"
                self.found.token_ids += event.token_ids
                self.found.logprobs += event.logprobs
                self.text.append(event.text)
                if len(self.found.token_ids) >= TOKENS_BEFORE:
                    self.is_under_way.set()
            elif isinstance(event, GenerateFinished):
                self.found.reason, self.found.usage = event.reason, event.usage


async def test_every_sort_of_request_outlives_its_decode_worker_unchanged(
    cluster: Cluster, wanted: Wanted
) -> None:
    readers = {sort: TextReader() for sort in SORTS}
    async with cluster.bus() as bus, Client(cluster.grpc) as client:
        async with asyncio.TaskGroup() as group:
            for sort, reader in readers.items():
                events = client.generate(PROMPTS[sort], wanted.sorts[sort], deadline_seconds=120)
                group.create_task(reader.read(events))
            for reader in readers.values():
                await reader.is_under_way.wait()
            cluster.of_role("decode")[0].kill()
        migrated = await num_said(bus, "migrated")
    assert migrated > 0, "the worker that died decoded some of them"
    for sort, reader in readers.items():
        expected = wanted.answers[sort]
        assert_same(reader.found, expected)
        assert "".join(reader.text) == expected.text, sort
        assert reader.found.reason == FinishReason(expected.finish_reason)
        assert reader.found.usage is not None
        assert reader.found.usage.prompt_tokens == len(PROMPTS[sort])
    assert any(r.found.usage and r.found.usage.drafted_tokens for r in readers.values())
    cluster.assert_ledgers_balance()


async def num_said(bus: NatsBus, name: str) -> int:
    entries = await bus.history(f"{Subjects().root}.life.router.*.*.{name}", max_events=100)
    return len([decode_event(entry.payload) for entry in entries])
