"""The ways to an answer that are compared with the cold run, each with the proof that it was taken.

A way differs from the cold run in one thing. An answer without its proof is not compared: it is
given back as `NotTried`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.engine.host_fed import HostMemory
from tools.bits.compared_answer import NotTried
from tools.bits.measured_engine import (
    MeasuredAnswer,
    MeasuredCase,
    MixingEngine,
    PutAwayEngine,
    RetractedEngine,
)
from tools.bits.models import PAGE_SIZE, Prompt

MIXED_CHUNK = 128
"""Tokens of a step without running requests; beside them a prompt gets at most a fourth."""
Tried = MeasuredAnswer | NotTried
Run = Callable[[MeasuredCase], Iterator[Tried]]


@dataclass(frozen=True, slots=True)
class ReuseWay:
    """A way by its name in the table."""

    name: str
    meaning: str
    run: Run


def again(case: MeasuredCase) -> Iterator[Tried]:
    with case.engine() as engine:
        for prompt in case.model.prompts:
            yield engine.answer(prompt, case.num_tokens)


def chunked(size: int, case: MeasuredCase) -> Iterator[Tried]:
    with case.engine(chunk_tokens=size) as engine:
        for prompt in case.model.prompts:
            answer = engine.answer(prompt, case.num_tokens)
            expected = (*range(size, len(prompt), size), len(prompt))
            if answer.chunk_ends == expected and len(expected) > 1:
                yield answer
            else:
                yield NotTried(f"chunks ended at {_listed(answer.chunk_ends)}")


def deepest(length: int) -> int:
    """The last position at which a prompt of `length` tokens can be resumed."""
    return (length - 1) // PAGE_SIZE * PAGE_SIZE


def hit_depth(depth: str, length: int) -> int:
    """The position of a hit in a prompt of `length` tokens: the first page end, one in the middle,
    or the last."""
    last = deepest(length)
    middle = last // 2 // PAGE_SIZE * PAGE_SIZE
    return {"first": min(PAGE_SIZE, last), "middle": middle, "last": last}[depth]


def device_hit(depth: str, case: MeasuredCase) -> Iterator[Tried]:
    """Another prompt with the same first pages has left the state."""
    with case.engine(prefix_cache=True, snapshot_grid=PAGE_SIZE) as engine:
        for prompt in case.model.prompts:
            position = hit_depth(depth, len(prompt))
            engine.forget()
            engine.answer(donor(prompt, position), 1)
            answer = engine.answer(prompt, case.num_tokens)
            yield _found(answer, "device", position)


def donor(prompt: Prompt, position: int) -> Prompt:
    """A prompt that shares exactly the tokens before `position`."""
    other = next(token for token in prompt if token != prompt[position])
    return (*prompt[:position], other)


def host_hit(case: MeasuredCase) -> Iterator[Tried]:
    with case.engine(prefix_cache=True) as engine:
        for prompt in case.model.prompts:
            engine.attach(HostMemory())
            engine.answer(prompt, 1)
            engine.write_through(prompt)
            engine.forget()
            answer = engine.answer(prompt, case.num_tokens)
            yield _found(answer, "host", deepest(len(prompt)))


def _found(answer: MeasuredAnswer, tier: str, position: int) -> Tried:
    if position and answer.cached[tier] == position:
        return answer
    return NotTried(f"{answer.cached[tier]} tokens came from the {tier}, not {position}")


def batched(size: int, case: MeasuredCase) -> Iterator[Tried]:
    """Other prompts fill the batch. They are answered a little longer, so it stays full."""
    prompts = case.model.prompts
    with case.engine(max_running=size) as engine:
        for first in range(0, len(prompts), size):
            group = prompts[first : first + size]
            others = companions(prompts, size - len(group))
            # Compared prompts stand last: others are before them in every step.
            lengths = [case.num_tokens + 8] * len(others) + [case.num_tokens] * len(group)
            # Half of the others ask for the model alone, where there is an adapter.
            answers = engine.answers([*others, *group], lengths, len(others) // 2)
            for answer in answers[len(others) :]:
                is_full = answer.neighbours == size
                yield answer if is_full else NotTried(f"{answer.neighbours} requests in a step")


def mixed(case: MeasuredCase) -> Iterator[Tried]:
    """Each prompt is computed beside tokens of those before it, and its tokens beside those after
    it. They come one after another: a step has no room for two prompts."""
    if case.everywhere.get("device", "cpu") != "cpu":
        yield from _impossible("a card computes prompts and tokens in turns", case)
        return
    prompts = case.model.prompts
    first, last = companions(prompts, 2)
    size = len(prompts) + 2
    options = {"chunk_tokens": MIXED_CHUNK, "max_running": size}
    with case.engine_of(MixingEngine, **options) as engine:
        lengths = [case.num_tokens * size, *[case.num_tokens] * (size - 1)]
        for answer in engine.answers([first, *prompts, last], lengths)[1:-1]:
            if answer.mixed == (True, True):
                yield answer
            else:
                yield NotTried(f"mixed steps drew first and later tokens: {answer.mixed}")


def companions(prompts: Sequence[Prompt], number: int) -> list[Prompt]:
    """Other prompts for a batch: each is one of the prompts, turned by a few tokens."""
    turned = [(prompts[index % len(prompts)], 3 + index % 11) for index in range(number)]
    return [prompt[turn:] + prompt[:turn] for prompt, turn in turned]


def drafted(draft: str, case: MeasuredCase) -> Iterator[Tried]:
    """`draft` is "ngram", "mtp", or "itself": the model as its own draft model."""
    if draft == "mtp" and not case.model.has_own_layer:
        yield from _impossible("the model has no such layer", case)
        return
    if draft != "ngram" and case.model.served.adapter:
        yield from _impossible("with adapters drafts come from the text alone", case)
        return
    named: str | Path = case.model.folder if draft == "itself" else draft
    with case.engine(draft=named) as engine:
        for prompt in case.model.prompts:
            before = engine.counts.drafts.accepted
            answer = engine.answer(prompt, case.num_tokens)
            if engine.counts.drafts.accepted > before:
                yield answer
            else:
                yield NotTried("no draft was accepted")


def retracted(case: MeasuredCase) -> Iterator[Tried]:
    with case.engine_of(RetractedEngine, prefix_cache=True) as engine:
        for prompt in case.model.prompts:
            engine.forget()
            before = engine.counts.retractions
            answer = _interrupted(engine, prompt, case)
            is_retracted = engine.counts.retractions == before + 1
            yield answer if is_retracted else NotTried("the request was not retracted")


def put_away(case: MeasuredCase) -> Iterator[Tried]:
    with case.engine_of(PutAwayEngine, prefix_cache=True) as engine:
        for prompt in case.model.prompts:
            engine.forget()
            engine.attach(HostMemory())
            engine.resumed.clear()
            answer = _interrupted(engine, prompt, case)
            is_loaded = any(plan.loads for plan in engine.resumed)
            yield answer if is_loaded else NotTried("nothing was loaded from the host")


def _interrupted(engine: RetractedEngine, prompt: Prompt, case: MeasuredCase) -> MeasuredAnswer:
    """Retracted late enough that decode has left a state of its own."""
    engine.retract_after = case.num_tokens * 7 // 8
    return engine.answer(prompt, case.num_tokens)


def next_turn(number: int, case: MeasuredCase) -> Iterator[Tried]:
    """The conversation goes on, on the state that decoding left."""
    with case.engine(prefix_cache=True) as engine:
        for prompt in case.model.prompts:
            engine.forget()
            history, asked = prompt, case.model.turns[: number - 1]
            for turn in asked:
                computed = len(history)
                answer = engine.answer(history, case.num_tokens)
                history = (*history, *answer.token_ids, *turn)
            answer = engine.answer(history, case.num_tokens)
            on_device = answer.cached["device"]
            if on_device > computed:
                yield answer
            else:
                yield NotTried(f"{on_device} tokens were found: none of decode's state")


def on_threads(number: int, case: MeasuredCase) -> Iterator[Tried]:
    with case.engine(num_threads=number) as engine:
        for prompt in case.model.prompts:
            answer = engine.answer(prompt, case.num_tokens)
            is_so = answer.threads == {number}
            yield answer if is_so else NotTried(f"steps ran on {_listed(answer.threads)} threads")


def _impossible(reason: str, case: MeasuredCase) -> Iterator[Tried]:
    yield from [NotTried(reason, is_possible=False)] * len(case.model.prompts)


def replayed(case: MeasuredCase) -> Iterator[Tried]:
    if case.model.served.adapter:
        yield from _impossible("steps with adapters are launched", case)
        return
    with case.engine(replay_steps=True) as engine:
        for prompt in case.model.prompts:
            answer = engine.answer(prompt, case.num_tokens)
            if answer.replays:
                yield answer
            elif answer.refusal:
                yield NotTried(f"its steps cannot be recorded: {answer.refusal}", False)
            else:
                yield NotTried("no step was replayed")


def overlapped(case: MeasuredCase) -> Iterator[Tried]:
    with case.engine(overlap=True) as engine:
        for prompt in case.model.prompts:
            answer = engine.answer(prompt, case.num_tokens)
            yield answer if engine.in_flight > 1 else NotTried("no two steps were in flight")


def _listed(numbers: Any) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


WAYS: Mapping[str, ReuseWay] = {
    way.name: way
    for way in (
        ReuseWay("again", "the cold run once more", again),
        *(
            ReuseWay(f"chunks-{size}", f"prefill in chunks of {size}", partial(chunked, size))
            for size in (16, 32, 48, 37)
        ),
        *(
            ReuseWay(f"hit-{depth}", f"a hit at the {depth} page end", partial(device_hit, depth))
            for depth in ("first", "middle", "last")
        ),
        ReuseWay("host", "loaded from the host", host_hit),
        *(
            ReuseWay(f"batch-{size}", f"{size} requests at once", partial(batched, size))
            for size in (6, 24, 48)
        ),
        ReuseWay("mixed", "prompts and tokens in one step", mixed),
        ReuseWay("drafts-lookup", "drafts from the text", partial(drafted, "ngram")),
        ReuseWay("drafts-model", "drafts by the model itself", partial(drafted, "itself")),
        ReuseWay("drafts-layer", "drafts by its own layer", partial(drafted, "mtp")),
        ReuseWay("retracted", "retracted, resumed on the device", retracted),
        ReuseWay("retracted-host", "retracted, resumed from the host", put_away),
        *(
            ReuseWay(f"turn-{n}", f"turn {n} on decode's state", partial(next_turn, n))
            for n in (2, 3)
        ),
        *(
            ReuseWay(f"threads-{n}", f"the cold run on {n} threads", partial(on_threads, n))
            for n in (2, 3)
        ),
        ReuseWay("replay", "recorded decode steps", replayed),
        ReuseWay("overlap", "two steps in flight", overlapped),
    )
}
"""All ways, in the order of the table's rows."""
