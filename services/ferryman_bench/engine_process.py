"""Engines as processes: each has its own thread pools, and rests while another is timed.

In one process the pools of two engines would share the cores, and a pool that has just worked spins
for a while on the cores that the next engine needs.

`python -m MODULE NAME MODEL` obeys orders, one line of JSON each, and ends with its standard input.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from ferryman.errors import ConfigError, Unavailable

DEADLINE_SECONDS = 1800.0
MEMORY_BYTES = 2 << 30
MAX_RUNNING = 16
STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class BenchModel:
    """The model of all engines of a run, how each of them computes it, and the room that each has
    for state."""

    folder: Path
    dtype: str
    threads: int
    device: str = "cpu"
    memory_bytes: int = MEMORY_BYTES
    max_running: int = MAX_RUNNING

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        return cls(**{**fields, "folder": Path(fields["folder"])})


class BenchSite(Protocol):
    """An engine in a process of its own, as its orders see it."""

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one order; both are JSON objects."""
        ...


class EngineProcess:
    """The parent's end of an engine."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self._process = name, process

    def ask(self, **order: Any) -> dict[str, Any]:
        """The reply to an order. Raises ConfigError for what the engine refuses, Unavailable for
        one that has ended or says nothing for DEADLINE_SECONDS."""
        assert self._process.stdin is not None, "it was started with a pipe"
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable(f"{self.name} has ended; see its last words above") from None
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next line that the engine writes, as `ask`."""
        assert self._process.stdout is not None, "it was started with a pipe"
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(DEADLINE_SECONDS):
                raise Unavailable(f"{self.name} was silent for {DEADLINE_SECONDS:.0f} seconds")
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"{self.name} has ended; see its last words above")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ConfigError(f"{self.name}: {reply['error']}")
        return reply


@contextmanager
def engine_process(module: str, name: str, model: BenchModel) -> Iterator[EngineProcess]:
    """An engine that has loaded its model, run by the `module` that serves its orders."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, name, json.dumps(model.to_json())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        engine = EngineProcess(name, process)
        engine.hear()
        yield engine
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None, "it was started with pipes"
    assert process.stdout is not None, "it was started with pipes"
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has ended, and its last order was not read
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


# The process of the engine.


def prepare_torch(threads: int) -> None:
    """The settings of the whole process, which is why no engine makes them itself."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def serve_orders(open_site: Callable[[str, BenchModel], BenchSite]) -> None:
    """Opens the engine that the command line names, and obeys orders until they end."""
    # Libraries write to standard output as they like; the replies have a descriptor of their own.
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)

        def say(reply: Mapping[str, Any]) -> None:
            replies.write(json.dumps(reply) + "\n")
            replies.flush()

        try:
            site = open_site(sys.argv[1], BenchModel.from_json(json.loads(sys.argv[2])))
            say({})
            gc.disable()  # a pause would be charged to a step that did not cause it
            for line in sys.stdin:
                say(site.obey(json.loads(line)))
        except ConfigError as error:
            say({"error": str(error)})
