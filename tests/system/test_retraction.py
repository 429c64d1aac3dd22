"""A decode worker whose pages run out pushes requests back and resumes them, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.harness.cluster import (
    FAST_PLANE,
    PAGE_SIZE,
    Cluster,
    ClusterShape,
    assert_same,
    generate_all,
    on_plane,
    one_process,
    running_cluster,
    save_served_model,
)

from ferryman.cache.manifest import Kind
from ferryman.client import Client
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.nats_bus import NatsBus
from ferryman.wire.nats.subjects import Subjects

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
]

GREEDY = SamplingParams(max_tokens=100, temperature=0.0, logprobs=3, ignore_eos=True)
PROMPTS = [[(5 * i + 17 * n) % 120 + 3 for i in range(60)] for n in range(4)]
# Four requests reach ten pages each; decode's rows: 4 running with 2 slots each, 8 preallocated.
NUM_PAGES, NUM_STATES = 26, 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "bamba")
    manifest = load_model(model, LoadOptions("float64", page_size=PAGE_SIZE)).manifest
    page, state = (manifest.layout(kind).slot_bytes for kind in (Kind.FULL, Kind.RECURRENT))
    scarce = ClusterShape(
        max_running=4,
        memory_bytes=NUM_PAGES * page + NUM_STATES * state,
        overlap=False,
        settings=on_plane(FAST_PLANE),
    )
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), scarce) as cluster:
        yield cluster


async def test_requests_that_were_retracted_resume_through_the_host_exactly(
    cluster: Cluster,
) -> None:
    # Prefill scored the prompts: what decode computes again repeats no score.
    scored = replace(GREEDY, prompt_logprobs=1)
    with one_process(cluster.model) as llm:
        expected = llm.generate(PROMPTS, scored)
    async with cluster.bus() as bus, Client(cluster.grpc) as client:
        answers = await generate_all(client, PROMPTS, scored)
        retracted, resumed = [await _said(bus, name) for name in ("retracted", "resumed")]
    assert retracted, "the decode worker's pages were meant to run out"
    assert len(resumed) == len(retracted)
    from_host = [event.facts for event in resumed if event.facts["tier"] == "host"]
    assert from_host, "the tree's copy was to be gone when they came back"
    for facts in from_host:
        prompt_len, position = (int(str(facts[name])) for name in ("prompt_len", "position"))
        assert position % PAGE_SIZE == 0
        assert prompt_len - position <= PAGE_SIZE, "less than a page is computed again"
    for found, wanted in zip(answers, expected, strict=True):
        assert_same(found, wanted)
    cluster.assert_ledgers_balance()


async def test_the_next_turn_computes_only_what_is_new_on_a_worker_that_never_saw_it(
    cluster: Cluster,
) -> None:
    """Decode stores what the conversation ended with; prefill, its device flushed, loads it."""
    greedy = replace(GREEDY, max_tokens=30)
    asked = [(7 * i) % 120 + 3 for i in range(41)]
    async with Client(cluster.grpc) as client:
        (first,) = await generate_all(client, [asked], greedy)
        said = [*asked, *first.token_ids]
        await cluster.await_stored(said[:-1])
        await cluster.flush_device("prefill")
        (second,) = await generate_all(client, [[*said, 5, 6, 7]], greedy)
    with one_process(cluster.model) as llm:
        (wanted,) = llm.generate([[*said, 5, 6, 7]], greedy)
    assert tuple(second.token_ids) == wanted.token_ids
    assert second.usage is not None
    known = (len(said) - 1) // PAGE_SIZE * PAGE_SIZE
    assert known > len(asked), "more than the first prompt"
    assert second.usage.cached.by_tier["host"] == known
    cluster.assert_ledgers_balance()


async def _said(bus: NatsBus, name: str) -> list[LifecycleEntry]:
    """All of decode's lifecycle events so far with one name."""
    entries = await bus.history(f"{Subjects().root}.life.decode.*.*.{name}", max_events=100)
    return [decode_event(entry.payload) for entry in entries]
