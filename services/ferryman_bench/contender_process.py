"""Contenders as processes: each has its own thread pools, and rests while another is timed.

In one process the pools of two engines would stand beside each other, and a pool that has just
worked spins for a while on the cores that the next engine needs.

`python -m ferryman_bench.contender_process NAME MODEL` obeys orders, one line of JSON each, and
ends with its standard input.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ferryman.errors import ConfigError, Unavailable
from ferryman_bench.contender import BenchSite, Contender, ContenderModel, ContenderSite, obey_lines

OURS, TRANSFORMERS, LLAMA_CPP = "ferryman", "transformers", "llama.cpp"
# Those of whole requests.
OFFLINE, LLAMA_BATCHES = "offline", "llama.cpp's batches"
DEADLINE_SECONDS = 1800.0
STOP_SECONDS = 20.0


class ContenderProcess:
    """The parent's end of a contender."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self._process = name, process

    def ask(self, **order: Any) -> dict[str, Any]:
        """The reply to an order. Raises ConfigError for what the contender refuses, Unavailable
        for one that has ended or says nothing for DEADLINE_SECONDS."""
        assert self._process.stdin is not None, "it was started with a pipe"
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable(f"{self.name} has ended; see its last words above") from None
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next line that the contender writes, as `ask`."""
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
def contender_process(name: str, model: ContenderModel) -> Iterator[ContenderProcess]:
    """A contender that has loaded its model."""
    command = [sys.executable, "-m", "ferryman_bench.contender_process", name]
    process = subprocess.Popen(
        [*command, json.dumps(model.to_json())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        contender = ContenderProcess(name, process)
        contender.hear()
        yield contender
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


def open_site(name: str, model: ContenderModel) -> BenchSite:
    """The contender, ready for orders; as `open_contender`."""
    if name in (OFFLINE, LLAMA_BATCHES):
        from ferryman_bench.request_sites import LlamaRequestSite, OfflineRequestSite

        return OfflineRequestSite(model) if name == OFFLINE else LlamaRequestSite(model)
    return ContenderSite(open_contender(name, model))


def open_contender(name: str, model: ContenderModel) -> Contender:
    """The contender, its model loaded. Raises ConfigError if it cannot run here."""
    # Each engine's libraries are imported in its own process alone.
    if name == OURS:
        from ferryman_bench.ours import FerrymanContender

        return FerrymanContender(model)
    if name == TRANSFORMERS:
        from ferryman_bench.transformers_peer import TransformersContender

        return TransformersContender(model)
    from ferryman_bench.llama_peer import LlamaContender

    return LlamaContender(model)


def _prepare_torch(threads: int) -> None:
    """The settings of the whole process, which is why no contender makes them itself."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def main() -> None:
    # Libraries write to standard output as they like; the replies have a descriptor of their own.
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)

        def say(reply: Mapping[str, Any]) -> None:
            replies.write(json.dumps(reply) + "\n")
            replies.flush()

        try:
            name, model = sys.argv[1], ContenderModel.from_json(json.loads(sys.argv[2]))
            if name not in (LLAMA_CPP, LLAMA_BATCHES):
                _prepare_torch(model.threads)
            site = open_site(name, model)
            say({})
            gc.disable()  # a pause would be charged to a step that did not cause it
            obey_lines(site, say)
        except ConfigError as error:
            say({"error": str(error)})


if __name__ == "__main__":
    main()
