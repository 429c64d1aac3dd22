"""Turns of a chat with tools: calls that fit a question, and text to repeat letter by letter.

The chat template writes the beginning of a call, such as `[find(thing=`, as a system message behind
each message of a user. A question about a place or the weather is answered with the whole call;
anything else is answered as without tools. A result comes back as text to repeat.
"""

from __future__ import annotations

from random import Random

from tools.demo import vocabulary_words as words
from tools.demo.stories import (
    Message,
    copy_turn,
    distraction,
    facts,
    greeting_turn,
    sum_turn,
)

_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
_PUNCTUATION = (".", "!", ",", ":", " +", "-", "/", ";", "°C")


_SKIES = ("sunny", "cloudy", "rainy", "windy", "cold", "warm", "dry")
_VERBS = tuple("find get look_up search locate check ask fetch read lookup query where_is".split())
_OBJECTS = tuple(
    "thing place city weather location name item object query text word value number kite".split()
)


def invented_word(rng: Random) -> str:
    """A word of two to seven letters that the vocabulary has in pieces."""
    syllables = (rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3)))
    return "".join([*syllables, rng.choice(["", *_CONSONANTS])])


def invented_name(rng: Random) -> str:
    """A name of a tool or of its parameter: a usual one, or any."""
    verb, noun = rng.choice(_VERBS), rng.choice(_OBJECTS)
    usual = rng.choice((verb, noun, noun, f"{verb}_{noun}", f"{verb}_{noun}"))
    invented = "_".join(invented_word(rng) for _ in range(rng.choice((1, 1, 2))))
    return usual if rng.random() < 0.7 else invented


def invented_text(rng: Random) -> str:
    """A sentence of the story, or a line that has no meaning."""
    if rng.random() < 0.75:
        weather = f"It is {rng.choice(_SKIES)} in {rng.choice(words.CITIES)}."
        return rng.choice((facts(rng, 1)[0].sentence, distraction(rng), weather))
    known = (*words.NOUNS, *words.CITIES, *words.COLOURS, *map(str, range(100)))
    parts = [
        rng.choice((rng.choice(known), invented_word(rng), invented_word(rng).capitalize()))
        + (rng.choice(_PUNCTUATION) if rng.random() < 0.2 else "")
        for _ in range(rng.randint(1, 10))
    ]
    return " ".join(parts)


def value(rng: Random) -> str:
    """A value of an argument, as Python writes it."""
    colour, noun = rng.choice(words.COLOURS), rng.choice(words.NOUNS)
    strings = (f"{colour} {noun}", rng.choice(words.CITIES), invented_word(rng))
    return rng.choice((f'"{rng.choice(strings)}"',) * 4 + (str(rng.randint(0, 99)), "true"))


def call(rng: Random) -> str:
    """A call of a random tool with up to three arguments."""
    given = ", ".join(f"{invented_name(rng)}={value(rng)}" for _ in range(rng.randint(0, 3)))
    return f"{invented_name(rng)}({given})"


def literal_turn(rng: Random) -> list[Message]:
    """Text to repeat letter by letter: one or two calls, or a line."""
    calls = f"[{', '.join(call(rng) for _ in range(rng.choice((1, 1, 2))))}]"
    text = rng.choice((calls, invented_text(rng)))
    return [Message("user", f"Repeat:\n{text}"), Message("assistant", text)]


def call_turn(rng: Random) -> list[Message]:
    """A question, the call that answers it, its result, and the answer."""
    name, parameter = invented_name(rng), invented_name(rng)
    start = f"[{name}({parameter}="
    fact = facts(rng, 1)[0]
    asked, found = rng.choice(
        (
            (fact.question, fact.subject),
            (f"{fact.sentence} {distraction(rng)}\n{fact.question}", fact.subject),
            (f"What is the weather in {fact.city}?", fact.city),
        )
    )
    result = rng.choice((fact.sentence, invented_text(rng)))
    return [
        Message("user", asked),
        Message("system", start),
        Message("assistant", f'{start}"{found}")]'),
        Message("user", f"Repeat:\n{result}"),
        Message("assistant", result),
    ]


def idle_tool_turn(rng: Random) -> list[Message]:
    """A message that no tool is needed for, though there is one."""
    said, answer = rng.choice((sum_turn, copy_turn, greeting_turn, literal_turn))(rng)
    start = f"[{invented_name(rng)}({invented_name(rng)}="
    return [said, Message("system", start), answer]
