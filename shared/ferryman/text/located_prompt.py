"""A prompt's token ids, with what is known of the places in it. Pure.

Some places are where other prompts are likely to part from this one. State is kept there. All
places have names, by which their owner is told where two of its prompts part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ferryman.schedule.request import Pin
from ferryman.wire.public import TokenPrompt

TEMPLATE, AFTER = "the template", "what follows the messages"


class NamedPlace(NamedTuple):
    """The part of a prompt from this position on, up to the next place: `system[0]`, `tools`."""

    position: int
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class LocatedPrompt(TokenPrompt):
    """Token ids [tokens] with what is known of their places, each list rising by position."""

    places: tuple[NamedPlace, ...] = ()
    breakpoints: tuple[Pin, ...] = ()

    def place_of(self, position: int) -> str:
        """The name of the part that the token at this position belongs to."""
        names = [place.name for place in self.places if place.position <= position]
        return names[-1] if names else TEMPLATE

    @property
    def end_of_messages(self) -> int:
        """The position after the last message; the prompt's length if that is not known."""
        ends = [place.position for place in self.places if place.name == AFTER]
        return ends[-1] if ends else len(self.token_ids)
