"""Rows 19 and 20: every backend of every recurrence writes the state of the prefix, nothing else.

A batch of ragged spans tracks states at random places of the grid. Each tracked slot must be what
the reference has there when that request runs alone from position 0; slots that nobody named keep
their poison.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.recurrence._delta_chunk_scan_triton import delta_chunk_scan_triton
from ferryman_kernels.recurrence._ssd_chunk_scan_triton import chunk_scan_triton
from ferryman_kernels.recurrence.causal_conv import (
    causal_conv_decode_reference,
    causal_conv_decode_triton,
    causal_conv_prefill_reference,
    causal_conv_prefill_triton,
)
from ferryman_kernels.recurrence.channel_delta_scan import (
    channel_delta_decode,
    channel_delta_runs_reference,
    channel_delta_scan,
    delta_runs_triton,
)
from ferryman_kernels.recurrence.delta_chunk_scan import (
    delta_chunk_scan,
    delta_chunk_scan_reference,
)
from ferryman_kernels.recurrence.delta_decode import (
    delta_decode,
    delta_decode_reference,
    delta_decode_triton,
)
from ferryman_kernels.recurrence.loops._causal_conv_compiled import (
    causal_conv_decode_compiled,
    causal_conv_prefill_compiled,
)
from ferryman_kernels.recurrence.selective_scan import (
    rounds_of,
    selective_runs_compiled,
    selective_runs_reference,
    selective_runs_triton,
)
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan, chunk_scan_reference
from ferryman_kernels.recurrence.ssd_decode import (
    selective_state_update,
    selective_state_update_reference,
    selective_state_update_triton,
)

CHUNK_LEN = 8
NUM_TOKENS = 44
NUM_SLOTS = 24
HEADS, WIDTH, DIM = 4, 4, 8

Rows = tuple[Tensor, ...]
Span = tuple[int, int]
Track = tuple[int, int, int]
Scan = Callable[[Rows, Tensor, Sequence[Span], Tensor, Sequence[Track]], object]


@dataclass(frozen=True)
class Backend:
    """A scan and a step of one recurrence; `draw` makes the inputs of so many tokens."""

    name: str
    state_shape: tuple[int, ...]
    draw: Callable[[int], Rows]
    reference: Scan
    scan: Scan
    step: Callable[[Rows, Tensor, Tensor, Tensor], object]


def _convolution(name: str, prefill: Any, decode: Any) -> Backend:
    weight, bias = torch.randn(DIM, WIDTH), torch.randn(DIM)

    def scanned(run: Any) -> Scan:
        return lambda rows, states, *where: run(*rows, states, weight, bias, *where)

    return Backend(
        f"convolution, {name}",
        (DIM, WIDTH - 1),
        lambda tokens: (torch.randn(tokens, DIM),),
        scanned(causal_conv_prefill_reference),
        scanned(prefill),
        lambda rows, states, slots, into: decode(*rows, states, weight, bias, slots, into),
    )


def _mamba(name: str, scan: Any, step: Any) -> Backend:
    A, D = -torch.rand(HEADS) * 4, torch.randn(HEADS)

    def draw(tokens: int) -> Rows:
        keys = torch.randn(2, tokens, 2, 16)
        return torch.randn(tokens, HEADS, DIM), torch.rand(tokens, HEADS), *keys

    def scanned(run: Any) -> Scan:
        return lambda rows, states, *where: run(
            *rows[:2], A, *rows[2:], D, states, *where, CHUNK_LEN
        )

    def advance(rows: Rows, states: Tensor, slots: Tensor, into: Tensor) -> object:
        x, dt, B, C = rows
        return step(states, x, dt, A, B, C, D, slots, into)

    return Backend(
        f"Mamba-2, {name}",
        (HEADS, DIM, 16),
        draw,
        scanned(chunk_scan_reference),
        scanned(scan),
        advance,
    )


def _mamba1(name: str, run: Any) -> Backend:
    A, D = -torch.rand(DIM, 16) * 4, torch.randn(DIM)

    def draw(tokens: int) -> Rows:
        return torch.randn(tokens, DIM), torch.rand(tokens, DIM), *torch.randn(2, tokens, 16)

    def go(which: Any, rows: Rows, states: Tensor, runs: Tensor) -> None:
        x, dt, B, C = rows
        which((x, dt, A, B, C, D), states, runs, torch.empty_like(x))

    reference = selective_runs_reference
    return _in_runs(f"Mamba-1, {name}", (DIM, 16), draw, reference, run, go)


def _kimi_delta(name: str, run: Any) -> Backend:
    def draw(tokens: int) -> Rows:
        q, k = F.normalize(torch.randn(2, tokens, HEADS, 16), dim=-1)
        g, beta = -torch.rand(tokens, HEADS, 16), torch.rand(tokens, HEADS)
        return q, k, torch.randn(tokens, HEADS, DIM), g, beta

    def go(which: Any, rows: Rows, states: Tensor, runs: Tensor) -> None:
        which(rows, states, runs, torch.empty_like(rows[2]))

    reference = channel_delta_runs_reference
    return _in_runs(f"Kimi delta, {name}", (HEADS, 16, DIM), draw, reference, run, go)


def _compiled_kimi_delta() -> Backend:
    """On a processor the rule has no runs of its own: it is the loop of the gated delta rule."""
    by_runs = _kimi_delta("compiled", channel_delta_runs_reference)

    def scan(rows: Rows, states: Tensor, *where: Any) -> Tensor:
        q, k, v, g, beta = rows
        return channel_delta_scan(q, k, v, g, beta, states, *where)

    def advance(rows: Rows, states: Tensor, slots: Tensor, into: Tensor) -> Tensor:
        q, k, v, g, beta = rows
        return channel_delta_decode(states, q, k, v, g, beta, slots, into)

    return replace(by_runs, scan=scan, step=advance)


def _in_runs(
    name: str,
    state_shape: tuple[int, ...],
    draw: Callable[[int], Rows],
    reference: Any,
    run: Any,
    go: Callable[[Any, Rows, Tensor, Tensor], None],
) -> Backend:
    """A backend whose scan and step are one op over runs; `go` calls such an op."""

    def scanned(which: Any) -> Scan:
        def scan(
            rows: Rows, states: Tensor, spans: Sequence[Span], slots: Tensor, at: Sequence[Track]
        ) -> None:
            for parts in rounds_of(spans, at):
                runs = [(low, n, int(slots[i]), int(slots[i]), copy) for low, n, i, copy in parts]
                go(which, rows, states, torch.tensor(runs))

        return scan

    def advance(rows: Rows, states: Tensor, slots: Tensor, into: Tensor) -> None:
        steps = [(i, 1, int(slots[i]), int(into[i]), -1) for i in range(len(slots))]
        go(run, rows, states, torch.tensor(steps))

    return Backend(name, state_shape, draw, scanned(reference), scanned(run), advance)


def _delta(name: str, scan: Any, step: Any) -> Backend:
    def draw(tokens: int) -> Rows:
        q, k = F.normalize(torch.randn(2, tokens, 2, 16), dim=-1)
        v, beta = torch.randn(tokens, HEADS, DIM), torch.rand(tokens, HEADS)
        return q, k, v, -torch.rand(tokens, HEADS), beta

    def scanned(run: Any) -> Scan:
        return lambda rows, states, *where: run(*rows, states, *where, CHUNK_LEN)

    return Backend(
        f"delta rule, {name}",
        (HEADS, 16, DIM),
        draw,
        scanned(delta_chunk_scan_reference),
        scanned(scan),
        lambda rows, states, slots, into: step(states, *rows, slots, into),
    )


def _backends() -> list[Backend]:
    torch.manual_seed(7)
    return [
        _convolution("torch", causal_conv_prefill_reference, causal_conv_decode_reference),
        _convolution("compiled", causal_conv_prefill_compiled, causal_conv_decode_compiled),
        _convolution("Triton", causal_conv_prefill_triton, causal_conv_decode_triton),
        _mamba("torch", chunk_scan_reference, selective_state_update_reference),
        _mamba("compiled", chunk_scan, selective_state_update),
        _mamba("Triton", chunk_scan_triton, selective_state_update_triton),
        _mamba1("torch", selective_runs_reference),
        _mamba1("compiled", selective_runs_compiled),
        _mamba1("Triton", selective_runs_triton),
        _kimi_delta("torch", channel_delta_runs_reference),
        _compiled_kimi_delta(),
        _kimi_delta("Triton", delta_runs_triton),
        _delta("torch", delta_chunk_scan_reference, delta_decode_reference),
        _delta("compiled", delta_chunk_scan, delta_decode),
        _delta("Triton", delta_chunk_scan_triton, delta_decode_triton),
    ]


every_backend = pytest.mark.parametrize("backend", _backends(), ids=lambda each: each.name)


@pytest.fixture(autouse=True)
def _interpreted(backend: Backend) -> None:
    if backend.name.endswith("Triton") and torch.cuda.is_available():
        pytest.skip("tensors here are on the CPU, where only the interpreter runs")


def _poisoned(backend: Backend) -> Tensor:
    """A strided view, as a section of a slab is."""
    num = torch.Size(backend.state_shape).numel()
    slab = torch.full((NUM_SLOTS, num + 8), torch.nan)
    return slab[:, 8:].view(NUM_SLOTS, *backend.state_shape)


def _part(rows: Rows, start: int, end: int) -> Rows:
    return tuple(tensor[start:end] for tensor in rows)


def _cold(backend: Backend, rows: Rows, position: int) -> Tensor:
    """The state at `position` of a request that runs alone, by the reference."""
    states = _poisoned(backend)[:1]
    states[0] = 0
    if position:
        backend.reference(_part(rows, 0, position), states, ((0, position),), torch.tensor([0]), ())
    return states[0].clone()


@every_backend
@pytest.mark.parametrize("seed", range(3))
def test_rows_19_and_20_a_tracked_slot_is_the_state_of_its_prefix(
    backend: Backend, seed: int
) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    streams = [backend.draw(NUM_TOKENS) for _ in range(4)]
    free = rng.sample(range(NUM_SLOTS), NUM_SLOTS)
    states, slots, spans, tracks = _poisoned(backend), [], [], list[Track]()
    for index, rows in enumerate(streams):
        start = rng.choice([0, 8, rng.randrange(NUM_TOKENS - 1)])
        end = rng.randint(start + 1, NUM_TOKENS)
        slots.append(free.pop())
        spans.append((start, end))
        states[slots[index]] = _cold(backend, rows, start)
        places = [p for p in range(start + 1, end + 1) if p % CHUNK_LEN == 0 or p == end]
        chosen = rng.sample(places, rng.randint(0, len(places)))
        tracks += [(index, position, free.pop()) for position in chosen]
    assert tracks
    parts = [_part(rows, *span) for rows, span in zip(streams, spans, strict=True)]
    batch = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
    backend.scan(batch, states, tuple(spans), torch.tensor(slots), tuple(tracks))
    ends = [(index, end, slots[index]) for index, (_, end) in enumerate(spans)]
    for index, position, slot in (*tracks, *ends):
        expected = _cold(backend, streams[index], position)
        torch.testing.assert_close(states[slot], expected, rtol=1e-5, atol=1e-5)
    assert bool(states[free].isnan().all()), "a slot that nobody named was written"


@every_backend
def test_row_20_a_step_writes_the_state_of_its_prefix_where_it_is_told(backend: Backend) -> None:
    torch.manual_seed(11)
    streams = [backend.draw(NUM_TOKENS) for _ in range(3)]
    states, positions = _poisoned(backend), [0, 13, 24]
    for index, rows in enumerate(streams):
        states[index] = _cold(backend, rows, positions[index])
    read = torch.arange(3)
    for wave in range(3):
        write = torch.tensor([5, 12, 20]) + wave
        tokens = [_part(r, p + wave, p + wave + 1) for r, p in zip(streams, positions, strict=True)]
        batch = tuple(torch.cat(tensors) for tensors in zip(*tokens, strict=True))
        backend.step(batch, states, read, write)
        for index, slot in enumerate(write.tolist()):
            expected = _cold(backend, streams[index], positions[index] + wave + 1)
            torch.testing.assert_close(states[slot], expected, rtol=1e-5, atol=1e-5)
        read = write
    written = [0, 1, 2, 5, 6, 7, 12, 13, 14, 20, 21, 22]
    others = [slot for slot in range(NUM_SLOTS) if slot not in written]
    assert bool(states[others].isnan().all()), "a slot that nobody named was written"
    for index, rows in enumerate(streams):
        assert torch.equal(states[index], _cold(backend, rows, positions[index]))
