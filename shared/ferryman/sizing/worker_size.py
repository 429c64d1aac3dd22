"""The size of one worker: its weights, its largest step and its state, before any exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ferryman.cache.capacity import CapacityPlan, StateDemand, bytes_for, requests_at
from ferryman.cache.manifest import StateManifest
from ferryman.cache.shards import over_ranks
from ferryman.model.shapes.config_fields import read_fields
from ferryman.model.shapes.manifest import (
    attentions,
    check_kv_dtype,
    num_streams,
    pads_prompts,
    profile_len,
    state_manifest,
)
from ferryman.model.shapes.model_shapes import AS_COMPUTED, ModelConfig
from ferryman.model.weights.gguf_checkpoint import open_model
from ferryman.model.weights.safetensors_header import StoredTensor
from ferryman.model.weights.weight_formats import AS_STORED
from ferryman.schedule.step_sizes import RECORDING_BYTES
from ferryman.settings.engine import EngineOptions
from ferryman.sizing.exactness import arithmetic_of

CPU = "cpu"
# A context that a worker should hold at least once, if the size of its pools is not given.
LEAST_CONTEXT = 4096
# An interpreter with torch and compiled loops; on a card the context of its driver.
PROCESS_BYTES = 220 << 20
CARD_BYTES = 600 << 20
# A graph's launches in one layer, as the driver keeps them. It is not measured yet.
GRAPH_LAYER_BYTES = 64 << 10
# Tensors as large as all residual streams that a layer has at once, among them streams, their
# norms, gates and n-grams. Qwen 4 has up to nine, with the tables of its chosen blocks.
STREAM_TENSORS = 10
# Kinds whose pages a step names, at most.
PAGED_KINDS = 2
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
_DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The part of a model that is needed before its weights: the folder of its config, and its
    tensors by name."""

    folder: Path
    tensors: Mapping[str, StoredTensor]


def model_files(folder: Path) -> ModelFiles:
    """The files of a folder. Reads headers only; raises ConfigError as `open_model` does."""
    return ModelFiles(folder, open_model(folder).tensors)


def stored_dtype(model: ModelFiles) -> str:
    """The dtype that a checkpoint declares, or else the one of most of its bytes."""
    raw = read_fields(model.folder / "config.json").raw
    inner = raw.get("text_config")
    for fields in (raw, inner if isinstance(inner, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            named = str(fields.get(name, "")).removeprefix("torch.")
            if named in _DTYPE_NAMES.values():
                return named
    sizes: dict[str, int] = {}
    for tensor in model.tensors.values():
        dtype = _DTYPE_NAMES.get(tensor.dtype, "bfloat16")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="float32")


def with_running(options: EngineOptions, max_running: int) -> EngineOptions:
    """With so many requests at once; a worker that prefills for others holds as many again."""
    update = {"max_running": max_running}
    if not options.decodes:
        update["max_prealloc"] = max_running
    return options.model_copy(update=update)


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """`count` workers of one role, with options that may leave dtype, device and memory open."""

    role: str
    options: EngineOptions
    count: int = 1


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker of a role, of `count`. `options` are complete; bytes are of all its ranks."""

    role: str
    count: int
    options: EngineOptions
    manifest: StateManifest
    capacity: CapacityPlan
    weight_bytes: int
    step_bytes: int
    model_len: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.step_bytes + self.capacity.num_bytes

    @property
    def weights_name(self) -> str:
        """For people: `weights`, or `int8 weights` if those of linear layers become int8."""
        quantize = self.options.quantize
        return "weights" if quantize == AS_STORED else f"{quantize} weights"

    @property
    def max_len(self) -> int:
        """The longest request, in tokens: the model's, or as much as the pools hold."""
        return min(self.model_len, self.capacity.max_tokens(self.manifest))

    def requests_at(self, context: int) -> int:
        """The requests of `context` tokens that it holds at once; 0 for more than it takes."""
        if context > self.max_len:
            return 0
        options = self.options
        return requests_at(
            context,
            self.manifest,
            self.capacity.slots,
            options.concurrency,
            options.chunk_tokens,
        )


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """A group of workers whose dtype and device are known, with the bytes of one of them."""

    group: WorkerGroup
    whole: StateManifest
    sized: StateManifest
    weight_bytes: int
    step_bytes: int
    model_len: int
    demand: StateDemand

    @classmethod
    def of(cls, group: WorkerGroup, config: ModelConfig, rank_weights: int) -> WorkerSize:
        options, ranks, arithmetic = (
            group.options,
            group.options.tp_size,
            arithmetic_of(group.options),
        )
        check_kv_dtype(config, options.kv_dtype, on_card=options.is_on_card)
        of_rank, whole = (
            state_manifest(
                config,
                options.dtype,
                options.page_size,
                "not read",
                n,
                options.kv_dtype,
                arithmetic,
            )
            for n in (ranks, 1)
        )
        sized = over_ranks(whole, of_rank, ranks)
        return cls(
            group=group,
            whole=whole,
            sized=sized,
            weight_bytes=ranks * rank_weights,
            step_bytes=ranks * step_bytes(config, options),
            model_len=config.trunk.max_positions,
            demand=_demand(options, sized, config.trunk.max_positions),
        )

    @property
    def options(self) -> EngineOptions:
        return self.group.options

    @property
    def count(self) -> int:
        return self.group.count

    @property
    def fixed_bytes(self) -> int:
        return self.weight_bytes + self.step_bytes

    @property
    def places(self) -> list[str]:
        """The place of each rank: cards are numbered on from the worker's own."""
        device, ranks = self.options.device, self.options.tp_size
        if device == CPU:
            return [CPU] * ranks
        first = int(device.partition(":")[2] or 0)
        return [f"cuda:{first + rank}" for rank in range(ranks)]

    def part_at(self, place: str) -> float:
        """The part of one worker that is at `place`."""
        return self.places.count(place) / len(self.places)

    def planned(self, memory_bytes: int) -> WorkerPlan:
        options = self.options.model_copy(update={"memory_bytes": memory_bytes})
        return WorkerPlan(
            role=self.group.role,
            count=self.count,
            options=options,
            manifest=self.whole,
            capacity=options.capacity(self.sized),
            weight_bytes=self.weight_bytes,
            step_bytes=self.step_bytes,
            model_len=self.model_len,
        )


def _demand(options: EngineOptions, sized: StateManifest, model_len: int) -> StateDemand:
    """The bytes of the pools of one worker; a given size is the least and the most."""
    if options.memory_bytes:
        return StateDemand(options.memory_bytes, options.memory_bytes)
    concurrency, step = options.concurrency, options.chunk_tokens
    slots = options.recurrent_slots
    context = min(model_len, LEAST_CONTEXT)
    least = bytes_for(sized, concurrency, step, slots, num_full=1, context=context)
    rows = concurrency.max_running
    useful = bytes_for(sized, concurrency, step, slots, num_full=rows, context=model_len)
    return StateDemand(least, useful)


def step_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """The bytes of one rank except weights and state: the process, and its largest step's tensors.

    A step holds a few tensors of [tokens, hidden_dim], those of residual streams and the profiles
    of distance of a layer, if it has some, and logits of its rows in 32 bits with as much again
    twice for the draw.
    """
    item = 8 if options.dtype == "float64" else 4
    trunk = config.trunk
    rows = options.concurrency.max_running * (1 + options.concurrency.drafts)
    hidden = 24 * options.chunk_tokens * trunk.hidden_dim * item
    logits = 3 * rows * trunk.vocab_size * item
    process = PROCESS_BYTES if options.device == CPU else CARD_BYTES
    profiles = profile_len(config, options.tp_size) * options.chunk_tokens
    largest = hidden + logits + profiles * _ITEM_BYTES[options.dtype]
    largest += stream_bytes(config, options)
    return process + largest + opened_bytes(config, options) + replay_bytes(config, options)


def stream_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """The bytes of tensors [tokens, streams, hidden_dim] of one rank; 0 without streams. Every rank
    has all streams."""
    numbers = num_streams(config) * config.trunk.hidden_dim
    return STREAM_TENSORS * options.chunk_tokens * numbers * _ITEM_BYTES[options.dtype]


def opened_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """The bytes of the copy in `dtype` of the pages that one layer's attention reads, of one rank;
    0 unless they are kept as codes, and on a card in bfloat16, whose kernels read codes.

    Counted for all rows at a context of LEAST_CONTEXT: longer ones take more. A processor opens a
    page once, so it takes at most what the pools hold; a card opens one for each entry of the
    longest row's table, in every row.
    """
    reads_codes = options.device != CPU and options.dtype == "bfloat16"
    if options.kv_dtype == AS_COMPUTED or reads_codes:
        return 0
    rows = options.concurrency.max_running
    if options.device != CPU:
        rows *= 1 + options.concurrency.drafts
    context = min(config.trunk.max_positions, LEAST_CONTEXT)
    pages = rows * -(-context // options.page_size)
    ranks = options.tp_size
    shapes = [shape.shard(ranks) for shape in attentions(config)]
    numbers = max(shape.kv_heads * shape.head_dim for shape in shapes)
    return 2 * pages * options.page_size * numbers * _ITEM_BYTES[options.dtype]


def replay_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """The bytes of all recorded steps, on a processor; of all graphs of one rank, on a card: the
    shared logits, each one's integers and launches.

    Graphs share the memory of what a step computes, which is counted with the step.
    """
    if not options.replays:
        return 0
    pads = pads_prompts(config)
    sizes = options.step_sizes(config.trunk.max_positions, pads_prompts=pads)
    if sizes is None:
        return RECORDING_BYTES if _records(options) else 0
    item = 8 if options.dtype == "float64" else 4
    logits = sizes.max_tokens * config.trunk.vocab_size * item
    step_sizes, tails = list(sizes.each()), sizes.tails()
    integers = 8 * sum(size.num_tokens * (size.pages * PAGED_KINDS + 4) for size in step_sizes)
    integers += 8 * sum(2 * tail.rows + tail.pages * PAGED_KINDS for tail in tails)
    launches: int = (len(step_sizes) + len(tails)) * len(config.states) * GRAPH_LAYER_BYTES
    return logits + integers + launches


def _records(options: EngineOptions) -> bool:
    return options.device == CPU and options.decodes and options.tp_size == 1
