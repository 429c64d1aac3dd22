"""Drafts through a whole cluster: hand-off, tiers and retraction change no token.

A model that drafts for itself is right wherever it is greedy, if its state came along whole: so the
share of accepted drafts proves what was handed off, stored and loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from tests.harness.cluster import (
    FAST_PLANE,
    PAGE_SIZE,
    Cluster,
    ClusterShape,
    Generated,
    assert_same,
    generate,
    generate_all,
    on_plane,
    one_process,
    running_cluster,
    save_served_model,
)

from ferryman.client import Client
from ferryman.llm import Completion
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_drafted
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.subjects import Subjects

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
]

GREEDY = SamplingParams(max_tokens=100, temperature=0.0, logprobs=3, ignore_eos=True)
PROMPTS = [[(5 * i + 17 * n) % 120 + 3 for i in range(40 + 7 * n)] for n in range(4)]
NUM_DRAFTS = 3
# Four requests reach ten pages each; decode's rows: 4 running, 8 preallocated; each a working slot,
# those that run one for tracks and three of scratch.
NUM_PAGES, NUM_STATES = 26, 28


def plain(cluster: Cluster, prompts: Sequence[list[int]], how: SamplingParams) -> list[Completion]:
    """The answers of one process without drafts."""
    with one_process(cluster.model) as llm:
        return llm.generate(prompts, how)


def drafted(found: Generated) -> tuple[int, int]:
    """(drafted, accepted) tokens, from the usage that the client receives."""
    assert found.usage is not None
    return found.usage.drafted_tokens, found.usage.accepted_tokens


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A model that drafts for itself, on a decode worker with few pages."""
    model = save_served_model(tmp_path_factory.mktemp("model"), "bamba")
    manifest = load_drafted(model, model, LoadOptions("float64", page_size=PAGE_SIZE)).manifest
    page, state = (layout.slot_bytes for layout in manifest.layouts)
    draft = {"draft": str(model), "draft_tokens": NUM_DRAFTS}
    planes = on_plane(FAST_PLANE)
    shape = ClusterShape(
        max_running=4,
        memory_bytes=NUM_PAGES * page + NUM_STATES * state,
        overlap=False,
        settings={role: {**planes.get(role, {}), **draft} for role in ("prefill", "decode")},
    )
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


async def test_the_draft_models_state_comes_along_with_every_hand_off(by_itself: Cluster) -> None:
    """Cold, from the device's cache, from the host's memory; then pushed back for want of pages."""
    short = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    (expected,) = plain(by_itself, [PROMPTS[0]], short)
    async with Client(by_itself.grpc) as client:
        for where in ("nowhere", "device", "host"):
            if where == "host":
                await by_itself.await_stored(PROMPTS[0])
                await by_itself.flush_device("prefill")
                await by_itself.flush_device("decode")
            found = await generate(client, PROMPTS[0], short)
            assert found.usage is not None
            cached = found.usage.cached.by_tier
            assert [tier for tier, tokens in cached.items() if tokens] == (
                [] if where == "nowhere" else [where]
            )
            assert_same(found, expected)
            num_drafted, num_accepted = drafted(found)
            assert num_drafted == num_accepted > 20, "all of its state came along"
    by_itself.assert_ledgers_balance()


async def test_what_is_retracted_drafts_on_where_it_was(by_itself: Cluster) -> None:
    expected = plain(by_itself, PROMPTS, GREEDY)
    async with by_itself.bus() as bus, Client(by_itself.grpc) as client:
        answers = await generate_all(client, PROMPTS, GREEDY)
        pattern = f"{Subjects().root}.life.decode.*.*.resumed"
        resumed = [decode_event(e.payload) for e in await bus.history(pattern, max_events=100)]
    assert resumed, "the decode worker's pages were meant to run out"
    for found, wanted in zip(answers, expected, strict=True):
        assert_same(found, wanted)
        num_drafted, num_accepted = drafted(found)
        assert num_drafted == num_accepted > 60
    by_itself.assert_ledgers_balance()
