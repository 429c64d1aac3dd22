"""Layouts of a story and its questions: in one message, in several, in plain text.

Each returns messages. A `plain` message is text outside of any turn (for completions without a chat
template), and an `answer` follows it.
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
from tools.demo.tool_turns import call_turn, idle_tool_turn, literal_turn

SYSTEM = "Answer questions about the story."
NOTED = "I will remember that."


def questions(turns: Iterable[Fact]) -> list[Message]:
    """One turn a fact."""
    return [message for fact in turns for message in asked(fact)]


def in_one_message(given_story: Story, turns: list[Fact]) -> list[Message]:
    """The story and the first question in the first message."""
    first = [
        Message("user", f"{given_story.text}\n{turns[0].question}"),
        Message("assistant", turns[0].sentence),
    ]
    return first + questions(turns[1:])


def under_a_system_message(given_story: Story, turns: list[Fact]) -> list[Message]:
    """As `in_one_message`, with a system message before it."""
    return [Message("system", SYSTEM), *in_one_message(given_story, turns)]


def as_the_system_message(given_story: Story, turns: list[Fact]) -> list[Message]:
    """The story is the system message; users only ask."""
    return [Message("system", given_story.text), *questions(turns)]


def in_parts(given_story: Story, turns: list[Fact]) -> list[Message]:
    """The story arrives in four messages, each acknowledged, before the questions."""
    step = -(-len(given_story.sentences) // 4)
    messages: list[Message] = []
    for start in range(0, len(given_story.sentences), step):
        messages.append(Message("user", " ".join(given_story.sentences[start : start + step])))
        messages.append(Message("assistant", NOTED))
    return messages + questions(turns)


def in_plain_text(given_story: Story, turns: list[Fact]) -> list[Message]:
    """No chat: "Question: …" and "Answer:" as lines under the story."""
    messages: list[Message] = []
    for index, fact in enumerate(turns):
        before = given_story.text if index == 0 else ""
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
TOOL_TURNS = (call_turn, literal_turn, idle_tool_turn)
OTHER_TURNS = (*2 * (sum_turn,), *2 * (copy_turn,), greeting_turn, *3 * TOOL_TURNS)

# Approximate tokens of a fact, of a distraction, and of a question with its answer.
FACT_LEN, DISTRACTION_LEN, QUESTION_LEN = 7, 9, 17


def with_other_turns(rng: Random, messages: list[Message]) -> list[Message]:
    """The messages of a chat, with sums, copies, greetings and calls of tools between the turns."""
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
    given_story = story(rng, num_facts=num_facts, num_distractions=num_distractions)
    turns: list[Fact] = []
    while len(turns) * QUESTION_LEN < length - told_len + 64:
        turns += rng.sample(given_story.facts, len(given_story.facts))
    layout = rng.choice(tuple(LAYOUTS.values()))
    messages = layout(given_story, turns)
    if layout is not in_plain_text and rng.random() < 0.2:
        return with_other_turns(rng, messages)
    return messages


def small_talk(rng: Random, length: int) -> list[Message]:
    """A conversation of sums, copies, greetings and calls of tools only."""
    turn = rng.choice(OTHER_TURNS)
    mixed = rng.random() < 0.5
    messages: list[Message] = []
    for _ in range(length // 8):
        messages += (rng.choice(OTHER_TURNS) if mixed else turn)(rng)
    return messages


def conversation(rng: Random, length: int, *, talk_share: float) -> list[Message]:
    """A training text of at least `length` tokens; `talk_share` is the share of small talk."""
    kind = small_talk if rng.random() < talk_share else recall
    return kind(rng, length)
