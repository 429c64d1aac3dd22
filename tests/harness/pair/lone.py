"""One worker as a process of its own: `python -m tests.harness.pair.lone ROLE PLANES STEPS`.

It writes its address as one line of JSON, runs STEPS steps and waits. The input line `go` lets it
continue, `leased` makes it write the holders of slots. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

from tests.harness.pair.worker import worker
from tests.planes import plane_in, plane_of
from tests.waiting import until

from ferryman.wire.plane_values import PlaneChoice
from ferryman.wire.values import WorkerAddress
from ferryman_decode.server import DecodeServicer
from ferryman_prefill.server import PrefillServicer


class AfterSteps(threading.Event):
    """Open for `num_steps` steps, then closed until it is set."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self._left = num_steps

    def wait(self, timeout: float | None = None) -> bool:
        self._left -= 1
        return self._left >= 0 or super().wait(timeout)


@dataclass(frozen=True)
class Lone:
    """The process as its test sees it."""

    process: subprocess.Popen[str]
    where: WorkerAddress

    def say(self, word: str) -> None:
        self._pipe(self.process.stdin).write(word + "\n")
        self._pipe(self.process.stdin).flush()

    def leased(self) -> set[str]:
        self.say("leased")
        return set(json.loads(self._pipe(self.process.stdout).readline()))

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


@contextmanager
def lone_worker(role: str, planes: str, num_steps: int = 1_000_000) -> Iterator[Lone]:
    """A started process that is ready; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.harness.pair.lone", role, planes, str(num_steps)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = json.loads(process.stdout.readline())
        yield Lone(process, WorkerAddress(said["worker_id"], said["address"], said["epoch"]))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


async def _serve(role: str, planes: PlaneChoice, num_steps: int) -> None:
    make: Any = {"prefill": PrefillServicer, "decode": DecodeServicer}[role]
    gate = AfterSteps(num_steps)
    async with worker(role, make, 60, planes, gate=gate) as found:
        await until(lambda: bool(plane_in(found.service.load().planes) == plane_of(planes)))
        parts = found.parts
        where = {"worker_id": parts.worker_id, "address": found.address, "epoch": parts.epoch}
        _tell(where)
        while word := await asyncio.to_thread(sys.stdin.readline):
            if word.strip() == "go":
                gate.set()
            else:
                _tell(sorted(found.leased()))


def _tell(said: object) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], cast(PlaneChoice, sys.argv[2]), int(sys.argv[3])))
