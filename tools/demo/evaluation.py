"""Examination papers from held-out seeds: prompts with their right answers."""

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
from tools.demo.tool_turns import call_turn, idle_tool_turn, literal_turn


@dataclass(frozen=True, slots=True)
class Exam:
    """One line of the table: its name, its number of papers, and the maker of a paper."""

    name: str
    papers: int
    write: Callable[[Random], list[Message]]


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    """The number of token ids of the text."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def story_of(tokenizer: Tokenizer, rng: Random, length: int) -> Story:
    """A story of `length` tokens less one sentence at most; 10 to 80 % of it are facts."""
    num_facts = max(2, int(length * rng.uniform(0.1, 0.8) / FACT_LEN))
    room = length - num_facts * FACT_LEN
    longest = story(rng, num_facts=num_facts, num_distractions=room // DISTRACTION_LEN * 2 + 2)
    fact_sentences = {fact.sentence for fact in longest.facts}
    costs = [num_tokens(tokenizer, f" {sentence}") for sentence in longest.sentences]
    spare = sum(costs) - length
    kept: list[str] = []
    for sentence, cost in zip(longest.sentences, costs, strict=True):
        if spare > 0 and sentence not in fact_sentences:
            spare -= cost
        else:
            kept.append(sentence)
    rng.shuffle(kept)
    return Story(tuple(kept), longest.facts)


@dataclass(frozen=True, slots=True)
class Recall:
    """Papers on `questions` facts of a story; the whole prompt has about `length` tokens."""

    tokenizer: Tokenizer
    length: int
    questions: int = 1
    layout: Layout = in_one_message

    def __call__(self, rng: Random) -> list[Message]:
        given_story = story_of(self.tokenizer, rng, self.length - 12)
        turns = rng.sample(given_story.facts, min(self.questions, len(given_story.facts)))
        return self.layout(given_story, turns)


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
    table.append(Exam("calls of tools, and their results", papers, call_turn))
    table.append(Exam("tools that are not needed", papers, idle_tool_turn))
    table.append(Exam("text letter by letter", papers, literal_turn))
    return [*table, Exam("sums to 20 + 20", papers, sum_turn)]
