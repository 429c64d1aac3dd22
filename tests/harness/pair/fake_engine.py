"""An engine without a model: its steps are stamps, its scheduler is the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.doubles.fake_engine import no_delay
from tests.harness import schedule
from tests.harness.schedule import ALL_KINDS, MAX_LEN, PAGE, ScheduledWorker

from ferryman.cache.capacity import CapacityPlan
from ferryman.cache.manifest import StateManifest
from ferryman.cache.rank_runs import RankShares
from ferryman.cache.resume import FIRST_GUESS
from ferryman.engine.engine import Engine
from ferryman.engine.pipeline import Pipeline
from ferryman.engine.stream import ForwardStream
from ferryman.grammar.compiler import GrammarCompiler
from ferryman.schedule.batch import StepPlan
from ferryman.schedule.limits import PREFILL_FIRST, StepOrder
from ferryman.schedule.request import Request

PAGE_SIZE = PAGE
VOCAB = 1000
MANIFEST = ALL_KINDS


def request(request_id: str, token_ids: Sequence[int], max_tokens: int = 6) -> Request:
    """A request to the model of these engines."""
    return schedule.request(MANIFEST, request_id, token_ids, max_tokens)


@contextmanager
def fake_engine(
    manifest: StateManifest = MANIFEST,
    *,
    num_slots: int = 60,
    pace: Callable[[StepPlan], None] = no_delay,
    stream_type: type[ForwardStream] = ForwardStream,
    order: StepOrder = PREFILL_FIRST,
    audit_share: float = 0.0,
) -> Iterator[Engine]:
    """An engine whose steps are stamps, with room for a few requests."""
    worker = ScheduledWorker(
        manifest,
        dict.fromkeys(manifest.kinds, num_slots),
        max_len=MAX_LEN,
        max_waiting=8,
        order=order,
        audit_share=audit_share,
        costs=FIRST_GUESS,
        vocab_size=VOCAB,
        pace=pace,
    )
    with engine_of(worker, stream_type) as engine:
        yield engine


@contextmanager
def engine_of(
    worker: ScheduledWorker, stream_type: type[ForwardStream] = ForwardStream
) -> Iterator[Engine]:
    """The worker's scheduler and stamped slots as the engine that services are given."""
    with stream_type(worker.engine) as stream:
        yield Engine(
            manifest=worker.manifest,
            capacity=CapacityPlan(worker.sizes, 0, "stamps", ()),
            max_len=MAX_LEN,
            vocab_size=worker.vocab_size,
            eos_token_ids=frozenset(),
            scheduler=worker.scheduler,
            stream=stream,
            pipeline=Pipeline(worker.scheduler, stream.submit),
            transfer=worker.engine.transfer,
            host_tier=worker.engine.host_tier,
            grammars=GrammarCompiler.for_folder(Path("no-model"), 1000),
            shares=RankShares.undivided(worker.manifest),
            prepare_ahead=lambda _: None,  # stamps take no memory
            places=worker.engine.slabs.places,
        )
