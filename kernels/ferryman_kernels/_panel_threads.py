"""Threads that take panels of a packed product while its caller computes the others.

A decode step of few tokens is some hundred products of 0.1 to 1 ms. numba's threads wake too slowly
for them, and a barrier, such as OpenMP's, waits for a thread that another process has displaced.
Here a product is a *job* in memory that all threads see:

    ticket  = number of the job, its panels, the next panel     one word, taken by compare and swap
    done    = panels that are computed

A thread takes the next panel until none is left; the caller takes panels too, and waits for those
alone that others have taken. A thread that sleeps, or waits for a core, delays nothing. One that
loses its core with a panel in hand does: then the caller works alone for a while. Without work a
thread looks at the ticket for SPINS pauses, about half a millisecond, and then sleeps until a job
finds it asleep and wakes it; that job does not wait for it.

Every panel is computed by the same code in the same order of sums, so the bits do not depend on
who computes it.
"""

from __future__ import annotations

import os
from functools import cache
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._atomics import add, loaded, pause, stored, swapped, yield_core
from ferryman_kernels._compiled import Loop, as_array, part
from ferryman_kernels._lanes import LANES
from ferryman_kernels._packed_product_compiled import element_like, panel_sums, write_panel
from ferryman_kernels._vectors import row_at

__all__ = ["PanelThreads", "panel_threads"]

SPINS = 20_000
# Pauses, some 0.2 ms, after which a thread that has a panel must have lost its core. The machine is
# busy then, and the next products, those of some dozen decode steps, are computed alone.
DISPLACED = 10_000
ALONE = 2_000
# Places of words. Those that threads write have a cache line each; ASLEEP is one for each thread.
TICKET, DONE, JOB, ASLEEP, LINE = 0, 8, 16, 32, 8
# The words of a job from JOB on.
ADDRESS, PANEL_BYTES, X, TOKENS, IN_DIM, Y, OUT_DIM, BIAS, BIAS_DIM = range(JOB, JOB + 9)
WAITED = JOB + 9
# A ticket's bits: 20 for the next panel, 20 for the panels, the rest for the job's number.
FIELD = 20
MASK = (1 << FIELD) - 1


@part
def publish(words: Any, panels: int) -> None:
    """Lets threads take the panels of the job that `words` describe."""
    number = (loaded(words, TICKET) >> (2 * FIELD)) + 1
    stored(words, DONE, 0)
    stored(words, TICKET, ((number & MASK) << (2 * FIELD)) | (panels << FIELD))


@part
def taken(words: Any) -> Any:
    """The next panel, which nobody else gets; -1 if there is none."""
    while True:
        ticket = loaded(words, TICKET)
        if (ticket & MASK) >= ((ticket >> FIELD) & MASK):
            return -1
        # The number in the ticket makes sure that it is still the job whose panels were compared.
        if swapped(words, TICKET, ticket, ticket + 1):
            return ticket & MASK


@part
def join(words: Any, panels: int) -> None:
    """Waits for the panels that other threads have taken, and notes how many pauses that took."""
    spins = 0
    while loaded(words, DONE) < panels:
        pause()
        spins += 1
        # A thread may have lost its core; give it this one rather than wait for the scheduler.
        if spins % 1000 == 0:
            yield_core()
    words[WAITED] = spins


@part
def compute(number: Any, stored_as: Any, floats: Any, words: Any, panel: int) -> None:
    """A panel of the job; `number`, `stored_as` and `floats` tell types alone."""
    tokens, in_dim, out_dim = words[TOKENS], words[IN_DIM], words[OUT_DIM]
    x = row_at(words[X], floats)[: tokens * in_dim].reshape(tokens, in_dim)
    y = row_at(words[Y], stored_as)[: tokens * out_dim].reshape(tokens, out_dim)
    bias = row_at(words[BIAS], stored_as)[: words[BIAS_DIM]]
    sums = np.empty((tokens, LANES), np.float32)
    address = words[ADDRESS] + panel * words[PANEL_BYTES]
    panel_sums(number, address, x, np.arange(tokens), sums)
    for token in range(tokens):
        write_panel(sums[token], bias, panel, y[token])


def _share(number: Any, stored_as: Any, floats: Any, words: Any, panels: int) -> None:
    publish(words, panels)
    panel = taken(words)
    while panel >= 0:
        compute(number, stored_as, floats, words, panel)
        add(words, DONE, 1)
        panel = taken(words)
    join(words, panels)


def _serve(number: Any, stored_as: Any, floats: Any, words: Any, spins: int) -> None:
    idle = 0
    while idle < spins:
        panel = taken(words)
        if panel >= 0:
            compute(number, stored_as, floats, words, panel)
            add(words, DONE, 1)
            idle = 0
        else:
            pause()
            idle += 1


_share_loop, _serve_loop = Loop(_share), Loop(_serve)


class PanelThreads:
    """`count` threads that help with the products of one dtype, and one job at a time."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        self._words = np.zeros(ASLEEP + count * LINE, np.int64)
        empty = as_array(torch.empty(0, dtype=dtype))
        self._types = (element_like(dtype), empty, np.empty(0, np.float32))
        self.own = Lock()
        self._alone = 0
        self._wakers = [Lock() for _ in range(count)]
        # Compiled here, so that no thread begins with that.
        _serve_loop.alone(*self._types, self._words, 0)
        for index in range(count):
            self._wakers[index].acquire()
            Thread(target=self._run, args=(index,), name="panels", daemon=True).start()

    def product(
        self, x: Tensor, address: int, panel_bytes: int, bias: Tensor, out_dim: int
    ) -> Tensor | None:
        """As `packed_product_compiled`; None where the caller should compute alone: while another
        one has the threads, and for a while after they were displaced."""
        if self._alone:
            self._alone -= 1
            return None
        if not self.own.acquire(blocking=False):
            return None
        try:
            inputs, (tokens, in_dim) = x.float().contiguous(), x.shape
            y = torch.empty(tokens, out_dim, dtype=x.dtype)
            places = (inputs.data_ptr(), tokens, in_dim, y.data_ptr(), out_dim)
            job = (address, panel_bytes, *places, bias.data_ptr(), len(bias))
            self._words[ADDRESS : BIAS_DIM + 1] = job
            self._wake()
            _share_loop.alone(*self._types, self._words, -(-out_dim // LANES))
            if self._words[WAITED] > DISPLACED:
                self._alone = ALONE
            return y
        finally:
            self.own.release()

    def _wake(self) -> None:
        for index, waker in enumerate(self._wakers):
            if self._words[ASLEEP + index * LINE]:
                self._words[ASLEEP + index * LINE] = 0
                waker.release()

    def _run(self, index: int) -> None:
        while True:
            # Told before it sleeps: a job in between leaves the waker open, and it does not sleep.
            self._words[ASLEEP + index * LINE] = 1
            self._wakers[index].acquire()
            _serve_loop.alone(*self._types, self._words, SPINS)


def panel_threads(dtype: torch.dtype) -> PanelThreads | None:
    """The threads beside the caller's, as many as torch has; None where there is none, or where
    idle threads are told to sleep."""
    threads = torch.get_num_threads()
    return _threads(dtype, threads - 1, os.getpid()) if threads > 1 and _MAY_SPIN else None


# As OpenMP's own threads: where a machine has fewer cores than threads, none of them spins.
_MAY_SPIN = os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE"


@cache
def _threads(dtype: torch.dtype, count: int, process: int) -> PanelThreads:
    # A forked process has no threads of its parent's, so each makes its own.
    return PanelThreads(dtype, count)
