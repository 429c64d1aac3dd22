"""An engine without a model: its steps are stamps, its scheduler is the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tests.doubles.fake_engine import FakeEngine, no_delay
from tests.doubles.stamps import fake_manifest

from ferryman.cache.capacity import CapacityPlan, Concurrency, tracking_slots
from ferryman.cache.keys import page_keys, root_key
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.rank_runs import RankShares
from ferryman.cache.resume import FIRST_GUESS
from ferryman.engine.engine import Engine
from ferryman.engine.stream import ForwardStream, Pipeline
from ferryman.grammar.compiler import GrammarCompiler
from ferryman.schedule.batch import StepPlan
from ferryman.schedule.limits import PREFILL_FIRST, SchedulerLimits, StepOrder
from ferryman.schedule.request import Request, SamplingParams
from ferryman.schedule.scheduler import Scheduler

PAGE_SIZE = 4
VOCAB = 1000
MANIFEST = fake_manifest(PAGE_SIZE, kinds=list(Kind), window_len=6)


def request(request_id: str, token_ids: list[int], max_tokens: int = 6) -> Request:
    ids = np.array(token_ids, dtype="<u4")
    keys = page_keys(root_key(MANIFEST), ids, PAGE_SIZE)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(request_id, ids, keys, sampling)


@contextmanager
def fake_engine(
    manifest: StateManifest = MANIFEST,
    *,
    num_slots: int = 60,
    pace: Callable[[StepPlan], None] = no_delay,
    stream_type: type[ForwardStream] = ForwardStream,
    order: StepOrder = PREFILL_FIRST,
) -> Iterator[Engine]:
    """An engine whose steps are stamps, with room for a few requests."""
    tracking = tracking_slots(prefix_cache=True, overlap=True)
    limits = SchedulerLimits(
        concurrency=Concurrency(4, 4, tracking),
        chunk_tokens=8,
        max_len=64,
        max_waiting=8,
        steps_in_flight=2,
        prefix_cache=True,
        order=order,
    )
    slots = dict.fromkeys(manifest.kinds, num_slots)
    fake = FakeEngine(
        manifest,
        slots,
        max_rows=limits.concurrency.rows,
        max_len=limits.max_len + 1,
        vocab_size=VOCAB,
        pace=pace,
    )
    scheduler = Scheduler(manifest, slots, limits, FIRST_GUESS, root_key(manifest))
    with stream_type(fake) as stream:
        yield Engine(
            manifest=manifest,
            capacity=CapacityPlan(slots, 0, "stamps", ()),
            max_len=limits.max_len,
            vocab_size=VOCAB,
            eos_token_ids=frozenset(),
            scheduler=scheduler,
            stream=stream,
            pipeline=Pipeline(scheduler, stream.submit),
            transfer=fake.transfer,
            host_tier=fake.host_tier,
            grammars=GrammarCompiler.for_folder(Path("no-model"), 1000),
            shares=RankShares.undivided(manifest),
            prepare_ahead=lambda _: None,  # stamps take no memory
            places=fake.slabs.places,
        )
