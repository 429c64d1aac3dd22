"""An error in preparing a step for one request ends that request; its neighbours get their tokens.

A fault is planted where the work for one request is done: while a step is packed, while its tokens
are drawn, while they are read. Three requests share all steps and the middle one is to blame. The
others are compared with a run in which it is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from tests.grammar.guided_model import save_guided_model
from tests.harness.pair import worker_options
from torch import Tensor

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.engine import runner
from ferryman.engine.engine import Engine, build_engine
from ferryman.engine.forward import draw_tensors, step_tensors, token_source
from ferryman.engine.forward.prepared_step import UnknownAdapter
from ferryman.engine.stream import StreamPoisoned
from ferryman.grammar.compiler import GrammarCompiler
from ferryman.grammar.matcher import GrammarMatcher
from ferryman.model.sampling.inverse_cdf import Filters
from ferryman.model.sampling.sampler import sample
from ferryman.schedule.events import Drawn, Finished, RequestFailed
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.schedule.request import Adapter, Request, SamplingParams
from ferryman.schedule.sequence import Goal
from ferryman.schedule.token_rules import TokenRules

GUILTY = "guilty"
BIAS, SEED, PRESENCE, NUM_BEST = 1.25, 666, 0.625, 7
WORDS = OutputGrammar.regex("(the|a) (ferry|river)[ a-z]*")
MAX_TOKENS = 24


class PreparationBroken(RuntimeError):
    """The error that these tests raise."""


@dataclass(slots=True)
class PlantedFault:
    """Raises while it is armed, as often as it is met; `num_thrown` shows that it was."""

    is_armed: bool = False
    num_thrown: int = 0

    def plant(
        self, to: pytest.MonkeyPatch, owner: Any, name: str, is_guilty: Callable[..., bool]
    ) -> None:
        original = getattr(owner, name)

        def throwing(*args: Any, **kwargs: Any) -> Any:
            if self.is_armed and is_guilty(*args, **kwargs):
                self.num_thrown += 1
                raise PreparationBroken(name)
            return original(*args, **kwargs)

        to.setattr(owner, name, throwing)


@dataclass(frozen=True, slots=True)
class PreparationStage:
    """Some work for one request: whose, with which parameters."""

    params: Mapping[str, Any]
    owner: Any
    name: str
    is_guilty: Callable[..., bool]


def is_guilty_place(matcher: GrammarMatcher, *_: Any) -> bool:
    _, source, _ = matcher._compiled.args  # type: ignore[attr-defined]
    return GUILTY in source


GUIDED = {"grammar": OutputGrammar.regex(f"({GUILTY}|[a-z ])*")}
STAGES = {
    "mask": PreparationStage(GUIDED, GrammarMatcher, "fill", is_guilty_place),
    "matcher": PreparationStage(GUIDED, GrammarMatcher, "move_to", is_guilty_place),
    "grammar": PreparationStage(
        GUIDED, GrammarCompiler, "compiled", lambda _, grammar: grammar == GUIDED["grammar"]
    ),
    "sampling table": PreparationStage(
        {"seed": SEED}, draw_tensors, "uniform", lambda seed, _: seed == SEED
    ),
    "token rules": PreparationStage(
        {"rules": TokenRules(logit_bias=((7, BIAS),))},
        draw_tensors,
        "_biases",
        lambda ruled: any((7, BIAS) in draw.params.rules.logit_bias for _, draw in ruled),
    ),
    "rules on the device": PreparationStage(
        {"rules": TokenRules(logit_bias=((7, BIAS),))},
        token_source,
        "apply_rules",
        lambda _, rules, __: bool((rules.biases.values == BIAS).any()),
    ),
    "penalties": PreparationStage(
        {"presence_penalty": PRESENCE},
        token_source,
        "penalise",
        lambda _, __, penalties: bool((penalties.presence == PRESENCE).any()),
    ),
    "logprobs": PreparationStage(
        {"logprobs": NUM_BEST},
        token_source,
        "log_probabilities",
        lambda _, __, num_best: num_best == NUM_BEST,
    ),
    "logprobs of an outcome": PreparationStage(
        {"logprobs": NUM_BEST}, runner, "_logprobs", lambda count, *_: count == NUM_BEST
    ),
}


@dataclass(slots=True)
class Answers:
    """Tokens, ends and errors by request."""

    tokens: dict[str, list[tuple[int, Mapping[int, float]]]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)
    num_steps: int = 0


def request_of(engine: Engine, name: str, prompt: list[int], params: SamplingParams) -> Request:
    ids = as_token_ids(prompt)
    keys = page_keys(root_key(engine.manifest), ids, engine.manifest.page_size)
    return Request(name, ids, keys, params)


def requests_of(engine: Engine, params: Mapping[str, Any]) -> list[Request]:
    """Neighbours with options of all sorts, and the guilty one between them."""
    sampled = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, ignore_eos=True, seed=5)
    neighbour = replace(
        sampled,
        logprobs=2,
        presence_penalty=0.5,
        rules=TokenRules(logit_bias=((9, 2.0),), min_tokens=3),
    )
    guided = replace(sampled, grammar=WORDS, ignore_eos=False)
    guilty = replace(sampled, **{"seed": 9, "ignore_eos": "grammar" not in params, **params})
    return [
        request_of(engine, "free", [10 + i % 90 for i in range(37)], neighbour),
        request_of(engine, GUILTY, [20 + i % 70 for i in range(45)], guilty),
        request_of(engine, "guided", [30 + i % 50 for i in range(29)], guided),
    ]


def submit(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        if request.sampling.grammar is not None:
            engine.grammars.compiled(request.sampling.grammar)  # as the door does
        engine.scheduler.submit(request, Goal.DECODE)


def served(engine: Engine, on_token: Callable[[str, int], None] = lambda *_: None) -> Answers:
    """Takes all requests to their ends. Raises the error of a step."""
    answers, scheduler, flights = Answers(), engine.scheduler, engine.pipeline.flights
    while scheduler.has_work:
        engine.pipeline.fill(monotonic())
        flights[0].outcome.exception(120)
        flight = flights.popleft()
        scheduler.commit(flight.plan, flight.outcome.result(), monotonic())
        answers.num_steps += 1
        for event in scheduler.take_events():
            if isinstance(event, Drawn):
                tokens = answers.tokens.setdefault(event.request_id, [])
                tokens.append((event.sampled.token_id, event.sampled.logprobs))
                on_token(event.request_id, len(tokens))
            elif isinstance(event, Finished):
                answers.finished.append(event.request_id)
            elif isinstance(event, RequestFailed):
                assert event.request_id not in answers.failed, "it fails once"
                answers.failed[event.request_id] = event.error
    while flights:
        flight = flights.popleft()
        scheduler.commit(flight.plan, flight.outcome.result(120), monotonic())
    return answers


def neighbours_are_as_without(engine: Engine, found: Answers, whole: Answers) -> None:
    for name in ("free", "guided"):
        for (token, logs), (right, right_logs) in zip(
            found.tokens[name], whole.tokens[name], strict=True
        ):
            assert token == right
            assert logs == pytest.approx(right_logs, abs=1e-12, rel=0)
    assert sorted(found.finished) == ["free", "guided"]
    everything_is_given_back(engine)


def everything_is_given_back(engine: Engine) -> None:
    engine.scheduler.check_integrity()
    for ledger in engine.scheduler.ledgers().values():
        assert ledger.balances
        assert set(ledger.by_role) <= {"tree"}, "no slot is a request's"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_guided_model(tmp_path_factory.mktemp("isolated"))


WAYS: dict[str, dict[str, Any]] = {
    "one step in flight": {"overlap": False},
    "two steps in flight": {"overlap": True},
    "drafts": {"overlap": True, "draft": "ngram", "draft_tokens": 3},
}


@pytest.fixture(params=WAYS, scope="module")
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    options = worker_options(folder).model_copy(update=WAYS[request.param])
    with build_engine(options) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(engine: Engine) -> Answers:
    """The neighbours by themselves."""
    free, _, guided = requests_of(engine, {})
    submit(engine, [free, guided])
    return served(engine)


# A row keeps its place in a grammar, which is compiled for its first token alone.
CASES = [(stage, num) for stage in STAGES for num in (0, 5) if (stage, num) != ("grammar", 5)]


@pytest.mark.parametrize(("stage", "num_before"), CASES)
def test_an_error_in_preparing_a_step_ends_the_request_that_it_is_about(
    stage: str, num_before: int, engine: Engine, whole: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, place = PlantedFault(is_armed=not num_before), STAGES[stage]

    def on_token(name: str, num_tokens: int) -> None:
        fault.is_armed |= name == GUILTY and num_tokens >= num_before

    submit(engine, requests_of(engine, place.params))
    with monkeypatch.context() as patched:
        fault.plant(patched, place.owner, place.name, place.is_guilty)
        found = served(engine, on_token)
    assert fault.num_thrown
    assert isinstance(found.failed.pop(GUILTY), PreparationBroken)
    assert not found.failed
    assert num_before <= len(found.tokens.get(GUILTY, [])) < MAX_TOKENS
    neighbours_are_as_without(engine, found, whole)


def test_an_adapter_that_the_model_lacks_is_no_answer_of_the_model_alone(
    engine: Engine, whole: Answers
) -> None:
    free, guilty, guided = requests_of(engine, {})
    unknown = replace(guilty, adapter=Adapter(3, "digest"))
    submit(engine, [free, unknown, guided])
    found = served(engine)
    assert isinstance(found.failed.pop(GUILTY), UnknownAdapter)
    assert not found.tokens.get(GUILTY)
    neighbours_are_as_without(engine, found, whole)


def test_scores_that_cannot_be_packed_end_their_request(
    engine: Engine, whole: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = PlantedFault(is_armed=True)
    fault.plant(
        monkeypatch,
        step_tensors,
        "_scores",
        lambda chunks, _: any(w.num_best == NUM_BEST for c in chunks for w in c.scores),
    )
    submit(engine, requests_of(engine, {"prompt_logprobs": NUM_BEST}))
    found = served(engine)
    assert fault.num_thrown
    assert isinstance(found.failed.pop(GUILTY), PreparationBroken)
    neighbours_are_as_without(engine, found, whole)


@contextmanager
def step_fails(words: str) -> Iterator[None]:
    """A step ends with this error; the next one may be refused before its outcome is read."""
    with pytest.raises((PreparationBroken, StreamPoisoned)) as raised:
        yield
    error: BaseException | None = raised.value
    if isinstance(error, StreamPoisoned):
        error = error.__cause__
    assert isinstance(error, PreparationBroken)
    assert str(error) == words


def test_an_error_that_no_request_causes_alone_is_the_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nobody knows what lies in the slots."""

    def broken(*_: Any) -> Any:
        raise PreparationBroken("device")

    with build_engine(worker_options(folder)) as engine:
        requests = requests_of(engine, {})
        monkeypatch.setattr(token_source, "greedy_if_finite", broken)
        monkeypatch.setattr(token_source, "sample", broken)
        submit(engine, requests)
        with step_fails("device"):
            served(engine)


def test_draws_that_fail_only_together_are_an_error_of_the_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sample

    def broken_together(logits: Tensor, filters: Filters) -> Tensor:
        if len(logits) > 1:
            raise PreparationBroken("together")
        return original(logits, filters)

    with build_engine(worker_options(folder)) as engine:
        submit(engine, requests_of(engine, {}))
        monkeypatch.setattr(token_source, "sample", broken_together)
        with step_fails("together"):
            served(engine)


def test_slot_operations_of_a_step_with_a_failed_request_are_executed_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    original = runner.Runner.launch

    def counted(self: runner.Runner, plan: Any) -> Any:
        launched.append(plan.step_id)
        return original(self, plan)

    monkeypatch.setattr(runner.Runner, "launch", counted)
    fault, place = PlantedFault(is_armed=True), STAGES["sampling table"]
    fault.plant(monkeypatch, place.owner, place.name, place.is_guilty)
    submit(engine, requests_of(engine, place.params))
    found = served(engine)
    assert fault.num_thrown
    assert len(set(launched)) == len(launched) >= found.num_steps


@pytest.mark.parametrize("stage", ["mask", "sampling table", "logprobs"])
def test_ranks_agree_on_a_step_with_a_failed_request(
    stage: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone finds the error; the others would wait for its tokens, or hold other state."""
    with build_engine(worker_options(folder, tp_size=2)) as engine:
        free, guilty, guided = requests_of(engine, STAGES[stage].params)
        submit(engine, [free, guided])
        whole = served(engine)
        fault, place = PlantedFault(), STAGES[stage]

        def on_token(name: str, num_tokens: int) -> None:
            fault.is_armed |= name == GUILTY and num_tokens >= 2

        fault.plant(monkeypatch, place.owner, place.name, place.is_guilty)
        submit(engine, [free, guilty, guided])
        found = served(engine, on_token)
        assert fault.num_thrown
        assert isinstance(found.failed.pop(GUILTY), PreparationBroken)
        neighbours_are_as_without(engine, found, whole)
