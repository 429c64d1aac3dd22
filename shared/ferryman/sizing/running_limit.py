"""The reason why a worker runs fewer requests at once than were asked for, and the settings with
which it runs more: `8 asked, 3 run at 4,096 tokens: recurrent slots; --draft-tokens 2 gives 5`.

`most_running` is the inequality of admission, as `plan_capacity` and `requests_at` have it. Every
setting in the sentence was tried by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ferryman.cache.capacity import (
    Concurrency,
    bytes_for,
    least_slots,
    plan_capacity,
    requests_at,
)
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ConfigError
from ferryman.model.shapes.model_shapes import AS_COMPUTED, ModelConfig
from ferryman.settings.engine import EngineOptions
from ferryman.sizing.worker_size import LEAST_CONTEXT, WorkerGroup, WorkerSize, with_running

FEWER_DRAFTS = (2, 1)
MAX_ALTERNATIVES = 3
MEBIBYTE = 1 << 20
_POOLS = {
    Kind.RECURRENT: "recurrent slots",
    Kind.FULL: "pages",
    Kind.WINDOW: "pages of windows",
}
_FOR_LONGER = "the number leaves room for longer contexts"

ConcurrencyOf = Callable[[int], Concurrency]


@dataclass(frozen=True, slots=True)
class StateRoom:
    """The bytes of one worker's pools, and what its steps and requests take of them."""

    manifest: StateManifest
    memory_bytes: int
    step_tokens: int
    concurrency_of: ConcurrencyOf
    recurrent_slots: int = 0

    def running(self, number: int, context: int) -> int:
        """The requests of `context` tokens that run at once if the pools are made for `number`; 0
        if they cannot be made."""
        concurrency = self.concurrency_of(number)
        try:
            slots = plan_capacity(
                self.manifest,
                self.memory_bytes,
                concurrency,
                self.step_tokens,
                self.recurrent_slots,
            ).slots
        except ConfigError:
            return 0
        return requests_at(context, self.manifest, slots, concurrency, self.step_tokens)

    def most_running(self, asked: int, context: int) -> int:
        """The most requests of `context` tokens at once, up to `asked`."""
        numbers = range(asked, 0, -1)
        return next((n for n in numbers if self.running(n, context) == n), 0)

    def scarce_kind(self, number: int, context: int) -> Kind:
        """The kind of state that takes most of the bytes that so many requests need."""
        concurrency = self.concurrency_of(number)
        slots = least_slots(self.manifest, concurrency, self.step_tokens, self.recurrent_slots, [])
        if Kind.FULL in slots:
            pages = number * -(-context // self.manifest.page_size)
            slots[Kind.FULL] = max(slots[Kind.FULL], pages)
        sizes = {kind: n * self.manifest.layout(kind).slot_bytes for kind, n in slots.items()}
        return max(sizes, key=lambda kind: sizes[kind])


@dataclass(frozen=True, slots=True)
class Alternative:
    """A setting as people give it, and the requests that run at once with it."""

    setting: str
    running: int


@dataclass(frozen=True, slots=True)
class RunningLimit:
    """`running` of the requests `asked` for run at once, at `context` tokens each, for lack of what
    `scarce` names."""

    asked: int
    running: int
    context: int
    scarce: str
    alternatives: tuple[Alternative, ...]

    @property
    def sentence(self) -> str:
        """For people."""
        ways = ", ".join(f"`{way.setting}` gives {way.running}" for way in self.alternatives)
        return (
            f"{self.asked} asked, {self.running} run at {self.context:,} tokens: {self.scarce}"
            f"{'; ' if ways else ''}{ways}"
        )

    def as_object(self) -> Mapping[str, Any]:
        """For programs."""
        return {**asdict(self), "sentence": self.sentence}


def running_limit(
    options: EngineOptions, config: ModelConfig, asked: int = 0
) -> RunningLimit | None:
    """The limit of a worker with complete options; None if all that were `asked` for run. 0 is
    the worker's own number."""
    asked = asked or options.max_running
    context = min(config.trunk.max_positions, LEAST_CONTEXT)
    room = room_of(options, config)
    running = room.running(options.max_running, context)
    if running >= asked:
        return None
    possible = room.most_running(asked, context)
    scarce = _FOR_LONGER
    if possible <= running or running < options.max_running:
        made_for = max(running + 1, options.max_running)
        scarce = _POOLS[room.scarce_kind(made_for, context)]
    tried = [
        *([Alternative(f"--max-running {possible}", possible)] if possible > running else []),
        *_alternatives(options, config, asked, context),
    ]
    return RunningLimit(asked, running, context, scarce, _helpful(tried, running))


def room_of(options: EngineOptions, config: ModelConfig) -> StateRoom:
    """The pools of a worker with complete options. Raises ConfigError."""
    sized = WorkerSize.of(WorkerGroup("", options), config, 0).sized
    return StateRoom(
        sized,
        options.memory_bytes,
        options.chunk_tokens,
        lambda number: with_running(options, number).concurrency,
        options.recurrent_slots,
    )


def _helpful(tried: Iterable[Alternative], running: int) -> tuple[Alternative, ...]:
    """The alternatives that give more than all before them."""
    helpful: list[Alternative] = []
    for way in tried:
        if way.running > running:
            helpful.append(way)
            running = way.running
    return tuple(helpful[:MAX_ALTERNATIVES])


def _alternatives(
    options: EngineOptions, config: ModelConfig, asked: int, context: int
) -> Iterator[Alternative]:
    """Settings, each with what it gives; those that cost least come first."""
    for setting, changes in _changes(options):
        try:
            room = room_of(options.model_copy(update=changes), config)
        except ConfigError:
            continue
        yield Alternative(setting, room.most_running(asked, context))
    if needed := _bytes_for_all(room_of(options, config), asked, context):
        # Not as `size_text`, which may round down.
        yield Alternative(f"--memory-bytes {needed // MEBIBYTE}M", asked)


def _changes(options: EngineOptions) -> Iterator[tuple[str, dict[str, object]]]:
    drafts = options.drafting.num_tokens
    for fewer in FEWER_DRAFTS:
        if fewer < drafts:
            yield f"--draft-tokens {fewer}", {"draft_tokens": fewer}
    if options.recurrent_slots:
        yield "--recurrent-slots 0", {"recurrent_slots": 0}
    if options.overlap:
        yield "--no-overlap", {"overlap": False}
    if options.kv_dtype == AS_COMPUTED:
        yield "--kv-dtype fp8", {"kv_dtype": "fp8"}


def _bytes_for_all(room: StateRoom, asked: int, context: int) -> int:
    """The bytes with which all run, in whole mebibytes; 0 if no bytes are enough."""
    least = bytes_for(
        room.manifest,
        room.concurrency_of(asked),
        room.step_tokens,
        room.recurrent_slots,
        num_full=asked,
        context=context,
    )
    needed = -(-least // MEBIBYTE) * MEBIBYTE
    larger = StateRoom(
        room.manifest, needed, room.step_tokens, room.concurrency_of, room.recurrent_slots
    )
    return needed if larger.running(asked, context) == asked else 0
