"""A log line is words and key=value."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from ferryman.runtime.logs import Tail, configure_logs, set_level


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    stream = io.StringIO()
    configure_logs("INFO", stream)
    yield stream
    root.handlers[:], root.level = handlers, level
    root.setLevel(level)


def test_a_line_ends_in_key_and_value(stream: io.StringIO) -> None:
    logging.getLogger("ferryman.test").info("done %s", Tail(id="r-1", ttft=0.12345, why="no room"))
    assert stream.getvalue().endswith(" INFO ferryman.test done id=r-1 ttft=0.123 why='no room'\n")


def test_the_level_changes_while_running(stream: io.StringIO) -> None:
    set_level("DEBUG")
    logging.getLogger("ferryman.test").debug("seen")
    logging.getLogger("nats").info("not seen")
    assert stream.getvalue().count("seen") == 1
