"""Conversations made up from a seed: stories with questions, words to repeat, small sums.

A story is facts ("The red kite is in Oslo.") with distraction in between. No subject has two
places, so each question has one answer, which is in the text alone. A model that lost or mixed up
its state answers with another city.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.demo import vocabulary_words as words

LARGEST_TERM = 20


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; `role` is system, user or assistant."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Fact:
    """The place of one thing."""

    subject: str
    city: str

    @property
    def sentence(self) -> str:
        return f"The {self.subject} is in {self.city}."

    @property
    def question(self) -> str:
        return f"Where is the {self.subject}?"


@dataclass(frozen=True, slots=True)
class Story:
    """Sentences in order, and the facts among them."""

    sentences: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def facts(rng: Random, count: int) -> tuple[Fact, ...]:
    """Facts about `count` different things; a city may hold several of them."""
    subjects = rng.sample([f"{c} {n}" for c in words.COLOURS for n in words.NOUNS], count)
    return tuple(Fact(subject, rng.choice(words.CITIES)) for subject in subjects)


def distraction(rng: Random) -> str:
    """One sentence that gives no thing's place, though it may name a city."""
    pick = rng.choice
    spot, other_spot, mood = pick(words.SPOTS), pick(words.SPOTS), pick(words.MOODS)
    animal, deed, time = pick(words.ANIMALS), pick(words.DEEDS), pick(words.TIMES)
    return pick(
        (
            f"The {mood} {animal} {deed} by the {spot}.",
            f"The {mood} {animal} {deed} in the {time}.",
            f"A {animal} {deed} in the {time}.",
            f"{pick(words.WEATHER)} comes over the {spot} in the {time}.",
            f"People in {pick(words.CITIES)} like the {time}.",
            f"The {spot} is {mood} and the {other_spot} is {pick(words.MOODS)}.",
            f"Many {animal} friends walk to the {spot}.",
        )
    )


def story(rng: Random, *, num_facts: int, num_distractions: int) -> Story:
    """A story with its facts at random places among its distractions."""
    chosen = facts(rng, num_facts)
    sentences = [fact.sentence for fact in chosen]
    sentences += [distraction(rng) for _ in range(num_distractions)]
    rng.shuffle(sentences)
    return Story(tuple(sentences), chosen)


def asked(fact: Fact) -> list[Message]:
    """A question and its answer."""
    return [Message("user", fact.question), Message("assistant", fact.sentence)]


def sum_turn(rng: Random) -> list[Message]:
    """A small sum and its answer."""
    left, right = rng.randint(0, LARGEST_TERM), rng.randint(0, LARGEST_TERM)
    return [
        Message("user", f"What is {left} + {right}?"),
        Message("assistant", f"{left} + {right} = {left + right}."),
    ]


def copy_turn(rng: Random) -> list[Message]:
    """Different words to repeat."""
    known = (*words.NOUNS, *words.SPOTS, *words.ANIMALS, *words.COLOURS)
    text = " ".join(rng.sample(known, rng.randint(2, 10)))
    return [Message("user", f"Repeat: {text}"), Message("assistant", text)]


def greeting_turn(rng: Random) -> list[Message]:
    """A greeting, always with the same answer."""
    hello = rng.choice(("Hello!", "Hi!", "Good morning!", "Who are you?"))
    answer = "I am the Ferryman demo. Tell me where things are, then ask me."
    return [Message("user", hello), Message("assistant", answer)]
