"""Stop strings over a text that arrives in pieces of any length.

Text that may still become the start of a stop string is held back. It is released as soon as no
stop string can begin in it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """`text` may be shown; `stop` is the stop string that ended it, which is never shown."""

    text: str
    stop: str | None = None


class StopStrings:
    """Finds the stop string that is complete first; of two that end together, the longer one."""

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""

    @property
    def is_watching(self) -> bool:
        """Whether there is any stop string."""
        return bool(self._stops)

    def feed(self, text: str) -> Released:
        """The text that may be shown now. After a `stop` the object is finished: do not feed it."""
        if not self._stops:
            return Released(text)
        held = self._held + text
        hit = self._earliest(held)
        if hit is not None:
            at, stop = hit
            self._held = ""
            return Released(held[:at], stop)
        keep = self._possible_start(held)
        self._held = held[keep:]
        return Released(held[:keep])

    def flush(self) -> str:
        """Ends the text and returns what was held back, which was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, text: str) -> tuple[int, str] | None:
        """The match that is complete first; among those, the one that begins first."""
        starts = [(text.find(stop), stop) for stop in self._stops]
        whole = [(at + len(stop), at, stop) for at, stop in starts if at >= 0]
        if not whole:
            return None
        _, at, stop = min(whole)
        return at, stop

    def _possible_start(self, text: str) -> int:
        """The first place from which the rest of `text` begins some stop string, or its end."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)
