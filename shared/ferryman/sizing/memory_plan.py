"""The plan of a machine's memory: number formats, devices and pools of all workers that share it.

Everything here is computed before a weight is read: from the model's config, the headers of its
tensors, and the machine as it is. A worker holds

    weights    as its loader keeps them, once for each rank
    step       the interpreter, and the tensors of the largest step
    state      its pools: what is left, divided among the workers

RAM is shared by all workers that run on the processor, with `reserved` bytes for other processes; a
card is shared by the ranks on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ferryman.cache.capacity import StateDemand, share_memory
from ferryman.errors import ConfigError
from ferryman.model.config import load_config, mtp_config
from ferryman.model.drafted import join_configs
from ferryman.model.footprint import mtp_bytes, weight_bytes
from ferryman.model.load_options import LoadOptions
from ferryman.model.shapes.model_shapes import ModelConfig
from ferryman.model.shapes.ranks import SingleRank
from ferryman.schedule.drafting import MTP
from ferryman.settings.declaration import size_text
from ferryman.settings.engine import AUTO, EngineOptions
from ferryman.sizing.machine import MachineResources, this_machine
from ferryman.sizing.running_limit import RunningLimit, running_limit
from ferryman.sizing.worker_size import (
    CPU,
    ModelFiles,
    WorkerGroup,
    WorkerPlan,
    WorkerSize,
    model_files,
    stored_dtype,
    with_running,
)

# The part of free memory that is taken without being asked for; the rest is for the page cache,
# for what other programs take later, and for what is wrong with the figures here.
SHARE = 0.8
# Requests at once, if their number is not given: the most that leave room for a context of so many
# tokens, or for the model's own.
ROWS = (32, 16, 8, 4, 2, 1)
WANTED_CONTEXT = 32_768
# Tokens of a prefill step; fewer if bfloat16 is emulated, so that a step does not block others for
# long; more on a card, where a step of 512 tokens reads all experts for few tokens each.
CHUNK_TOKENS = 512
EMULATED_CHUNK_TOKENS = 128
CARD_CHUNK_TOKENS = 2048


def complete_options(options: EngineOptions) -> tuple[EngineOptions, tuple[str, ...]]:
    """The options of a worker that has this machine for itself, and why they are so."""
    if options.is_complete:
        return options, ()
    draft = model_files(Path(options.draft_model)) if options.draft_model else None
    planner = MemoryPlanner(model_files(options.model), this_machine(), draft)
    plan = planner.plan([WorkerGroup("", options)])
    return plan.workers[0].options, plan.notes


def limit_of(options: EngineOptions, asked: int = 0) -> RunningLimit | None:
    """The limit of a worker with complete options, as `running_limit`; without a number that was
    `asked` for it is the worker's own."""
    draft = Path(options.draft_model) if options.draft_model else None
    return running_limit(options, _joined_config(options, options.model, draft), asked)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All workers of a machine, and sentences for people about what was chosen and why. `limits`,
    by role, are those of workers that run fewer requests at once than were asked for."""

    model: ModelFiles
    workers: tuple[WorkerPlan, ...]
    notes: tuple[str, ...]
    limits: Mapping[str, RunningLimit] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(worker.num_bytes * worker.count for worker in self.workers)


@dataclass(frozen=True, slots=True)
class MemoryPlanner:
    """Plans for one model on one machine. `memory` is the bytes that workers may take of RAM, and
    of each card; 0 is a share of the free memory. `reserved` bytes of RAM are for others."""

    model: ModelFiles
    machine: MachineResources
    draft: ModelFiles | None = None
    memory: int = 0
    reserved: int = 0
    _weights: dict[tuple[str, str, bool, int, str], int] = field(default_factory=dict)

    def plan(self, groups: Sequence[WorkerGroup]) -> MemoryPlan:
        """Complete options for all workers. Raises ConfigError, saying what would fit, when not
        even the least pools do."""
        groups = [self._placed(group) for group in groups]
        choices, notes = self._dtypes(groups)
        refused: ConfigError | None = None
        for dtype in choices:
            chosen = [self._chunked(_with_dtype(group, dtype)) for group in groups]
            try:
                workers = self._with_best_rows(chosen)
            except ConfigError as error:
                refused = refused or error
                continue
            if refused is not None:
                notes = [
                    f"{dtype}: {choices[0]} does not fit, and steps are slower in {dtype}; in "
                    f"{choices[0]} {self._would_fit(groups, (choices[0],))}"
                ]
            return MemoryPlan(self.model, workers, tuple(notes), self._limits(groups, workers))
        assert refused is not None, "there is a dtype to try"
        others = tuple(dict.fromkeys((choices[0], "bfloat16")))
        raise ConfigError(f"{refused}; {self._would_fit(groups, others)}")

    # Choices.

    def _placed(self, group: WorkerGroup) -> WorkerGroup:
        """On a card if torch finds one."""
        if group.options.device != AUTO:
            return group
        device = "cuda" if self.machine.cards else CPU
        return replace(group, options=group.options.model_copy(update={"device": device}))

    def _dtypes(self, groups: Sequence[WorkerGroup]) -> tuple[list[str], list[str]]:
        """The dtypes to try, the best first, and why it is the best. All workers have the same,
        because they exchange state."""
        if groups[0].options.dtype != AUTO:
            return [groups[0].options.dtype], []
        stored = stored_dtype(self.model)
        if stored == "float32":
            return ["float32"], []
        if stored == "float64":
            return ["float32"], ["float32: the checkpoint says float64, which is never chosen"]
        if stored == "float16":
            return ["float32", "bfloat16"], ["float32: float16 is not computed here"]
        if all(self._has_bfloat16(group.options.device) for group in groups):
            return ["bfloat16"], []
        why = "float32: the checkpoint says bfloat16, for which this processor has no instructions"
        return ["float32", "bfloat16"], [why]

    def _has_bfloat16(self, device: str) -> bool:
        if device == CPU:
            return self.machine.has_bfloat16
        return all(card.has_bfloat16 for card in self.machine.cards)

    def _chunked(self, group: WorkerGroup) -> WorkerGroup:
        """The group with its tokens of a step, if they are not given; the dtype is known."""
        options = group.options
        if options.chunk_tokens:
            return group
        update = {"chunk_tokens": max(self._chunk_tokens(options), options.page_size)}
        return replace(group, options=options.model_copy(update=update))

    def _chunk_tokens(self, options: EngineOptions) -> int:
        if options.is_on_card:
            return CARD_CHUNK_TOKENS
        is_emulated = options.dtype == "bfloat16" and not self.machine.has_bfloat16
        return EMULATED_CHUNK_TOKENS if is_emulated else CHUNK_TOKENS

    def _with_best_rows(self, groups: Sequence[WorkerGroup]) -> tuple[WorkerPlan, ...]:
        """The workers. If the requests at once are not given, they are the most that leave room
        for long contexts, or else those with the longest contexts. Raises ConfigError when not even
        one request at once fits."""
        if all(group.options.max_running for group in groups):
            return self._fitted(groups)
        candidates: list[tuple[WorkerPlan, ...]] = []
        refused: ConfigError | None = None
        for rows in ROWS:
            try:
                workers = self._fitted([_with_open_rows(group, rows) for group in groups])
            except ConfigError as error:
                refused = error
                continue
            if all(worker.max_len >= min(worker.model_len, WANTED_CONTEXT) for worker in workers):
                return workers
            candidates.append(workers)
        if not candidates:
            assert refused is not None, "there are rows to try"
            raise refused
        return max(candidates, key=lambda workers: min(worker.max_len for worker in workers))

    def _limits(
        self, groups: Sequence[WorkerGroup], workers: Sequence[WorkerPlan]
    ) -> dict[str, RunningLimit]:
        """The limits of workers by role. Where no number was asked for, it is the first of ROWS."""
        limits = {}
        for group, worker in zip(groups, workers, strict=True):
            asked = group.options.max_running or ROWS[0]
            limit = running_limit(worker.options, self.config(worker.options), asked)
            if limit is not None:
                limits[worker.role] = limit
        return limits

    # Sizes.

    def _fitted(self, groups: Sequence[WorkerGroup]) -> tuple[WorkerPlan, ...]:
        """The workers with their memory. Raises ConfigError when the least does not fit."""
        config = self.config(groups[0].options)
        sized = [WorkerSize.of(group, config, self.weights_of(group.options)) for group in groups]
        budgets = {id(size): size.options.memory_bytes for size in sized}
        for place in dict.fromkeys(place for size in sized for place in size.places):
            for size, num_bytes in self._shared(place, sized):
                earlier = budgets[id(size)]
                budgets[id(size)] = min(earlier, num_bytes) if earlier else num_bytes
        return tuple(size.planned(budgets[id(size)]) for size in sized)

    def _shared(self, place: str, sized: Sequence[WorkerSize]) -> Iterator[tuple[WorkerSize, int]]:
        """The bytes of state for each worker with ranks at `place`, as far as this place decides.

        Raises ConfigError when the least does not fit there.
        """
        here = [(size, size.part_at(place)) for size in sized if place in size.places]
        fixed = sum(size.count * size.fixed_bytes * part for size, part in here)
        fixed += self.reserved if place == CPU else 0
        whole, limited_by = self._limit(place)
        least = fixed + sum(size.count * size.demand.least * part for size, part in here)
        if least > whole:
            raise ConfigError(_does_not_fit(place, here, int(least), whole, limited_by))
        # A share of the free memory, unless the least needs more of it.
        budget = whole if self.memory else max(int(whole * SHARE), int(least))
        every = [(size, part) for size, part in here for _ in range(size.count)]
        parts = share_memory(
            budget - int(fixed),
            [StateDemand(int(e.demand.least * p), int(e.demand.useful * p)) for e, p in every],
        )
        for (size, part), num_bytes in zip(every, parts, strict=True):
            yield size, max(size.demand.least, int(num_bytes / part))

    def _limit(self, place: str) -> tuple[int, str]:
        """The bytes that workers may take there, and what limits them."""
        if place == CPU:
            free, limited_by = self.machine.free_bytes, self.machine.limited_by
        else:
            cards = {f"cuda:{card.index}": card for card in self.machine.cards}
            if place not in cards:
                raise ConfigError(
                    f"device {place}: there is no such card here; "
                    f"there are {', '.join(cards) or 'none'}"
                )
            free, limited_by = cards[place].free_bytes, f"the free memory of {cards[place].name}"
        return (self.memory, "--memory") if self.memory else (free, limited_by)

    def weights_of(self, options: EngineOptions) -> int:
        """The bytes of all weights of one rank, a drafter's and the adapters' included."""
        on_cpu = options.device == CPU
        key = (options.dtype, options.quantize, on_cpu, options.tp_size, options.lora)
        if key not in self._weights:
            counted = [(weight_bytes, files) for files in (self.model, self.draft) if files]
            if options.draft == MTP:
                counted.append((mtp_bytes, self.model))
            loaded_as = LoadOptions(
                dtype=options.dtype,
                device=options.device,
                group=SingleRank(rank=0, num_ranks=options.tp_size),
                quantize=options.quantize,
                lora=options.lora_folders,
            )
            self._weights[key] = sum(
                count(files.folder, files.tensors, loaded_as) for count, files in counted
            )
        return self._weights[key]

    def config(self, options: EngineOptions) -> ModelConfig:
        """The config of the model, joined with its drafter's."""
        draft = self.draft.folder if self.draft else None
        return _joined_config(options, self.model.folder, draft)

    # Refusals.

    def _would_fit(self, groups: Sequence[WorkerGroup], dtypes: Sequence[str]) -> str:
        """The nearest cluster that fits, the first of `dtypes` being the one that was asked for:
        `--max-running 8 would fit, with contexts up to 4,096 tokens`."""
        asked = max(group.options.max_running for group in groups)
        for named in dtypes:
            chosen = [self._chunked(_with_dtype(group, named)) for group in groups]
            for rows in (asked, *(n for n in ROWS if n < asked)):
                try:
                    workers = self._with_best_rows([_with_rows(group, rows) for group in chosen])
                except ConfigError:
                    continue
                words = [f"--dtype {named}"] if named != dtypes[0] else []
                words += [f"--max-running {rows}"] if rows != asked else []
                context = min(worker.max_len for worker in workers)
                what = " with ".join(words) or "fewer workers"
                return f"{what} would fit, with contexts up to {context:,} tokens"
        return "no --max-running would make it fit; free memory, or take a smaller model"


def _joined_config(options: EngineOptions, folder: Path, draft: Path | None) -> ModelConfig:
    if options.draft == MTP:
        return mtp_config(folder)
    config: ModelConfig = load_config(folder)
    if draft is None:
        return config
    drafts: ModelConfig = load_config(draft)
    return join_configs(config, drafts)


def _with_dtype(group: WorkerGroup, dtype: str) -> WorkerGroup:
    return replace(group, options=group.options.model_copy(update={"dtype": dtype}))


def _with_rows(group: WorkerGroup, max_running: int) -> WorkerGroup:
    return replace(group, options=with_running(group.options, max_running))


def _with_open_rows(group: WorkerGroup, rows: int) -> WorkerGroup:
    return group if group.options.max_running else _with_rows(group, rows)


def _does_not_fit(
    place: str, here: Sequence[tuple[WorkerSize, float]], least: int, whole: int, limited_by: str
) -> str:
    parts = [
        f"{size.count} × {size.group.role or 'worker'}: "
        f"{size_text(int(size.weight_bytes * part))} of weights, "
        f"{size_text(int(size.demand.least * part))} of state at least, "
        f"{size_text(int(size.step_bytes * part))} for steps"
        for size, part in here
    ]
    return (
        f"the model does not fit on {place} in {here[0][0].options.dtype}: it needs "
        f"{size_text(least)} ({'; '.join(parts)}), and {limited_by} leaves {size_text(whole)}"
    )
