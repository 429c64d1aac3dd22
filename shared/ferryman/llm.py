"""The offline engine: the workers' schedule, engine and cache in one process, without servers.

with LLM(model="DIR", dtype="float64", page_size=16) as llm:
    done = llm.generate(["The red kite is in"], SamplingParams(max_tokens=8, temperature=0.0))
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, Self

from ferryman.cache.keys import TokenIds, as_token_ids, page_keys, root_key
from ferryman.cache.manifest import Exactness
from ferryman.cache.resume import ResumePlan
from ferryman.cache.slots import Ledger
from ferryman.engine.engine import build_engine
from ferryman.errors import ConfigError, InvalidRequest, UnknownModel
from ferryman.gguf.documents import has_document
from ferryman.grammar.compiler import CompiledGrammar
from ferryman.hub.models import model_folder
from ferryman.schedule.batch import Sampled
from ferryman.schedule.drafting import DraftCounts
from ferryman.schedule.events import (
    Drawn,
    Event,
    Finished,
    PromptScored,
    RequestFailed,
    Retracted,
    SequenceAdmitted,
)
from ferryman.schedule.prompt_scores import Position, PromptScores, ScoreBook
from ferryman.schedule.request import NO_ADAPTER, Adapter, Request, SamplingParams
from ferryman.schedule.sequence import Goal
from ferryman.schedule.token_rules import check_vocabulary
from ferryman.settings.declaration import suggestion
from ferryman.settings.engine import engine_options
from ferryman.sizing.memory_plan import CARD_CHUNK_TOKENS, ROWS, complete_options, limit_of
from ferryman.text.stops import StopStrings
from ferryman.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
DEFAULTS: Mapping[str, object] = {"dtype": "bfloat16", "max_running": 8}
UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt.

    `logprobs` has one dict per token, token id → natural log probability (empty if not requested).
    `prompt_logprobs` has one entry per token of the prompt (empty if not requested): None for the
    first, else the log probabilities and ranks of that token and of the likeliest ones.
    `cached_tokens` counts reused prompt tokens by tier; `uncached_reasons` counts the computed
    pages by reason. `exactness` is that of all answers of this model.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[Mapping[int, float], ...]
    cached_tokens: Mapping[str, int]
    uncached_reasons: Mapping[str, int]
    exactness: Exactness
    prompt_logprobs: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Counts of events since the engine started; tests use them as proof."""

    prefill_steps: int
    decode_steps: int
    retractions: int
    drafts: DraftCounts


class LLM:
    """A model, loaded and ready. `close`, or the end of a `with`, frees its memory.

    `model` is a folder, or an id on the hub, of which `revision=` is a branch, a tag or a commit.

    `options` are those of `ferryman.settings.engine.EngineOptions`, and mean the same: `page_size`,
    `memory_bytes`, `draft`, `tp_size`, and so on; `lora` may be a mapping from name to folder.
    `dtype` is bfloat16 and `max_running` 8 by default, and `chunk_tokens` 2,048 on a card; all
    prompts of a call may wait. Raises ConfigError, saying what to change, for an option or a model
    that cannot work.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        folder = model_folder(str(model), str(options.pop("revision", "")))
        asked = engine_options(model=folder, **{**DEFAULTS, **options})
        if asked.is_on_card and "chunk_tokens" not in options:
            longest = max(CARD_CHUNK_TOKENS, asked.page_size)
            asked = asked.model_copy(update={"chunk_tokens": longest})
        chosen, notes = complete_options(asked)
        for note in notes:
            log.info(note)
        waiting = chosen.model_copy(update={"max_waiting": UNLIMITED})
        self._exit = ExitStack()
        # Also for a caller that never closes: a thread that works while the interpreter ends can
        # abort the whole process.
        self._end = weakref.finalize(self, self._exit.close)
        self._engine = self._exit.enter_context(build_engine(waiting))
        self._root = root_key(self._engine.manifest)
        self._tokenizer = _tokenizer_if_there(folder)
        self._ids = count()
        self._retractions = 0
        for warning in self._engine.capacity.warnings:
            log.warning(warning)
        log.info("capacity %s", self._engine.capacity.explanation)
        if (limit := limit_of(chosen, asked.max_running or ROWS[0])) is not None:
            log.info(limit.sentence)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the forward stream and frees the pools. The end of a process does so, too."""
        self._end()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
    ) -> list[Completion]:
        """Completes every prompt, in the order given. Raises InvalidRequest before any work.

        `adapter` is the name of one in `lora=`, for all prompts or for each; empty for the model
        alone. Raises UnknownModel for another name.
        """
        many = _as_prompts(prompts)
        params = _one_each(sampling, len(many))
        names = [adapter] * len(many) if isinstance(adapter, str) else list(adapter)
        if len(names) != len(many):
            raise InvalidRequest(f"{len(names)} adapters for {len(many)} prompts", "adapter")
        adapters = [self._adapter(name) for name in names]
        answers = {
            answer.request.request_id: answer
            for answer in (self._answer(*each) for each in zip(many, params, adapters, strict=True))
        }
        for answer in answers.values():
            self._engine.scheduler.check(answer.request)
        for answer in answers.values():
            self._submit(answer.request)
        try:
            self._run(answers)
        finally:
            self._abandon(answers)
        exactness = self._engine.manifest.exactness
        return [answer.completion(exactness) for answer in answers.values()]

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
        """The slots of each pool by role."""
        return {str(kind): ledger for kind, ledger in self._engine.scheduler.ledgers().items()}

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is accounted for."""
        self._engine.scheduler.check_integrity()

    # From prompt to request.

    def _adapter(self, name: str) -> Adapter:
        adapters = self._engine.adapters
        if name and name not in adapters:
            near = suggestion(name, adapters)
            raise UnknownModel(f"adapter {name[:80]!r} is not served here{near}", "adapter")
        return adapters.get(name, NO_ADAPTER)

    def _answer(self, prompt: Prompt, params: SamplingParams, adapter: Adapter) -> _Answer:
        token_ids = self._token_ids(prompt)
        params.rules.check_vocabulary(self._engine.vocab_size)
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._engine.eos_token_ids
        if params.stop:
            self._text_tokenizer()
        grammar = self._compiled(params)
        if grammar is not None:
            stops |= grammar.eos_token_ids
        root = self._root
        if adapter.digest:
            root = root_key(self._engine.manifest, adapter=adapter.digest)
        request = Request(
            request_id=f"llm-{next(self._ids)}",
            token_ids=token_ids,
            keys=page_keys(root, token_ids, self._engine.manifest.page_size),
            sampling=params,
            stop_token_ids=stops,
            adapter=adapter,
        )
        return _Answer(request, self._tokenizer, grammar)

    def _compiled(self, params: SamplingParams) -> CompiledGrammar | None:
        """Raises InvalidRequest for a grammar that cannot be served."""
        grammar, grammars = params.grammar, self._engine.grammars
        if grammar is None:
            return None
        if grammars.known(grammar) is None:
            for path, name in grammar.unknown_formats:
                log.warning("%s of the schema holds nothing: format %s is not known", path, name)
        return grammars.compiled(grammar)

    def _token_ids(self, prompt: Prompt) -> TokenIds:
        if isinstance(prompt, str):
            token_ids = self._text_tokenizer().encode(prompt)
            # A tokenizer may have more tokens than the model has rows.
            check_vocabulary(token_ids.tolist(), self._engine.vocab_size, "prompt")
            return token_ids
        if any(not 0 <= token_id < self._engine.vocab_size for token_id in prompt):
            raise InvalidRequest(f"token ids must lie in [0, {self._engine.vocab_size})", "prompt")
        return as_token_ids(prompt)

    def _text_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError("this model folder has no tokenizer.json: give prompts as token ids")
        return self._tokenizer

    # The run.

    def _submit(self, request: Request) -> None:
        self._engine.scheduler.submit(request, Goal.DECODE)

    def _run(self, answers: Mapping[str, _Answer]) -> None:
        pipeline, scheduler = self._engine.pipeline, self._engine.scheduler
        while scheduler.has_work:
            pipeline.fill(monotonic())
            assert pipeline.flights, "work is waiting, yet the scheduler stands still"
            # Waits before the step is taken: an interrupt leaves it for the next call to commit.
            pipeline.flights[0].outcome.exception()
            flight = pipeline.flights.popleft()
            scheduler.commit(flight.plan, flight.outcome.result(), monotonic())
            for event in scheduler.take_events():
                self._apply(event, answers)

    def _apply(self, event: Event, answers: Mapping[str, _Answer]) -> None:
        match event:
            case SequenceAdmitted(request_id, plan, is_resumed) if not is_resumed:
                answers[request_id].admitted(plan, self._engine.manifest.page_size)
            case PromptScored(request_id, scores):
                answers[request_id].scored(scores)
            case Drawn(request_id, _, sampled):
                if answers[request_id].drawn(sampled):
                    self._engine.scheduler.cancel(request_id, monotonic())
            case Finished(request_id, reason, _):
                answers[request_id].finished(str(reason))
            case RequestFailed(error=error):
                raise error
            case Retracted():
                self._retractions += 1
            case _:
                pass

    def _abandon(self, answers: Mapping[str, _Answer]) -> None:
        """Cancels what remains of this call after an error or an interrupt."""
        for request_id in answers:
            self._engine.scheduler.cancel(request_id, monotonic())
        self._engine.scheduler.take_events()


class _Answer:
    """The output of one request so far. A stop string ends it; later tokens are ignored.

    It holds its grammar, so that the engine finds it compiled.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        self.request = request
        self._grammar = grammar
        self._detokenizer = tokenizer.detokenizer(request.token_ids.tolist()) if tokenizer else None
        self._stops = StopStrings(request.sampling.stop)
        self._text: list[str] = []
        self._sampled: list[Sampled] = []
        self._scores = ScoreBook(request.prompt_len)
        self._finish_reason = ""
        self._cached = {"device": 0, "host": 0, "storage": 0}
        self._uncached: dict[str, int] = {}

    def admitted(self, plan: ResumePlan, page_size: int) -> None:
        on_device = min(plan.position, plan.anchor_pages * page_size)
        self._cached = {"device": on_device, "host": plan.position - on_device, "storage": 0}
        for span in plan.uncached:
            pages = self._uncached.get(str(span.reason), 0) + span.end_page - span.first_page
            self._uncached[str(span.reason)] = pages

    def scored(self, scores: PromptScores) -> None:
        self._scores.add(scores)

    def drawn(self, sampled: Sampled) -> bool:
        """Takes a token; True when it completes a stop string."""
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
            if released.stop is not None:
                self._finish_reason = "stop"

    def completion(self, exactness: Exactness) -> Completion:
        return Completion(
            prompt_token_ids=tuple(self.request.token_ids.tolist()),
            token_ids=tuple(sampled.token_id for sampled in self._sampled),
            text="".join(self._text),
            finish_reason=self._finish_reason,
            logprobs=tuple(s.logprobs for s in self._sampled if s.logprobs),
            cached_tokens=self._cached,
            uncached_reasons=self._uncached,
            exactness=exactness,
            prompt_logprobs=self._scores.scores()
            if self.request.prompt_logprobs is not None
            else (),
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
    return Tokenizer.load(folder) if has_document(folder / "tokenizer.json") else None
