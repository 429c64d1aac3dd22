"""Logs go to stderr, one line an event: time, level, module, words, then key=value."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s"
_CHATTY = ("asyncio", "nats", "uvicorn.access", "httpx")


def configure_logs(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Sets up the root logger and replaces its handlers; chatty libraries log from WARNING on."""
    logging.basicConfig(
        level=level,
        format=_FORMAT,
        datefmt="%Y-%m-%dT%H:%M:%S",
        stream=stream or sys.stderr,
        force=True,
    )
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))


def set_level(level: str) -> None:
    """Changes the level of a running process."""
    logging.getLogger().setLevel(level)


class Tail:
    """`key=value key=value`, made only if the line is written: `log.info("done %s", Tail(id=7))`.

    Values with spaces are quoted, floats get three decimals.
    """

    __slots__ = ("_named",)

    def __init__(self, **named: object) -> None:
        self._named = named

    def __str__(self) -> str:
        return " ".join(f"{name}={_shown(value)}" for name, value in self._named.items())


def _shown(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return repr(text) if not text or any(c.isspace() or c == "=" for c in text) else text
