"""Builds an engine from its options: model, pools, slabs, runner, forward stream, scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from ferryman.cache.capacity import CapacityPlan
from ferryman.cache.keys import root_key
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.rank_runs import RankShares
from ferryman.cache.resume import FIRST_GUESS
from ferryman.cache.shards import over_ranks
from ferryman.engine.device import ComputeDevice, CudaDevice, HostDevice
from ferryman.engine.forward.decode_forward import CudaGraphs
from ferryman.engine.forward.grammar_masks import GrammarMasks
from ferryman.engine.forward.replayed_forward import FIRST_AFTER, StepRecordings
from ferryman.engine.forward.step import StepGraphs
from ferryman.engine.memory.copy_stream import CopyStream
from ferryman.engine.memory.loads import LoadQueue
from ferryman.engine.memory.slabs import ShardedSlab, SlabGrowth, Slabs, places_of
from ferryman.engine.memory.transfer import Transfer
from ferryman.engine.pipeline import Pipeline
from ferryman.engine.runner import Runner
from ferryman.engine.stream import ForwardStream
from ferryman.engine.tensor_parallel.group import SlabSizes, TpStartup, start_ranks
from ferryman.engine.tensor_parallel.rank import RankOrders, load_with_draft
from ferryman.engine.warm_up import MostTokens, WarmUp, warm_up
from ferryman.grammar.compiler import GrammarCompiler
from ferryman.grammar.forced_runs import ForcedRunDrafting
from ferryman.model.layers.decoder import Decoder, Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.shapes.manifest import pads_prompts, state_manifest
from ferryman.model.shapes.ranks import SINGLE_RANK
from ferryman.model.shapes.state import LayerCount
from ferryman.model.weights.load_progress import ProgressListener, unheard
from ferryman.schedule.drafting import Drafting, PromptLookup
from ferryman.schedule.limits import IN_TURNS, PREFILL_FIRST, TOGETHER, SchedulerLimits, StepOrder
from ferryman.schedule.request import Adapter
from ferryman.schedule.scheduler import Scheduler
from ferryman.schedule.step_sizes import StepSizes
from ferryman.settings.engine import EngineOptions
from ferryman.sizing.exactness import arithmetic_of, check_audit


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine: the scheduler decides, the pipeline feeds the stream, the stream runs.

    `manifest` and `transfer` belong to the whole model, also when ranks share it. `places` are the
    slabs of every rank, and `shares` the part of a slot that each keeps, here and at other workers.
    `prepare_ahead` has memory ready, on the thread that calls it, up to a slot of each kind.
    `lost` fails with RankLost when a rank is lost. `adapters` are those of the model, by the name
    that clients use.
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
    host_tier: LoadQueue
    grammars: GrammarCompiler
    shares: RankShares
    prepare_ahead: Callable[[Mapping[Kind, int]], None]
    places: Mapping[Kind, ShardedSlab] = field(default_factory=dict)
    lost: Future[None] = field(default_factory=Future)
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    layers_run: LayerCount = field(default_factory=LayerCount)


@contextmanager
def build_engine(
    options: EngineOptions, on_progress: ProgressListener = unheard, warm: WarmUp = warm_up
) -> Iterator[Engine]:
    """An engine for the length of a `with`, from complete options.

    `on_progress` gets how far rank 0 has loaded its part of the model; others load meanwhile.
    `warm` runs the first steps.
    Raises ConfigError for options that cannot work, RankLost.
    """
    assert options.is_complete, "dtype, device and memory are derived before an engine is built"
    if num_threads := _threads_per_rank(options):
        torch.set_num_threads(num_threads)
    with _startup(options) as startup, _engine_of(options, startup, on_progress, warm) as engine:
        yield engine


def _threads_per_rank(options: EngineOptions) -> int:
    """0 means torch's default, which ranks of one machine divide."""
    if options.num_threads or options.tp_size == 1:
        return options.num_threads
    return max(1, torch.get_num_threads() // options.tp_size)


def _startup(options: EngineOptions) -> AbstractContextManager[TpStartup | None]:
    """The other ranks, if there are any."""
    if options.tp_size == 1:
        return nullcontext()
    orders = RankOrders(
        model=str(options.model),
        drafted_by=options.drafted_by,
        dtype=options.dtype,
        quantize=options.quantize,
        page_size=options.page_size,
        device=options.device,
        kv_dtype=options.kv_dtype,
        arithmetic=arithmetic_of(options),
        num_threads=_threads_per_rank(options),
        rank=0,
        num_ranks=options.tp_size,
        meeting="meeting",
        silence_seconds=options.rank_silence_seconds,
    )
    return start_ranks(orders)


@contextmanager
def _engine_of(
    options: EngineOptions,
    startup: TpStartup | None,
    on_progress: ProgressListener,
    warm: WarmUp,
) -> Iterator[Engine]:
    group = startup.group if startup else SINGLE_RANK
    arithmetic = arithmetic_of(options)  # refused before a weight is read
    loaded_as = LoadOptions(
        dtype=options.dtype,
        device=options.device,
        page_size=options.page_size,
        group=group,
        quantize=options.quantize,
        kv_dtype=options.kv_dtype,
        lora=options.lora_folders,
        on_progress=on_progress,
        arithmetic=arithmetic,
    )
    check_audit(options)
    model, drafter = load_with_draft(options.model, options.drafted_by, loaded_as)
    of_rank, share_of = model.manifest, partial(_share_of, model, options)
    manifest = share_of(1)
    capacity = options.capacity(over_ranks(manifest, of_rank, group.num_ranks))
    max_len = min(model.config.trunk.max_positions, capacity.max_tokens(manifest))
    slabs = Slabs.allocate(of_rank, capacity.slots, options.device, is_filled=False)
    growth = SlabGrowth(of_rank, slabs)
    device = _device(options.device)
    rows = options.concurrency.rows
    grammars = GrammarCompiler.for_folder(options.model, model.vocab_size)
    limits = _limits(options, max_len, _drafting(options, grammars))
    root = root_key(manifest)
    scheduler = Scheduler(
        manifest, capacity.slots, limits, FIRST_GUESS, root, prepare=growth.prepare
    )
    pads = pads_prompts(model.config)
    steps = options.step_sizes(max_len, pads_prompts=pads)
    replays = _replays(options, steps)
    graph_tokens = replays.max_tokens if isinstance(replays, StepGraphs) else 0
    sizes = SlabSizes(capacity.slots, rows, max_len + 1, graph_tokens)
    ranks = startup.allocate(manifest, of_rank, sizes) if startup else None
    with ExitStack() as last, ExitStack() as stack:
        # The forward stream ends first: it waits for copies, and copies do not wait for it. The
        # arena is released last, when nothing copies any more.
        copies = stack.enter_context(CopyStream())
        runner = Runner(
            model,
            slabs,
            max_rows=sizes.max_rows,
            max_len=sizes.max_len,
            device=device,
            copies=copies,
            ranks=ranks,
            drafter=drafter,
            masks=GrammarMasks(grammars),
            sizes=steps,
            replays=replays,
            num_adapters=len(_adapters(model)),
        )
        last.callback(runner.host_tier.detach)
        stream = stack.enter_context(ForwardStream(runner, context=device.entered()))
        # The processor has no plans to make, and would compute for seconds.
        longest = min(scheduler.limits.chunk_tokens, max_len) if options.is_on_card else 0
        crowd = max(1, options.max_running) * (1 + options.drafting.num_tokens)
        # Steps of a draft model have drafts, and are not recorded.
        records = isinstance(replays, StepRecordings) and drafter is None
        most = MostTokens(crowd, longest, FIRST_AFTER if records else 0)
        stream.call(lambda: warm(runner, manifest, steps, most)).result()
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
            grammars=grammars,
            shares=RankShares(manifest, group.num_ranks, share_of),
            places=places_of([slabs.tensors, *(ranks.shares if ranks else ())]),
            lost=startup.lost if startup else Future(),
            layers_run=runner.layers_run,
            adapters=_adapters(model),
            prepare_ahead=growth.prepare_ahead,
        )


def _share_of(model: Model, options: EngineOptions, num_ranks: int) -> StateManifest:
    """The state that each of `num_ranks` ranks of the model keeps. Raises ConfigError."""
    return state_manifest(
        model.config,
        options.dtype,
        options.page_size,
        model.manifest.fingerprint,
        num_ranks,
        options.kv_dtype,
        model.manifest.arithmetic,
    )


def _device(name: str) -> ComputeDevice:
    device = torch.device(name)
    return CudaDevice(device.index or 0) if device.type == "cuda" else HostDevice()


def _replays(options: EngineOptions, steps: StepSizes | None) -> StepGraphs | StepRecordings | None:
    """Graphs on a card; recordings on a processor, for a model on one rank: sums over ranks are
    messages."""
    if not options.replays:
        return None
    if steps is not None:
        return StepGraphs(steps.max_tokens, CudaGraphs())
    if options.tp_size == 1 and options.decodes:
        return StepRecordings(options.page_size)
    return None


def _drafting(options: EngineOptions, grammars: GrammarCompiler) -> Drafting:
    """A draft model names all drafts itself; from the text, forced runs come first."""
    drafting = options.drafting
    if isinstance(drafting, PromptLookup):
        return ForcedRunDrafting(drafting, grammars)
    return drafting


def _limits(options: EngineOptions, max_len: int, drafting: Drafting) -> SchedulerLimits:
    return SchedulerLimits(
        concurrency=options.concurrency,
        chunk_tokens=options.chunk_tokens,
        max_len=max_len,
        max_waiting=options.max_waiting,
        steps_in_flight=2 if options.overlap else 1,
        prefix_cache=options.prefix_cache,
        snapshot_grid=options.snapshot_grid,
        drafting=drafting,
        order=_order(options),
        audit_share=options.audit_share,
    )


def _order(options: EngineOptions) -> StepOrder:
    """A card launches a prefill step kernel by kernel, and replays a decode step: in turns."""
    if not options.takes_turns:
        return PREFILL_FIRST
    return IN_TURNS if options.is_on_card else TOGETHER


def _adapters(model: Model) -> Mapping[str, Adapter]:
    served = model.lora.names if isinstance(model, Decoder) and model.lora else ()
    return {adapter.name: Adapter(n, adapter.digest) for n, adapter in enumerate(served, start=1)}


def _eos(model: Model) -> frozenset[int]:
    return frozenset(model.config.trunk.eos_token_ids)
