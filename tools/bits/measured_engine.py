"""The offline engine with answers in bits, and engines that retract their request on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import count
from time import monotonic
from typing import Any, TypeVar

from tests.engine.host_fed import HostFed, PutsAway
from tools.bits.compared_answer import ComparedAnswer
from tools.bits.models import PAGE_SIZE, BitsModel, Prompt
from tools.bits.served_forms import ServedForm
from tools.bits.step_record import StepRecord

from ferryman.cache.keys import PageKey, as_token_ids, page_keys, root_key
from ferryman.schedule.events import Drawn, Event
from ferryman.schedule.limits import TOGETHER
from ferryman.schedule.request import SamplingParams

DTYPES: Mapping[str, Mapping[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
}
COLD: Mapping[str, Any] = {
    "page_size": PAGE_SIZE,
    "chunk_tokens": 1_024,
    "max_running": 4,
    "memory_bytes": 1 << 30,
    "prefix_cache": False,
    "overlap": False,
    "replay_steps": False,
    "num_threads": 1,
}
"""Options of the cold run: a prompt in one chunk, one step at a time, launched, on one thread."""


@dataclass(frozen=True, slots=True)
class MeasuredAnswer(ComparedAnswer):
    """Digests are of the logits that each token was drawn from; and what the engine did for it.

    `mixed` says whether a step of prompts and tokens drew its first token, and a later one.
    """

    cached: Mapping[str, int]
    neighbours: int
    mixed: tuple[bool, bool]
    chunk_ends: tuple[int, ...]
    replays: int
    refusal: str
    threads: frozenset[int]


class MeasuredEngine(HostFed):
    """Greedy answers of a given length, by the adapter of the model's form. `in_flight` is the most
    steps that were submitted at once.

    Its steps are the only ones that `record` hears of while it answers.
    """

    def __init__(self, served: ServedForm, record: StepRecord, **options: Any) -> None:
        super().__init__(served.folder, **{**COLD, **served.options, **options})
        self._served = served
        self._record = record
        self._seeds = count(1)
        self.in_flight = 0

    def answer(self, prompt: Prompt, num_tokens: int) -> MeasuredAnswer:
        """The answer to a prompt alone."""
        return self.answers([prompt], [num_tokens])[0]

    def answers(
        self, prompts: Sequence[Prompt], num_tokens: Sequence[int], num_plain: int = 0
    ) -> list[MeasuredAnswer]:
        """The answers to all prompts at once; the first `num_plain` by the model alone."""
        sampling = [
            SamplingParams(
                max_tokens=max_tokens, temperature=0.0, seed=next(self._seeds), ignore_eos=True
            )
            for max_tokens in num_tokens
        ]
        record, self.in_flight = self._record, 0
        record.clear()
        adapters = [""] * num_plain + [self._served.adapter] * (len(prompts) - num_plain)
        completions = self.generate(prompts, sampling, adapter=adapters)
        return [
            MeasuredAnswer(
                prompt=tuple(prompt),
                token_ids=completion.token_ids,
                digests=record.drawn(params.seed, len(prompt), len(completion.token_ids)),
                cached=completion.cached_tokens,
                neighbours=record.most_neighbours(params.seed),
                mixed=record.mixed_draws(params.seed, len(prompt)),
                chunk_ends=tuple(record.chunk_ends),
                replays=record.replays,
                refusal=record.refusal,
                threads=frozenset(record.threads),
            )
            for prompt, params, completion in zip(prompts, sampling, completions, strict=True)
        ]

    def keys_of(self, prompt: Sequence[int]) -> tuple[PageKey, ...]:
        manifest, adapter = self._engine.manifest, self._adapter(self._served.adapter)
        root = root_key(manifest, adapter=adapter.digest)
        return page_keys(root, as_token_ids(prompt), manifest.page_size)

    def _apply(self, event: Event, answers: Any) -> None:
        # The step whose events these are has left the pipeline.
        self.in_flight = max(self.in_flight, 1 + len(self._engine.pipeline.flights))
        super()._apply(event, answers)


class RetractedEngine(MeasuredEngine):
    """Retracts a request when it has drawn `retract_after` tokens, as a schedule does when its
    pages run out."""

    retract_after = 0

    def _apply(self, event: Event, answers: Any) -> None:
        super()._apply(event, answers)
        if isinstance(event, Drawn) and event.offset + 1 == self.retract_after:
            scheduler = self._engine.scheduler
            (sequence,) = scheduler.sequences.decoding
            scheduler.retraction.retract(sequence, monotonic())
            # The next step would admit it again, before anybody has copied its state.
            for later in scheduler.take_events():
                self._apply(later, answers)


class MixingEngine(MeasuredEngine):
    """Computes prompts and tokens in one step, as a worker that does both."""

    def __init__(self, served: ServedForm, record: StepRecord, **options: Any) -> None:
        super().__init__(served, record, **options)
        scheduler = self._engine.scheduler
        scheduler.limits = replace(scheduler.limits, order=TOGETHER)


class PutAwayEngine(RetractedEngine, PutsAway):
    """Its retracted request resumes from the host, to which its state was moved."""


Kind = TypeVar("Kind", bound=MeasuredEngine)


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """A model in one of DTYPES, with the number of tokens of its answers. All of its engines have
    the options `everywhere`, such as the device."""

    model: BitsModel
    dtype: str
    num_tokens: int
    record: StepRecord
    everywhere: Mapping[str, Any] = field(default_factory=dict)

    def engine(self, **options: Any) -> AbstractContextManager[MeasuredEngine]:
        """An engine that differs from the cold one in `options`."""
        return self.engine_of(MeasuredEngine, **options)

    def engine_of(self, kind: type[Kind], **options: Any) -> Kind:
        chosen = {**DTYPES[self.dtype], **self.everywhere, **options}
        return kind(self.model.served, self.record, **chosen)


def options_of(device: str) -> Mapping[str, Any]:
    """The options of all engines of a table on `device`: a card promises bits if it is asked to."""
    return {} if device == "cpu" else {"device": device, "exactness": "bits"}


class ColdRuns:
    """The answers of the cold run, each computed once. `engine` has the options COLD."""

    def __init__(self, engine: MeasuredEngine, num_tokens: int) -> None:
        self._engine = engine
        self._num_tokens = num_tokens
        self._known: dict[Prompt, MeasuredAnswer] = {}

    def answer(self, prompt: Prompt) -> MeasuredAnswer:
        if prompt not in self._known:
            answer = self._engine.answer(prompt, self._num_tokens)
            assert answer.threads == {1}, "the cold run has one thread"
            assert answer.chunk_ends == (len(prompt),), "the cold run has one chunk"
            assert not sum(answer.cached.values()), "the cold run finds nothing"
            self._known[prompt] = answer
        return self._known[prompt]
