"""How far the index calls a chain usable at the edges of windows, against positions counted out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

import pytest
from tests.cache.test_window_budget import in_tree, manifest_of, random_use, window_pages
from tests.cluster_keys import KEY
from tests.doubles.memory_index import MemoryIndex
from tests.wire.test_index import PATIENT, chain_of, units

from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.units import Tier
from ferryman.wire.redis.index import NodeLife, PrefixIndex
from ferryman.wire.redis.redis_index import redis_index

NODE = NodeLife("node-a", 11)
NUM_CHAINS = 25


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[PrefixIndex]:
    if request.param == "memory":
        yield MemoryIndex()
        return
    async with redis_index(
        request.getfixturevalue("redis_url"), KEY, lookup_seconds=PATIENT
    ) as index:
        await index._client.flushall()
        yield index


def needed_pages(depth: int, page_size: int, window_len: int) -> set[int]:
    """Of every position that the token behind `depth` pages looks back on, its page."""
    end = depth * page_size
    return {position // page_size for position in range(max(0, end - window_len + 1), end)}


def usable_pages(num_pages: int, held: set[int], snapshots: set[int], shape: ResumeShape) -> int:
    for depth in range(num_pages, 0, -1):
        has_state = Kind.RECURRENT not in shape.kinds or depth - 1 in snapshots
        if has_state and needed_pages(depth, shape.page_size, shape.window_len) <= held:
            return depth
    return 0


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("window_len", [1, 2, 3, 4, 5, 8, 9, 15])
@pytest.mark.parametrize("page_size", [1, 4, 8])
async def test_a_prefix_is_usable_just_where_its_window_is_whole(
    index: PrefixIndex, page_size: int, window_len: int, has_states: bool
) -> None:
    """Pages as workers leave them: the windows before some ends, a page of which may be gone."""
    manifest, rng = manifest_of(window_len, page_size, 1), Random(window_len * 100 + page_size)
    kinds = frozenset(Kind) if has_states else frozenset({Kind.FULL, Kind.WINDOW})
    shape = ResumeShape(page_size, window_len, kinds)
    await index.announce(NODE, 60.0)
    num_cut = 0
    for number in range(NUM_CHAINS):
        use = random_use(rng, manifest)
        num_pages = use.prompt_len // page_size
        chain = chain_of(max(1, num_pages), seed=1000 * number)
        ends = {point // page_size for point in use.points} | {num_pages}
        held = in_tree(manifest, use, use.prompt_len) | window_pages(
            manifest, num_pages * page_size
        )
        held = {page for page in held if page < num_pages}
        if held and rng.random() < 0.6:
            held.remove(rng.choice([min(held), rng.choice(sorted(held))]))
        in_storage = {page for page in held if rng.random() < 0.3}
        snapshots = {end - 1 for end in ends if end}
        for tier, kind, pages in (
            (Tier.HOST, Kind.FULL, set(range(num_pages))),
            (Tier.HOST, Kind.WINDOW, held - in_storage),
            (Tier.STORAGE, Kind.WINDOW, in_storage),
            (Tier.STORAGE, Kind.RECURRENT, snapshots),
        ):
            await index.commit(NODE, chain[0], tier, units(chain, kind, *sorted(pages)))
        expected = usable_pages(num_pages, held, snapshots, shape)
        told = await index.usable_pages(chain, shape)
        assert (told[NODE.node_id].usable_pages if told else 0) == expected, (use, held)
        num_cut += expected < num_pages
    # A window of one token is the token itself: it looks back on nothing.
    assert num_cut or window_len == 1, "some window was meant to be incomplete"
