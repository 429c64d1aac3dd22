"""Examination papers from held-out seeds: prompts with the answers that are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer
from tools.demo.conversations import (
    DISTRACTION_LEN,
    FACT_LEN,
    LAYOUTS,
    Layout,
    in_one_message,
    with_other_turns,
)
from tools.demo.stories import Message, Story, copy_turn, story, sum_turn


@dataclass(frozen=True, slots=True)
class Exam:
    """One line of the table: a name, a number of papers, and how a paper is made."""

    name: str
    papers: int
    write: Callable[[Random], list[Message]]


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    """How many token ids the text takes."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def story_of(tokenizer: Tokenizer, rng: Random, length: int) -> Story:
    """A story of `length` tokens less one sentence at most; a tenth to most of it are facts."""
    num_facts = max(2, int(length * rng.uniform(0.1, 0.8) / FACT_LEN))
    room = length - num_facts * FACT_LEN
    longest = story(rng, num_facts=num_facts, num_distractions=room // DISTRACTION_LEN * 2 + 2)
    told = {fact.sentence for fact in longest.facts}
    costs = [num_tokens(tokenizer, f" {sentence}") for sentence in longest.sentences]
    spare = sum(costs) - length
    kept: list[str] = []
    for sentence, cost in zip(longest.sentences, costs, strict=True):
        if spare > 0 and sentence not in told:
            spare -= cost
        else:
            kept.append(sentence)
    rng.shuffle(kept)
    return Story(tuple(kept), longest.facts)


@dataclass(frozen=True, slots=True)
class Recall:
    """Papers that ask `questions` facts of a story, the whole prompt about `length` tokens."""

    tokenizer: Tokenizer
    length: int
    questions: int = 1
    layout: Layout = in_one_message

    def __call__(self, rng: Random) -> list[Message]:
        told = story_of(self.tokenizer, rng, self.length - 12)
        turns = rng.sample(told.facts, min(self.questions, len(told.facts)))
        return self.layout(told, turns)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Recall with sums, copies and greetings between the questions."""

    recall: Recall

    def __call__(self, rng: Random) -> list[Message]:
        return with_other_turns(rng, self.recall(rng))


def exams(tokenizer: Tokenizer, papers: int) -> list[Exam]:
    """The whole table."""
    table = [
        Exam(f"recall, {length:,} tokens", papers, Recall(tokenizer, length))
        for length in (256, 1024, 2000, 3000)
    ]
    table += [
        Exam(f"recall, 2,000 tokens, {name}", papers // 2, Recall(tokenizer, 2000, layout=layout))
        for name, layout in LAYOUTS.items()
        if layout is not in_one_message
    ]
    table.append(Exam("8 questions, 2,000 tokens", papers // 4, Recall(tokenizer, 2000, 8)))
    table.append(
        Exam("8 questions and talk, 1,024", papers // 4, Mixed(Recall(tokenizer, 1024, 8)))
    )
    table.append(Exam("copies of 2 to 10 words", papers, copy_turn))
    return [*table, Exam("sums to 20 + 20", papers, sum_turn)]
