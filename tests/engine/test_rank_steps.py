"""A rank launches the next step while its device runs the one before, and answers in order."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest
from tests.engine.plans import Guest, decode, full_pages, prefill
from tests.engine.toy_model import SIZES, ToyModel
from torch import Tensor

from ferryman.engine.device import Arrays, FetchedStep, HostDevice, TimedStep
from ferryman.engine.forward.decode_forward import Drafter
from ferryman.engine.forward.step_tensors import pack
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.tensor_parallel.rank import Command, Inbox, Rank
from ferryman.model.shapes.ranks import SINGLE_RANK
from ferryman.schedule.batch import Ints, SlotOps, StepPlan

ANNA = Guest("anna", [3, 1, 4, 1, 5], row=0, working_slot=2, pages=full_pages(7, 3))
PATIENCE_SECONDS = 120.0


class SlowDevice(HostDevice):
    """Steps that it has run are over when the test says so, the first ones first."""

    def __init__(self) -> None:
        self.launched = threading.Semaphore(0)
        self.num_begun = self.num_over = 0

    def begin(self) -> TimedStep:
        self.num_begun += 1
        return SlowStep(self, self.num_begun)


class SlowStep:
    """A step on a slow device."""

    def __init__(self, device: SlowDevice, number: int) -> None:
        self._device = device
        self._number = number

    def fetch(self, tensors: Sequence[Tensor]) -> FetchedStep:
        self._device.launched.release()
        return self

    def is_ready(self) -> bool:
        return self._device.num_over >= self._number

    def arrays(self) -> Arrays:
        return ()

    def seconds(self) -> float:
        return 0.0


@contextmanager
def rank_on(device: SlowDevice, drafter: Drafter | None = None) -> Iterator[Connection]:
    """Rank 0's end of the connection to a rank at work."""
    ours, theirs = Pipe()
    rank = Rank(ToyModel(), drafter, SINGLE_RANK, device)
    inbox = Inbox(theirs, orphaned=lambda: None)
    thread = threading.Thread(target=rank.run, args=(theirs, inbox), daemon=True)
    thread.start()
    try:
        yield ours
        _send(ours, np.array([Command.CLOSE], np.int64))
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    finally:
        ours.close()


def _send(connection: Connection, vector: Ints) -> None:
    connection.send_bytes(vector.data.cast("B"))


def _run(connection: Connection, step: StepPlan) -> None:
    _send(connection, np.concatenate([[Command.RUN], pack(step).as_vector()]))


def _answers(connection: Connection) -> object:
    assert connection.poll(PATIENCE_SECONDS)
    return json.loads(connection.recv_bytes())


def test_a_rank_does_not_wait_for_a_step_before_it_launches_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SlowDevice()
    monkeypatch.setattr(
        "ferryman.engine.tensor_parallel.rank.allocate_shared",
        lambda manifest, slots, where, connection: Slabs.allocate(manifest, slots, where),
    )
    with rank_on(device) as connection:
        _send(connection, np.array([Command.ALLOCATE, 4, 64, 0, *SIZES.values()], np.int64))
        assert _answers(connection) == {"done": 1}
        _run(connection, prefill(0, [(ANNA, 0, 5)], SlotOps(clears=(2,))))
        _run(connection, decode(1, [(ANNA, 5)]))
        for _ in range(2):
            assert device.launched.acquire(timeout=PATIENCE_SECONDS)
        assert not connection.poll(0), "neither is over"
        device.num_over = 1
        assert _answers(connection) == {"done": 1}
        assert not connection.poll(0)
        device.num_over = 2
        assert _answers(connection) == {"done": 1}
