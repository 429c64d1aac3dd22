"""Workloads: sessions whose turns follow each other, each with its prompt and its limits.

Words stand for tokens: nearly all words of these texts are one token in common vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ferryman.errors import ConfigError
from ferryman_bench.endpoint.inquiry import ChatMessage, Inquiry
from ferryman_bench.story import WORDS_OF_A_FACT, make_story

MOST_FACTS = 300
# Tools and letters of their schemas in requests of agents, as recorded in November 2026.
AGENT_SHAPES = {
    "claude-code 2.1.332": (12, 6671),
    "codex 0.171.0": (9, 6171),
    "opencode 1.18.33": (10, 4430),
    "qwen-code 0.24.4": (14, 5579),
    "pi 0.73.1": (4, 1522),
    "mini-swe-agent 2.4.6": (1, 220),
}
_LETTERS_OF_A_TOOL = 130
WORDS = tuple(
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education".split()
)


@dataclass(frozen=True, slots=True)
class LoadTurn:
    """One message of a user. `answer`, where it is known, is a word that a right answer has;
    `wants_call` says that a right answer calls a tool."""

    text: str
    max_tokens: int
    answer: str = ""
    wants_call: bool = False


@dataclass(frozen=True, slots=True)
class LoadSession:
    """Turns that follow each other, behind a system message ("": none). `arrival_seconds` is a
    trace's; None leaves it to the loop."""

    turns: tuple[LoadTurn, ...]
    system: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrival_seconds: float | None = None

    def inquiry(self, num_turns: int, answers: tuple[str, ...]) -> Inquiry:
        """The conversation up to the turn after `answers`, the server's own to those before."""
        messages = [ChatMessage("system", self.system)] if self.system else []
        for place, turn in enumerate(self.turns[: num_turns + 1]):
            messages.append(ChatMessage("user", turn.text))
            if place < num_turns:
                messages.append(ChatMessage("assistant", answers[place] or "."))
        return Inquiry(tuple(messages), self.turns[num_turns].max_tokens, self.fields)


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The size of a workload: sessions, turns of each, words of a prompt and of what is shared,
    tokens of an answer."""

    num_sessions: int = 32
    num_turns: int = 4
    prompt_words: int = 200
    shared_words: int = 900
    answer_tokens: int = 64
    seed: int = 0

    def words(self, random: Random, count: int) -> str:
        return " ".join(random.choice(WORDS) for _ in range(count))


def random_sessions(shape: LoadShape, random: Random) -> list[LoadSession]:
    """New prompts: nothing can be reused."""
    turns = (
        LoadTurn(shape.words(random, shape.prompt_words), shape.answer_tokens)
        for _ in range(shape.num_sessions)
    )
    return [LoadSession((turn,)) for turn in turns]


def prefix_sessions(shape: LoadShape, random: Random) -> list[LoadSession]:
    """One question each, behind one system message."""
    system = shape.words(random, shape.shared_words)
    return [LoadSession(new.turns, system) for new in random_sessions(shape, random)]


def chat_sessions(shape: LoadShape, random: Random) -> list[LoadSession]:
    """Conversations of several turns, each with a system message of its own."""
    sessions = []
    for _ in range(shape.num_sessions):
        system = shape.words(random, shape.shared_words)
        texts = [shape.words(random, shape.prompt_words) for _ in range(shape.num_turns)]
        sessions.append(
            LoadSession(tuple(LoadTurn(text, shape.answer_tokens) for text in texts), system)
        )
    return sessions


def agent_sessions(shape: LoadShape, random: Random) -> list[LoadSession]:
    """Sessions of agents: all of one client share a system message and tools; a turn is a result
    of a tool, of any length up to twice the prompt's."""
    kinds = [
        (shape.words(random, shape.shared_words), {"tools": _tools(random, *sizes)})
        for sizes in AGENT_SHAPES.values()
    ]
    sessions = []
    for number in range(shape.num_sessions):
        system, fields = kinds[number % len(kinds)]
        lengths = [random.randint(1, 2 * shape.prompt_words) for _ in range(shape.num_turns)]
        turns = (LoadTurn(shape.words(random, count), shape.answer_tokens) for count in lengths)
        sessions.append(LoadSession(tuple(turns), system, fields))
    return sessions


def tool_sessions(shape: LoadShape, random: Random) -> list[LoadSession]:
    """A question each that has to be answered by a call."""
    sessions = []
    for story in (make_story(random, 1) for _ in range(shape.num_sessions)):
        text = f"Look up the weather in {story.facts[0].place} with the tool."
        turn = LoadTurn(text, shape.answer_tokens, wants_call=True)
        fields = {"tools": _tools(random, 1, _LETTERS_OF_A_TOOL), "tool_choice": "required"}
        sessions.append(LoadSession((turn,), fields=fields))
    return sessions


def recall_sessions(shape: LoadShape, random: Random) -> list[LoadSession]:
    """Facts, and several questions about them, one a turn; the right answers are known."""
    num_facts = min(MOST_FACTS, max(1, shape.shared_words // WORDS_OF_A_FACT))
    sessions = []
    for _ in range(shape.num_sessions):
        story, turns = make_story(random, num_facts), list[LoadTurn]()
        for place in range(shape.num_turns):
            fact = random.choice(story.facts)
            text = f"{story} {fact.question}" if place == 0 else fact.question
            turns.append(LoadTurn(text, shape.answer_tokens, answer=fact.place))
        sessions.append(LoadSession(tuple(turns)))
    return sessions


WORKLOADS: dict[str, Callable[[LoadShape, Random], list[LoadSession]]] = {
    "random": random_sessions,
    "prefix": prefix_sessions,
    "chat": chat_sessions,
    "agents": agent_sessions,
    "tools": tool_sessions,
    "recall": recall_sessions,
}


def made_sessions(name: str, shape: LoadShape) -> list[LoadSession]:
    """The sessions of a workload by its name; the same shape makes the same. Raises ConfigError."""
    if name not in WORKLOADS:
        raise ConfigError(f"--workload {name}: give {', '.join(WORKLOADS)}, or --trace FILE")
    return WORKLOADS[name](shape, Random(shape.seed))


def _tools(random: Random, count: int, letters: int) -> list[dict[str, Any]]:
    """Tools whose schemas have about so many letters in all."""
    tools = []
    for number in range(count):
        num_words = max(1, (letters // count - _LETTERS_OF_A_TOOL) // WORDS_OF_A_FACT)
        described = " ".join(random.choice(WORDS) for _ in range(num_words))
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        function = {"name": f"tool_{number}", "description": described, "parameters": schema}
        tools.append({"type": "function", "function": function})
    return tools
