"""From options to an engine: model, pools, slabs, runner, forward stream, scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ferryman.cache.capacity import CapacityPlan, Concurrency, plan_capacity, tracking_slots
from ferryman.cache.keys import root_key
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import Costs
from ferryman.cache.shards import over_ranks
from ferryman.engine.copy_stream import CopyStream
from ferryman.engine.device import CudaDevice, Device, HostDevice
from ferryman.engine.drafting import PLAIN, DraftOptions, load_with_draft
from ferryman.engine.loads import HostTier
from ferryman.engine.others import NobodyElse, Recruiting, Sizes
from ferryman.engine.pipeline import Pipeline
from ferryman.engine.places import SlabPlace
from ferryman.engine.rank import RankOrders
from ferryman.engine.runner import Runner
from ferryman.engine.slabs import Slabs
from ferryman.engine.stream import ForwardStream
from ferryman.engine.team import recruited
from ferryman.engine.transfer import Transfer
from ferryman.engine.warm_up import warm_up
from ferryman.errors import ConfigError
from ferryman.model.decoder import Model
from ferryman.model.manifest import state_manifest
from ferryman.schedule.limits import SchedulerLimits
from ferryman.schedule.scheduler import Scheduler

# Until the first steps are measured: a small model on one core, and a plain memcpy.
SILENCE_SECONDS = 300.0
FIRST_GUESS = Costs(prefill_seconds_per_token=1e-3, load_seconds_per_byte=1 / 5e9)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is made from. `memory_bytes` caps all pools of all ranks together.

    `snapshot_grid` in tokens is the distance of the coarse snapshots of a prompt (0: none).
    `tp_size` ranks share the model; one that is silent for `silence_seconds` is lost.
    """

    model: Path
    dtype: str
    page_size: int
    chunk_tokens: int
    max_running: int
    max_prealloc: int
    max_waiting: int
    memory_bytes: int
    recurrent_slots: int
    prefix_cache: bool
    overlap: bool
    device: str
    num_threads: int
    snapshot_grid: int = 0
    draft: DraftOptions = PLAIN
    tp_size: int = 1
    silence_seconds: float = SILENCE_SECONDS

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, not {self.page_size}")
        for name in ("chunk_tokens", "max_running", "memory_bytes", "tp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.chunk_tokens < self.page_size:
            raise ConfigError(
                f"chunk_tokens={self.chunk_tokens} must hold a page of {self.page_size} tokens"
            )

        if self.snapshot_grid < 0 or self.snapshot_grid % self.page_size:
            raise ConfigError(
                f"snapshot_grid={self.snapshot_grid} must be a multiple of the page size, "
                f"{self.page_size} tokens, or 0 for none"
            )

    @property
    def threads_per_rank(self) -> int:
        """0 takes what torch takes, which ranks of one machine divide."""
        if self.num_threads or self.tp_size == 1:
            return self.num_threads
        return max(1, torch.get_num_threads() // self.tp_size)

    @property
    def concurrency(self) -> Concurrency:
        tracking = tracking_slots(prefix_cache=self.prefix_cache, overlap=self.overlap)
        num_drafts = self.draft.drafting.num_tokens
        return Concurrency(self.max_running, self.max_prealloc, tracking, num_drafts)


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine: the scheduler decides, the pipeline feeds the stream, the stream runs.

    `manifest` and `transfer` are of the whole model, however many ranks share it. `places` is empty
    when there are several: no slot lies in one piece. `lost` ends, with RankLost, when one does.
    """

    manifest: StateManifest
    capacity: CapacityPlan
    max_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    scheduler: Scheduler
    stream: ForwardStream
    pipeline: Pipeline
    transfer: Transfer
    host_tier: HostTier
    places: Mapping[Kind, SlabPlace] = field(default_factory=dict)
    lost: Future[None] = field(default_factory=Future)


@contextmanager
def running_engine(options: EngineOptions) -> Iterator[Engine]:
    """An engine for the length of a `with`. Raises ConfigError for what cannot work, RankLost."""
    if num_threads := options.threads_per_rank:
        torch.set_num_threads(num_threads)
    with _recruits(options) as recruits, _engine_of(options, recruits) as engine:
        yield engine


def _recruits(options: EngineOptions) -> AbstractContextManager[Recruiting]:
    if options.tp_size == 1:
        return nullcontext(NobodyElse())
    orders = RankOrders(
        model=str(options.model),
        draft_model=options.draft.model,
        dtype=options.dtype,
        page_size=options.page_size,
        device=options.device,
        num_threads=options.threads_per_rank,
        rank=0,
        num_ranks=options.tp_size,
        meeting="meeting",
        silence_seconds=options.silence_seconds,
    )
    return recruited(orders)


@contextmanager
def _engine_of(options: EngineOptions, recruits: Recruiting) -> Iterator[Engine]:
    group = recruits.group
    model, drafter = load_with_draft(
        options.model,
        options.draft.model,
        options.dtype,
        device=options.device,
        page_size=options.page_size,
        group=group,
    )
    of_rank = model.manifest
    manifest = state_manifest(model.config, options.dtype, options.page_size, of_rank.fingerprint)
    capacity = plan_capacity(
        over_ranks(manifest, of_rank, group.num_ranks),
        options.memory_bytes,
        options.concurrency,
        options.chunk_tokens,
        options.recurrent_slots,
    )
    max_len = min(model.config.trunk.max_positions, capacity.max_tokens(manifest))
    slabs = Slabs.allocate(of_rank, capacity.slots, options.device)
    device = _device(options.device)
    rows = options.concurrency.rows
    scheduler = Scheduler(
        manifest, capacity.slots, _limits(options, max_len), FIRST_GUESS, root_key(manifest)
    )
    sizes = Sizes(capacity.slots, rows, max_len + 1)
    others = recruits.allocate(manifest, of_rank, sizes)
    with ExitStack() as stack:
        # The forward stream ends first: it waits for copies, they wait for nobody.
        copies = stack.enter_context(CopyStream())
        runner = Runner(
            model,
            slabs,
            max_rows=sizes.max_rows,
            max_len=sizes.max_len,
            device=device,
            copies=copies,
            others=others,
            drafter=drafter,
        )
        stream = stack.enter_context(ForwardStream(runner, context=device.entered()))
        stream.call(lambda: warm_up(runner, manifest)).result()
        yield Engine(
            manifest=manifest,
            capacity=capacity,
            max_len=max_len,
            vocab_size=model.vocab_size,
            eos_token_ids=_eos(model),
            scheduler=scheduler,
            stream=stream,
            pipeline=Pipeline(scheduler, stream.submit),
            transfer=runner.transfer,
            host_tier=runner.host_tier,
            places=slabs.places if group.num_ranks == 1 else {},
            lost=recruits.lost,
        )


def _device(name: str) -> Device:
    device = torch.device(name)
    return CudaDevice(device.index or 0) if device.type == "cuda" else HostDevice()


def _limits(options: EngineOptions, max_len: int) -> SchedulerLimits:
    return SchedulerLimits(
        concurrency=options.concurrency,
        chunk_tokens=options.chunk_tokens,
        max_len=max_len,
        max_waiting=options.max_waiting,
        steps_in_flight=2 if options.overlap else 1,
        prefix_cache=options.prefix_cache,
        snapshot_grid=options.snapshot_grid,
        drafting=options.draft.drafting,
    )


def _eos(model: Model) -> frozenset[int]:
    return frozenset(model.config.trunk.eos_token_ids)
