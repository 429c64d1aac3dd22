"""Reads when a process is ready: a router is asked for it, others report it and their
progress."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ASK_SECONDS = 2.0
PAUSE_SECONDS = 0.1

ReadyEvent = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """A worker's report while it loads a model: the stage it is in, and how far it is."""

    model: str
    stage: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class CompileReport:
    """A worker's report that it begins to compile a loop for this processor; later starts find it
    on disk."""

    loop: str


StartReport = WeightsReport | CompileReport


def start_report(line: str) -> StartReport | None:
    """The report in a line of a service's output; None for any other line."""
    match _event(line):
        case {"event": "compiling", "loop": str(loop)}:
            return CompileReport(loop)
        case {
            "event": "loading",
            "model": str(model),
            "stage": str(stage),
            "done_bytes": int(done),
            "total_bytes": int(total),
        } if 0 <= done <= total:
            return WeightsReport(model, stage, done, total)
    return None


def ready_event(line: str) -> ReadyEvent | None:
    """The event in the line by which a service reports that it is ready."""
    event = _event(line)
    return event if event is not None and event.get("event") == "ready" else None


def ready_words(pattern: re.Pattern[str]) -> Callable[[str], ReadyEvent | None]:
    """For servers of other projects: a matching line means ready and has no values."""
    return lambda line: {} if pattern.search(line) else None


def _event(line: str) -> ReadyEvent | None:
    if line.startswith("{"):
        with suppress(ValueError):
            event = json.loads(line)
            return event if isinstance(event, dict) else None
    return None


async def serving(address: str, ca: str = "") -> None:
    """Waits until `/ready` at host:port answers yes; no answer counts as no. The caller sets the
    limit. With `ca`, a file of authorities, it asks over HTTPS."""
    while True:
        if await asyncio.to_thread(ready_status, address, ca) == http.client.OK:
            return
        await asyncio.sleep(PAUSE_SECONDS)


def ready_status(address: str, ca: str = "") -> int:
    """The status of the answer of `/ready` at host:port; 0 without an answer."""
    connection = http.client.HTTPConnection(address, timeout=ASK_SECONDS)
    if ca:
        context = ssl.create_default_context(cafile=ca)
        context.check_hostname = False  # it may listen on an address that no certificate names
        connection = http.client.HTTPSConnection(address, timeout=ASK_SECONDS, context=context)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
