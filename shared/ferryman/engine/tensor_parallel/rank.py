"""Ranks 1.. of a worker: a share of the model, slabs of that share, and nothing to decide.

    python -m ferryman.engine.tensor_parallel.rank FD      rank 0 starts each, and talks over FD

    rank 0 ──orders (JSON)──►
           ◄──{"here": rank}──                    the rank meets the others and loads its share
           ◄──{"ready": rank}──
           ──[ALLOCATE, rows, tokens, graph, slots …]──►
           ◄──its slabs (shared_slabs.py), {"done": 1}──
           ──[RUN, the plan vector …]──►          launches the step; the next may come meanwhile
           ◄──{"done": n}──                      when its device has run it
           ──[CLOSE]──►                           ends

A rank ends with rank 0: when the socket closes, for any reason and in any state of the rank.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from ferryman.engine.device import ComputeDevice, CudaDevice, FetchedStep, HostDevice
from ferryman.engine.forward.decode_forward import CudaGraphs, Drafter
from ferryman.engine.forward.packed_step import from_vector
from ferryman.engine.forward.step import ForwardModel, StepGraphs, StepRunner
from ferryman.engine.forward.step_tensors import unpack
from ferryman.engine.stream import POLL_SECONDS
from ferryman.engine.tensor_parallel.rendezvous import Rendezvous, device_of_rank, join
from ferryman.engine.tensor_parallel.shared_slabs import allocate_shared
from ferryman.errors import ConfigError
from ferryman.model.layers.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_drafted, load_model, load_self_drafting
from ferryman.model.shapes.ranks import Group
from ferryman.schedule.batch import Ints
from ferryman.schedule.drafting import MTP

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_ORPHANED = 3


class Command(IntEnum):
    """The first number of every vector."""

    ALLOCATE = 1
    RUN = 2
    CLOSE = 3


@dataclass(frozen=True, slots=True)
class RankOrders:
    """The orders of a rank, sent at its start; `device` is rank 0's."""

    model: str
    drafted_by: str
    dtype: str
    quantize: str
    kv_dtype: str
    arithmetic: str
    page_size: int
    device: str
    num_threads: int
    rank: int
    num_ranks: int
    meeting: str
    silence_seconds: float

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def torch_device(self) -> torch.device:
        return device_of_rank(self.device, self.rank)

    @property
    def where(self) -> Rendezvous:
        return Rendezvous(Path(self.meeting), self.num_ranks, self.silence_seconds)


class Inbox:
    """The messages of rank 0, in order. A thread calls `orphaned` when the connection ends."""

    def __init__(self, connection: Connection, orphaned: Callable[[], None]) -> None:
        self._connection = connection
        self._orphaned = orphaned
        # A Queue: SimpleQueue.get waits without end when its deadline passes at the wrong moment.
        self._messages: queue.Queue[Ints] = queue.Queue()
        threading.Thread(target=self._listen, name="rank-inbox", daemon=True).start()

    def next(self) -> Ints:
        return self._messages.get()

    def next_within(self, seconds: float) -> Ints | None:
        """The next message if it comes in time."""
        with suppress(queue.Empty):
            return self._messages.get(timeout=seconds)
        return None

    def _listen(self) -> None:
        while True:
            try:
                vector = np.frombuffer(self._connection.recv_bytes(), np.int64)
            except (EOFError, OSError):
                self._orphaned()
                return
            self._messages.put(vector)
            if vector[0] == Command.CLOSE:
                return


class Rank:
    """One rank at work. `run` returns when rank 0 orders it."""

    def __init__(
        self, model: ForwardModel, drafter: Drafter | None, group: Group, device: ComputeDevice
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._group = group
        self._device = device

    def run(self, connection: Connection, inbox: Inbox) -> None:
        """Answers each command. Raises the error of a step after it has reported it."""
        command, *sizes = inbox.next().tolist()
        if command == Command.CLOSE:
            return
        max_rows, max_len, graph_tokens, *num_slots = sizes
        kinds = self._model.manifest.kinds
        where = self._device.torch_device
        slots = dict(zip(kinds, num_slots, strict=True))
        slabs = allocate_shared(self._model.manifest, slots, where, connection)
        steps = StepRunner(
            self._model,
            slabs,
            self._group,
            max_rows=max_rows,
            max_len=max_len,
            drafter=self._drafter,
            replays=StepGraphs(graph_tokens, CudaGraphs()) if graph_tokens else None,
        )
        _answer(connection, {"done": 1})
        self._run_steps(steps, connection, inbox)

    def _run_steps(self, steps: StepRunner, connection: Connection, inbox: Inbox) -> None:
        """Launches steps as they come, until another command. A step is answered when its device
        has run it, so that rank 0 may read the slots it wrote; the next one is queued by then."""
        flying: deque[FetchedStep] = deque()
        while True:
            vector = inbox.next_within(POLL_SECONDS) if flying else inbox.next()
            if vector is not None:
                if vector[0] != Command.RUN:
                    break
                flying.append(self._launch(steps, vector[1:]))
            while flying and flying[0].is_ready():
                self._end(flying.popleft(), connection)
        while flying:
            self._end(flying.popleft(), connection)

    def _end(self, step: FetchedStep, connection: Connection) -> None:
        step.arrays()  # raises the card's error if a kernel failed
        _answer(connection, {"done": 1})

    def _launch(self, steps: StepRunner, vector: Ints) -> FetchedStep:
        packed = from_vector(vector)
        timed = self._device.begin()
        with torch.inference_mode():
            steps.run(unpack(packed, self._device.upload(packed.buffer.copy())))
        return timed.fetch(())


def load_with_draft(
    folder: Path | str, drafted_by: str, options: LoadOptions
) -> tuple[Model, Drafter | None]:
    """A rank's share of the model to serve, and the same model again if it names drafts.

    `drafted_by` is empty, MTP, or the folder of a draft model.
    """
    if not drafted_by:
        return load_model(folder, options), None
    if drafted_by == MTP:
        drafting = load_self_drafting(folder, options)
        return drafting, drafting
    drafted = load_drafted(folder, drafted_by, options)
    return drafted, drafted


def _answer(connection: Connection, answer: dict[str, object]) -> None:
    connection.send_bytes(json.dumps(answer).encode())


def serve(connection: Connection, orders: RankOrders, orphaned: Callable[[], None]) -> None:
    """The whole life of a rank, from its orders to its end. An error is reported to rank 0, and
    raised."""
    try:
        _answer(connection, {"here": orders.rank})
        device = orders.torch_device
        group = join(orders.where, orders.rank, device)
        loaded_as = LoadOptions(
            dtype=orders.dtype,
            device=device,
            page_size=orders.page_size,
            group=group,
            quantize=orders.quantize,
            kv_dtype=orders.kv_dtype,
            arithmetic=orders.arithmetic,
        )
        model, drafter = load_with_draft(orders.model, orders.drafted_by, loaded_as)
        _answer(connection, {"ready": orders.rank})
        place = CudaDevice(device.index) if device.type == "cuda" else HostDevice()
        with place.entered():
            Rank(model, drafter, group, place).run(connection, Inbox(connection, orphaned))
    except Exception as error:  # the top of a device thread: any error goes to rank 0
        _answer(connection, {"failed": f"{type(error).__name__}: {error}"})
        raise


def main(file: int) -> None:
    """Only rank 0 decides when a rank ends, so that it can drain first."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    connection = Connection(file)
    orders = RankOrders(**json.loads(connection.recv_bytes()))
    logging.basicConfig(format=f"rank {orders.rank}: %(levelname)s %(message)s")
    if orders.num_threads:
        torch.set_num_threads(orders.num_threads)
    try:
        serve(connection, orders, orphaned=lambda: os._exit(EXIT_ORPHANED))
    except ConfigError:
        os._exit(EXIT_FAILED)  # rank 0 reports it: it reads the same error
    except Exception:
        log.exception("the rank failed")
        os._exit(EXIT_FAILED)
    os._exit(0)  # torch takes seconds to free what the end of the process frees anyway


if __name__ == "__main__":
    main(int(sys.argv[1]))
