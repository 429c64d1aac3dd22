"""Follows a table of (state, event) → state.

A table has a row for every state; a row names the events that are legal in that state by their
type. A state with an empty row is terminal and absorbs late events. Every other event that the row
does not name is illegal, and raises IllegalTransition.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from ferryman.errors import FerrymanError

S = TypeVar("S", bound=StrEnum)


class IllegalTransition(FerrymanError):
    """An event that the state's row does not name: a bug in the caller."""

    def __init__(self, state: StrEnum, event: object) -> None:
        super().__init__(f"{type(event).__name__} cannot happen in state {state}")
        self.state = state
        self.event = event


def follow(table: Mapping[S, Mapping[type, S]], state: S, event: object) -> S:
    """The state after `event`; terminal states stay as they are."""
    row = table[state]
    if not row:
        return state
    if type(event) not in row:
        raise IllegalTransition(state, event)
    return row[type(event)]


def terminal_states(table: Mapping[S, Mapping[type, S]]) -> frozenset[S]:
    return frozenset(state for state, row in table.items() if not row)
