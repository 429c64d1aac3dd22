"""A load whose bytes are wrong: the prompt is computed, and counted as what it was in the end."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.harness.pair import MANIFEST, WorkerPair, expected, pair_of_workers, request
from tests.waiting import until

from ferryman.cache.resume import HostView
from ferryman.cache.units import HostUnit, Tier
from ferryman.schedule.request import Request
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched
from ferryman.wire.codec.prefill import progress_from_wire
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.hostcache.client import HostLease
from ferryman.wire.values import PrefillHandedOff
from ferryman.worker.host import NoHostTier
from ferryman.worker.worker_app import WorkerContext
from ferryman_prefill.server import PrefillServicer

PROMPT = [5] * 21
NUM_PAGES = 4


class SpoiltHost(NoHostTier):
    """Has the first pages of everything, and nothing in the places it names."""

    def __init__(self) -> None:
        self.released: list[bool] = []

    async def lease_for(
        self, request: Request, tags: CallTags, brought: Prefetched = NOTHING_BROUGHT
    ) -> HostLease:
        units = {
            (kind, page): HostUnit(
                kind,
                page,
                request.keys[page],
                0,
                MANIFEST.layout(kind).slot_bytes,
                bytes(16),
                Tier.STORAGE,
            )
            for kind in MANIFEST.kinds
            for page in range(NUM_PAGES)
        }
        return HostLease("spoilt", 1, NUM_PAGES, HostView(units))

    def release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        self.released.append(was_corrupt)


def counted(pair: WorkerPair, name: str) -> dict[str, int]:
    """A counter of the prefill worker by its one label; what is 0 is left out."""
    text = pair.prefill.parts.metrics.render().decode()
    pattern = rf'^ferryman_prefill_{name}{{\w+="(\w+)"}} (\S+)$'
    found = {label: int(float(n)) for label, n in re.findall(pattern, text, re.MULTILINE)}
    return {label: n for label, n in found.items() if n}


async def test_a_prompt_is_counted_once_though_its_load_was_spoilt() -> None:
    host = SpoiltHost()

    def make_prefill(parts: WorkerContext) -> PrefillServicer:
        return PrefillServicer(replace(parts, host=host))

    async with pair_of_workers(make_prefill=make_prefill) as pair:
        asked = request("r1", PROMPT)
        progress = [progress_from_wire(each) for each in await pair.run_prefill(pair.order(asked))]
        tokens, _ = await pair.read_tokens("r1")
        assert tokens == expected(asked)
        assert host.released == [True], "the load was tried, and found to be spoilt"
        (done,) = [each for each in progress if isinstance(each, PrefillHandedOff)]
        assert done.usage.cached.total == 0
        assert counted(pair, "cached_tokens_total") == {}
        assert sum(counted(pair, "uncached_tokens_total").values()) == len(PROMPT)
        assert counted(pair, "plans_total") == {"none": 1}
        await until(lambda: not pair.leased())
