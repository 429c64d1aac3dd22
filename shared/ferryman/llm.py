"""The offline engine: the workers' schedule, engine and cache in one process, without servers.

with LLM(model="DIR", dtype="float64", page_size=16) as llm:
    done = llm.generate(["The red kite is in"], SamplingParams(max_tokens=8, temperature=0.0))
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from ferryman.cache.keys import TokenIds, as_token_ids, page_keys, root_key
from ferryman.cache.resume import ResumePlan
from ferryman.cache.slots import Ledger
from ferryman.engine.assembly import EngineOptions, running_engine
from ferryman.engine.drafting import DraftOptions
from ferryman.errors import ConfigError, InvalidRequest
from ferryman.schedule.batch import Sampled
from ferryman.schedule.drafting import DraftCounts
from ferryman.schedule.events import Admitted, Drawn, Event, Finished, Retracted
from ferryman.schedule.request import Request, SamplingParams
from ferryman.schedule.sequence import Goal
from ferryman.text.stops import StopStrings
from ferryman.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
GIGABYTE = 1 << 30
UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt.

    `logprobs` has one dict per token, token id → natural log probability (empty when not asked
    for). `cached_tokens` counts reused prompt tokens by tier; `uncached_reasons` counts the pages
    that were computed, by reason.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[Mapping[int, float], ...]
    cached_tokens: Mapping[str, int]
    uncached_reasons: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """How often things happened since the engine started; tests read these as proof."""

    prefill_steps: int
    decode_steps: int
    retractions: int
    drafts: DraftCounts


class LLM:
    """A model, loaded and ready. Use it in a `with`, or call `close`.

    `memory_bytes` caps all state pools together; `snapshot_grid` is the distance in tokens of the
    coarse snapshots of a prompt, a multiple of the page size (0: none). `draft` proposes up to
    `draft_tokens` tokens a step: "ngram" from the text itself, or the folder of a small model with
    the same vocabulary; what is generated stays the same, token for token. `tp_size` processes
    share the model. Raises ConfigError, saying what to change, for a folder or a size that cannot
    work.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "bfloat16",
        page_size: int = 64,
        chunk_tokens: int = 512,
        max_running: int = 8,
        memory_bytes: int = GIGABYTE,
        recurrent_slots: int = 0,
        snapshot_grid: int = 0,
        prefix_cache: bool = True,
        overlap: bool = True,
        device: str = "cpu",
        num_threads: int = 0,
        tp_size: int = 1,
        draft: str | Path = "",
        draft_tokens: int = 4,
    ) -> None:
        options = EngineOptions(
            model=Path(model),
            dtype=dtype,
            page_size=page_size,
            chunk_tokens=chunk_tokens,
            max_running=max_running,
            max_prealloc=0,
            max_waiting=UNLIMITED,
            memory_bytes=memory_bytes,
            recurrent_slots=recurrent_slots,
            prefix_cache=prefix_cache,
            overlap=overlap,
            device=device,
            num_threads=num_threads,
            snapshot_grid=snapshot_grid,
            tp_size=tp_size,
            draft=DraftOptions(str(draft), draft_tokens),
        )
        self._exit = ExitStack()
        self._engine = self._exit.enter_context(running_engine(options))
        self._root = root_key(self._engine.manifest)
        self._tokenizer = _tokenizer_if_there(Path(model))
        self._ids = count()
        self._retractions = 0
        for warning in self._engine.capacity.warnings:
            log.warning(warning)
        log.info("capacity %s", self._engine.capacity.explanation)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the forward stream and frees the pools."""
        self._exit.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Completes every prompt, in the order given. Raises InvalidRequest before any work."""
        many = _as_prompts(prompts)
        params = _one_each(sampling, len(many))
        answers = {
            answer.request.request_id: answer
            for answer in (self._answer(*pair) for pair in zip(many, params, strict=True))
        }
        for answer in answers.values():
            self._engine.scheduler.check(answer.request)
        for answer in answers.values():
            self._submit(answer.request)
        try:
            self._run(answers)
        finally:
            self._abandon(answers)
        return [answer.completion() for answer in answers.values()]

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        return tuple(self._text_tokenizer().encode(text).tolist())

    @property
    def counts(self) -> EngineCounts:
        statistics = self._engine.scheduler.statistics()
        return EngineCounts(
            prefill_steps=statistics.prefill_steps,
            decode_steps=statistics.decode_steps,
            retractions=self._retractions,
            drafts=statistics.drafts,
        )

    def ledgers(self) -> Mapping[str, Ledger]:
        """Who holds how many slots, per pool."""
        return {str(kind): ledger for kind, ledger in self._engine.scheduler.ledgers().items()}

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is accounted for."""
        self._engine.scheduler.check_integrity()

    # From prompt to request.

    def _answer(self, prompt: Prompt, params: SamplingParams) -> _Answer:
        token_ids = self._token_ids(prompt)
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._engine.eos_token_ids
        if params.stop:
            self._text_tokenizer()
        request = Request(
            request_id=f"llm-{next(self._ids)}",
            token_ids=token_ids,
            keys=page_keys(self._root, token_ids, self._engine.manifest.page_size),
            sampling=params,
            stop_token_ids=stops,
        )
        return _Answer(request, self._tokenizer)

    def _token_ids(self, prompt: Prompt) -> TokenIds:
        if isinstance(prompt, str):
            return self._text_tokenizer().encode(prompt)
        if any(not 0 <= token_id < self._engine.vocab_size for token_id in prompt):
            raise InvalidRequest(f"token ids must lie in [0, {self._engine.vocab_size})", "prompt")
        return as_token_ids(prompt)

    def _text_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError("this model folder has no tokenizer.json: give prompts as token ids")
        return self._tokenizer

    # Running.

    def _submit(self, request: Request) -> None:
        self._engine.scheduler.submit(request, Goal.DECODE)

    def _run(self, answers: Mapping[str, _Answer]) -> None:
        pipeline, scheduler = self._engine.pipeline, self._engine.scheduler
        while scheduler.has_work:
            pipeline.fill(monotonic())
            flight = pipeline.oldest
            assert flight is not None, "work is waiting, yet the scheduler stands still"
            flight.outcome.exception()  # waits; commit raises it
            pipeline.commit_oldest(monotonic())
            for event in scheduler.take_events():
                self._apply(event, answers)

    def _apply(self, event: Event, answers: Mapping[str, _Answer]) -> None:
        match event:
            case Admitted(request_id, plan, is_resumed) if not is_resumed:
                answers[request_id].admitted(plan, self._engine.manifest.page_size)
            case Drawn(request_id, _, sampled):
                if answers[request_id].drawn(sampled):
                    self._engine.scheduler.cancel(request_id, monotonic())
            case Finished(request_id, reason, _):
                answers[request_id].finished(str(reason))
            case Retracted():
                self._retractions += 1
            case _:
                pass

    def _abandon(self, answers: Mapping[str, _Answer]) -> None:
        """After an error or an interrupt: nothing of this call stays behind."""
        for request_id in answers:
            self._engine.scheduler.cancel(request_id, monotonic())
        self._engine.scheduler.take_events()


class _Answer:
    """What one request has said so far. A stop string ends it, whatever is drawn afterwards."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self._detokenizer = tokenizer.detokenizer(request.token_ids.tolist()) if tokenizer else None
        self._stops = StopStrings(request.sampling.stop)
        self._text: list[str] = []
        self._sampled: list[Sampled] = []
        self._finish_reason = ""
        self._cached = {"device": 0, "host": 0, "storage": 0}
        self._uncached: dict[str, int] = {}

    def admitted(self, plan: ResumePlan, page_size: int) -> None:
        on_device = min(plan.position, plan.anchor_pages * page_size)
        self._cached = {"device": on_device, "host": plan.position - on_device, "storage": 0}
        for span in plan.uncached:
            pages = self._uncached.get(str(span.reason), 0) + span.end_page - span.first_page
            self._uncached[str(span.reason)] = pages

    def drawn(self, sampled: Sampled) -> bool:
        """Takes a token; True when a stop string is complete with it."""
        if self._finish_reason:
            return False
        self._sampled.append(sampled)
        if self._detokenizer is None or sampled.token_id in self.request.stop_token_ids:
            return False
        released = self._stops.feed(self._detokenizer.feed([sampled.token_id]))
        self._text.append(released.text)
        if released.stop is not None:
            self._finish_reason = "stop"
        return released.stop is not None

    def finished(self, reason: str) -> None:
        if self._finish_reason:
            return
        self._finish_reason = reason
        if self._detokenizer is not None:
            released = self._stops.feed(self._detokenizer.flush())
            self._text += [released.text, self._stops.flush()]

    def completion(self) -> Completion:
        return Completion(
            prompt_token_ids=tuple(self.request.token_ids.tolist()),
            token_ids=tuple(sampled.token_id for sampled in self._sampled),
            text="".join(self._text),
            finish_reason=self._finish_reason,
            logprobs=tuple(s.logprobs for s in self._sampled if s.logprobs),
            cached_tokens=self._cached,
            uncached_reasons=self._uncached,
        )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(not isinstance(item, str | Sequence) for item in listed):
        return [listed]  # type: ignore[list-item]  # a single list of token ids
    return listed  # type: ignore[return-value]


def _one_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if sampling is None:
        return [SamplingParams()] * num_prompts
    if isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    if len(sampling) != num_prompts:
        raise InvalidRequest(
            f"{len(sampling)} SamplingParams for {num_prompts} prompts", "sampling"
        )
    return list(sampling)


def _tokenizer_if_there(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
