"""Prompts made of short facts, whose answers are in the prompt and nowhere else.

The words are those of the demo model, which any other model knows as well. A state that is lost or
mixed up shows in the answer: the wrong city.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

COLOURS = tuple("red blue green white black golden silver purple orange brown pink grey".split())
THINGS = tuple(
    "kite lamp boat drum coat ring book clock chair crown piano violin basket bottle candle carpet "
    "mirror letter hammer helmet ladder lantern medal pillow ribbon saddle statue sword".split()
)
PLACES = tuple(
    "Oslo Rome Paris London Berlin Madrid Lisbon Vienna Prague Warsaw Athens Dublin Cairo Tunis "
    "Lagos Nairobi Dakar Accra Tokyo Osaka Seoul Beijing Delhi Mumbai Hanoi Bangkok Manila Lima "
    "Quito Bogota Havana Toronto Boston Chicago Denver Dallas Miami Seattle".split()
)
WORDS_OF_A_FACT = 6


@dataclass(frozen=True, slots=True)
class StoryFact:
    """One thing and its place."""

    colour: str
    thing: str
    place: str

    def __str__(self) -> str:
        return f"The {self.colour} {self.thing} is in {self.place}."

    @property
    def question(self) -> str:
        return f"Where is the {self.colour} {self.thing}?"


@dataclass(frozen=True, slots=True)
class FactStory:
    """Facts in an order; no two are about the same thing."""

    facts: tuple[StoryFact, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.facts))

    def first(self, num_words: int) -> str:
        """Its first words: a prefix that may end within a fact."""
        return " ".join(str(self).split()[:num_words])

    @property
    def num_words(self) -> int:
        return WORDS_OF_A_FACT * len(self.facts)


def make_story(random: Random, num_facts: int) -> FactStory:
    """A story of `num_facts` facts, at most one for each thing of each colour."""
    pairs = random.sample([(colour, thing) for colour in COLOURS for thing in THINGS], num_facts)
    return FactStory(tuple(StoryFact(*pair, random.choice(PLACES)) for pair in pairs))
