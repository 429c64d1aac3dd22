"""Ways to lay out a story and its questions: in one message, in several, in plain text.

Each returns messages; a `plain` message is text outside of any turn (for completions without a
chat template), and `answer` is what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from tools.demo.stories import (
    Fact,
    Message,
    Story,
    asked,
    copy_turn,
    greeting_turn,
    story,
    sum_turn,
)

SYSTEM = "Answer questions about the story."
NOTED = "I will remember that."


def questions(turns: Iterable[Fact]) -> list[Message]:
    """One turn a fact."""
    return [message for fact in turns for message in asked(fact)]


def in_one_message(told: Story, turns: list[Fact]) -> list[Message]:
    """The story and the first question in the first message."""
    first = [
        Message("user", f"{told.text}\n{turns[0].question}"),
        Message("assistant", turns[0].sentence),
    ]
    return first + questions(turns[1:])


def under_a_system_message(told: Story, turns: list[Fact]) -> list[Message]:
    """As `in_one_message`, with a system message before it."""
    return [Message("system", SYSTEM), *in_one_message(told, turns)]


def as_the_system_message(told: Story, turns: list[Fact]) -> list[Message]:
    """The story is the system message; users only ask."""
    return [Message("system", told.text), *questions(turns)]


def in_parts(told: Story, turns: list[Fact]) -> list[Message]:
    """The story arrives in four messages, each acknowledged, before the questions."""
    step = -(-len(told.sentences) // 4)
    messages: list[Message] = []
    for start in range(0, len(told.sentences), step):
        messages.append(Message("user", " ".join(told.sentences[start : start + step])))
        messages.append(Message("assistant", NOTED))
    return messages + questions(turns)


def in_plain_text(told: Story, turns: list[Fact]) -> list[Message]:
    """No chat: "Question: …" and "Answer:" as lines under the story."""
    messages: list[Message] = []
    for index, fact in enumerate(turns):
        before = told.text if index == 0 else ""
        messages.append(Message("plain", f"{before}\nQuestion: {fact.question}\nAnswer:"))
        messages.append(Message("answer", f" {fact.sentence}"))
    return messages


Layout = Callable[[Story, list[Fact]], list[Message]]
LAYOUTS: dict[str, Layout] = {
    "one message": in_one_message,
    "system and user": under_a_system_message,
    "story as system": as_the_system_message,
    "in parts": in_parts,
    "plain text": in_plain_text,
}
OTHER_TURNS = (*4 * (sum_turn,), *4 * (copy_turn,), greeting_turn)

# Tokens that a fact, a distraction and a question with its answer take, about.
FACT_LEN, DISTRACTION_LEN, QUESTION_LEN = 7, 9, 17


def with_other_turns(rng: Random, messages: list[Message]) -> list[Message]:
    """Sums, copies and greetings put between the turns of a chat."""
    mixed: list[Message] = []
    for message in messages:
        mixed.append(message)
        if message.role == "assistant" and rng.random() < 0.25:
            mixed += rng.choice(OTHER_TURNS)(rng)
    return mixed


def recall(rng: Random, length: int) -> list[Message]:
    """A story with questions, of at least `length` tokens."""
    told_len = length * rng.uniform(0.3, 0.9)
    share = rng.uniform(0.2, 0.9)
    num_facts = min(max(1, int(told_len * share / FACT_LEN)), 200)
    num_distractions = int((told_len - num_facts * FACT_LEN) / DISTRACTION_LEN) + 1
    told = story(rng, num_facts=num_facts, num_distractions=num_distractions)
    turns: list[Fact] = []
    while len(turns) * QUESTION_LEN < length - told_len + 64:
        turns += rng.sample(told.facts, len(told.facts))
    layout = rng.choice(tuple(LAYOUTS.values()))
    messages = layout(told, turns)
    if layout is not in_plain_text and rng.random() < 0.2:
        return with_other_turns(rng, messages)
    return messages


def small_talk(rng: Random, length: int) -> list[Message]:
    """Nothing but sums, copies and greetings."""
    turn = rng.choice(OTHER_TURNS)
    mixed = rng.random() < 0.5
    messages: list[Message] = []
    for _ in range(length // 8):
        messages += (rng.choice(OTHER_TURNS) if mixed else turn)(rng)
    return messages


def conversation(rng: Random, length: int, *, talk_share: float) -> list[Message]:
    """Something to learn from, of at least `length` tokens; `talk_share` is small talk's part."""
    kind = small_talk if rng.random() < talk_share else recall
    return kind(rng, length)
