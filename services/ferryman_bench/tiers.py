"""`ferryman bench tiers`: the first token of a prompt, by the tier that holds its prefix.

Processes run as `ferryman up --nodes 2` starts them. Orders name their prefill worker, so routing
does not choose the tier. Each round takes a new prompt, and then

    cold       all but its last token
    device     the whole prompt, where it was computed
    host       the same, the device flushed
    storage    the same, device and host tier flushed
    peer       on the other node, which has nothing

Decode is flushed before each: every hand-off carries the whole prompt. Usage must name the tier.
The same run also measures hand-offs by each data plane against a raw NIXL write of the same bytes,
loads of that prompt's resume set against a memcpy, and lookups of 128 k tokens in the index.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType

import numpy as np
import torch

from ferryman.cache.keys import TokenIds, as_token_ids, page_keys, root_key
from ferryman.cache.manifest import StateManifest
from ferryman.errors import FerrymanError, Unavailable
from ferryman.ids import make_request_id
from ferryman.schedule.request import Request, SamplingParams
from ferryman.settings.cluster import TierOptions, UpOptions
from ferryman.settings.engine import EngineOptions
from ferryman.wire.values import PrefillOrder, RequestContext
from ferryman_bench.model_room import PAGE_SIZE, load_bench_model
from ferryman_bench.nodes import ROUTER_ID, FirstToken, Nodes, two_nodes
from ferryman_bench.random_model import make_random_model
from ferryman_bench.report import ReportRow, comparison_row, show, target_row
from ferryman_bench.shape import shape_named
from ferryman_bench.transport.index_lookup import measure_lookups
from ferryman_bench.transport.loads import load_bandwidth
from ferryman_bench.transport.planes import PlaneRates, plane_rates

DEADLINE_SECONDS = 240.0
WARM_UP_TOKENS = 256
MEMORY_BYTES = 512 << 20
HOST_BYTES = 1 << 30
STORAGE_BYTES = 2 << 30
# A host hit should take at most a fifth of a cold prompt, a lookup at most a millisecond.
HOST_AIM = 5.0
LOOKUP_AIM_MS = 1.0
# The bytes of a hand-off, and of each of its units.
HAND_OFFS = (
    (64 << 20, 16 << 10, "64 MiB in pages of 16 KiB"),
    (64 << 20, 256 << 10, "64 MiB in pages of 256 KiB"),
    (76 << 20, 76 << 20, "one slot of 76 MiB"),
)
ALL_CACHES = ("hostcache-1", "hostcache-2")
# The worker that computes, and the processes flushed before, for a hit in each tier.
STEPS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "device": ("prefill-1", ()),
        "host": ("prefill-1", ("prefill-1",)),
        "storage": ("prefill-1", ("prefill-1", "hostcache-1")),
        "peer": ("prefill-2", ("prefill-2", "hostcache-2")),
    }
)
TIERS = tuple(STEPS)
TRIES = 3


@dataclass(frozen=True, slots=True)
class TierBenchOptions:
    """The subject of a measurement, and its number of rounds."""

    shape: str = "granite-100m"
    dtype: str = "bfloat16"
    threads: int = 2
    rounds: int = 3
    prompt_len: int = 4096
    opens_nixl: bool = False


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes new prompts, and orders for them."""

    manifest: StateManifest
    vocab_size: int
    prompt_len: int

    def tokens(self, number: int) -> TokenIds:
        drawn = np.random.default_rng(number).integers(0, self.vocab_size, self.prompt_len)
        return as_token_ids(drawn)

    def order(self, nodes: Nodes, prefill: str, tokens: TokenIds) -> PrefillOrder:
        name = make_request_id()
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        keys = page_keys(root_key(self.manifest), tokens, PAGE_SIZE)
        return PrefillOrder(
            context=RequestContext(name, 1, DEADLINE_SECONDS),
            worker_epoch=nodes.address(prefill).epoch,
            decode=nodes.address("decode"),
            router_id=ROUTER_ID,
            request=Request(name, tokens, keys, sampling),
            manifest_digest=self.manifest.digest,
        )


def run_bench_tiers(choice: TierBenchOptions, *, as_json: bool) -> int:
    torch.set_num_threads(choice.threads)
    with tempfile.TemporaryDirectory(prefix="ferryman-bench-") as name, torch.inference_mode():
        folder = Path(name)
        millions = make_random_model(shape_named(choice.shape), choice.dtype, folder) / 1e6
        model = load_bench_model(folder, choice.dtype)
        prompts = Prompts(model.manifest, model.vocab_size, choice.prompt_len)
        del model
        found = _measured(choice, prompts, folder)
        rows = [
            *_first_token_rows(found),
            *_hand_off_rows(opens_nixl=choice.opens_nixl),
            _load_row(prompts),
            *_lookup_rows(),
        ]
    title = f"{choice.shape}, {millions:.1f} M parameters, {choice.dtype}, "
    title += f"{choice.threads} threads; first token of {choice.prompt_len}"
    show(f"ferryman bench tiers: {title}", rows, as_json=as_json)
    return 0


def _measured(
    choice: TierBenchOptions, prompts: Prompts, folder: Path
) -> Mapping[str, Sequence[float]]:
    """As `_measure`, but a group of one FerrymanError is raised as that error."""
    try:
        return asyncio.run(_measure(choice, prompts, folder))
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1 and isinstance(group.exceptions[0], FerrymanError):
            raise group.exceptions[0] from None
        raise


async def _measure(
    choice: TierBenchOptions, prompts: Prompts, folder: Path
) -> Mapping[str, Sequence[float]]:
    """Seconds to the first token, by tier."""
    chosen = {"model": folder, "dtype": choice.dtype, "num_threads": choice.threads}
    room = {"page_size": PAGE_SIZE, "memory_bytes": MEMORY_BYTES, "max_running": 4}
    engine = EngineOptions.model_validate({**chosen, **room})
    tiers = TierOptions(
        host_bytes=HOST_BYTES,
        storage_bytes=STORAGE_BYTES,
        prefetch_policy="wait_complete",
        num_nodes=2,
    )
    choices = UpOptions(
        engine=engine, served_name="bench", num_prefill=2, tiers=tiers, insecure=True
    )
    found: dict[str, list[float]] = {name: [] for name in ("cold", *TIERS)}
    async with two_nodes(choices, folder / "state") as nodes:
        for prefill in ("prefill-1", "prefill-2"):
            await _first_token(nodes, prompts, prefill, prompts.tokens(0)[:WARM_UP_TOKENS])
        for number in range(1, choice.rounds + 1):
            for tier, seconds in (await _round(nodes, prompts, number)).items():
                found[tier].append(seconds)
    return found


async def _round(nodes: Nodes, prompts: Prompts, number: int) -> dict[str, float]:
    tokens = prompts.tokens(number)
    known = tokens[:-1]
    keys = page_keys(root_key(prompts.manifest), known, PAGE_SIZE)
    found = {"cold": (await _first_token(nodes, prompts, "prefill-1", known)).seconds}
    await nodes.stored("hostcache-1", keys)
    for tier, (prefill, flushed) in STEPS.items():
        found[tier] = await _timed_hit(nodes, prompts, tier, prefill, flushed, tokens)
    await nodes.flush(*ALL_CACHES, payload=b"all")
    await nodes.flush("prefill-1", "prefill-2")
    return found


async def _timed_hit(
    nodes: Nodes,
    prompts: Prompts,
    tier: str,
    prefill: str,
    flushed: Sequence[str],
    tokens: TokenIds,
) -> float:
    """Seconds to the first token from that tier. A slow tier can cause a miss: then again."""
    cached = (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE
    wanted = {name: cached if name == tier else 0 for name in TIERS}
    said = ""
    for _ in range(TRIES):
        for name in flushed:
            await nodes.flush(name, payload=b"all" if name == "hostcache-2" else b"")
        first = await _first_token(nodes, prompts, prefill, tokens)
        usage = first.done.usage
        if usage.cached.by_tier == wanted:
            return first.seconds
        said = f"{usage.cached.by_tier}, { ({one.reason: one.pages for one in usage.uncached}) }"
    raise Unavailable(f"the {tier} row was to have {wanted}, and has {said}")


async def _first_token(
    nodes: Nodes, prompts: Prompts, prefill: str, tokens: TokenIds
) -> FirstToken:
    await nodes.flush("decode")
    return await nodes.first_token(prefill, prompts.order(nodes, prefill, tokens))


def _first_token_rows(found: Mapping[str, Sequence[float]]) -> Iterator[ReportRow]:
    cold = [seconds * 1e3 for seconds in found["cold"]]
    yield ReportRow("cold", "ms", median(cold), min(cold), "", None, None, None)
    for tier in TIERS:
        ours = [seconds * 1e3 for seconds in found[tier]]
        ratio = median(cold) / median(ours)
        name = f"{tier} hit"
        if tier == "host":
            name += f" (aim {HOST_AIM:g})"
        yield ReportRow(name, "ms", median(ours), min(ours), "cold", median(cold), min(cold), ratio)


def _hand_off_rows(*, opens_nixl: bool) -> Iterator[ReportRow]:
    """Each plane beside the fastest one: a raw NIXL write, or a memcpy without NIXL."""
    for num_bytes, unit_bytes, name in HAND_OFFS:
        measured = plane_rates(num_bytes, unit_bytes=unit_bytes, opens_nixl=opens_nixl)
        yield from _plane_rows(measured, name)


def _plane_rows(measured: PlaneRates, units: str) -> Iterator[ReportRow]:
    raw = "raw_nixl" if "raw_nixl" in measured.rates else "memcpy"
    against = measured.rates[raw]
    for plane, rate in measured.rates.items():
        if plane not in (raw, "memcpy"):
            name = f"hand-off by {plane}, {units}"
            ours, peer = (rate.median, rate.best), (against.median, against.best)
            values = [each / 1e9 for each in (*ours, *peer)]
            yield ReportRow(
                name,
                "GB/s",
                values[0],
                values[1],
                raw,
                values[2],
                values[3],
                measured.share(plane, raw),
            )


def _load_row(prompts: Prompts) -> ReportRow:
    """Loads and memcpy as rates for the same bytes."""
    position = (prompts.prompt_len - 1) // PAGE_SIZE * PAGE_SIZE
    found = load_bandwidth(prompts.manifest, position)
    name = f"load-back, {found.num_bytes / 1e6:.0f} MB"
    timings = {"ours": found.loads, "memcpy": found.memcpy}
    return comparison_row(name, "GB/s", found.num_bytes / 1e9, "memcpy", timings)


def _lookup_rows() -> Iterator[ReportRow]:
    for found in measure_lookups():
        name = f"index, {found.num_pages} pages, {found.snapshot}"
        yield target_row(name, "ms", (found.median * 1e3, found.least * 1e3), LOOKUP_AIM_MS)
