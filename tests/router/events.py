"""The events of a stream whose events have names."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[Any]:
    """The data of all events in order; each has the name of its event as its type."""
    found = []
    for frame in text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        found.append(event)
    return found
