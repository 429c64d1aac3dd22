"""The same steps on a card: one CUDA stream fed by the forward stream's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from tests.engine.host_fed import mapped
from tests.engine.plans import Guest, decode, full_pages, load, prefill, with_snapshots
from tests.engine.toy_model import ToyModel, toy_runner, toy_tokens

from ferryman.cache.keys import as_token_ids
from ferryman.cache.manifest import Kind
from ferryman.engine.device import CudaDevice
from ferryman.engine.memory.copy_stream import CopyStream
from ferryman.engine.memory.transfer import digest_of
from ferryman.engine.runner import DeviceStep, Runner
from ferryman.engine.stream import ForwardStream
from ferryman.schedule.batch import RowSeed, SlotOps, SlotSnapshot, StepPlan

ANNA = Guest("anna", [3, 1, 4, 1, 5, 9, 2, 6, 5], row=0, working_slot=2, pages=full_pages(7, 3, 5))

T = TypeVar("T")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _launches_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that waits for the card is an error; reading a slot back may wait."""
    launch = Runner.launch

    def watched(runner: Runner, plan: StepPlan) -> DeviceStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(runner, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Runner, "launch", watched)
    for name in ("prefill", "decode"):
        monkeypatch.setattr(ToyModel, name, _waiting(getattr(ToyModel, name)))


def _waiting(forward: Callable[..., T]) -> Callable[..., T]:
    """The toy model computes with Python's numbers, so its forwards wait for the card."""

    def run(*args: Any) -> T:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return forward(*args)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    return run


def test_steps_in_flight_on_a_card_say_what_the_processor_says() -> None:
    device = CudaDevice()
    runner = toy_runner(device)
    with ForwardStream(runner, context=device.entered()) as stream:
        steps = [
            stream.submit(prefill(0, [(ANNA, 0, 9)], SlotOps(clears=(2,)))),
            stream.submit(decode(1, [(ANNA, 9)], SlotOps(snapshots=(SlotSnapshot(2, 4, 10),)))),
            stream.submit(decode(2, [(ANNA, 10)])),
        ]
        found = [step.result(60).sampled[0].token_id for step in steps]
        arena = bytearray(len(runner.transfer.read(Kind.RECURRENT, 4)))
        digest = stream.call(
            lambda: runner.transfer.store_unit(Kind.RECURRENT, 4, memoryview(arena))
        ).result(60)
        stream.call(
            lambda: runner.transfer.load_unit(Kind.RECURRENT, 5, memoryview(arena), digest)
        ).result(60)
        copied = stream.call(lambda: runner.transfer.digest(Kind.RECURRENT, 5)).result(60)
    assert found == toy_tokens(ANNA.tokens, 3)
    assert copied == digest


def test_loads_beside_the_forward_on_a_card_say_what_the_processor_says() -> None:
    device = CudaDevice()
    writer = toy_runner()
    writer.run(with_snapshots(prefill(0, [(ANNA, 0, 9)], SlotOps(clears=(2,))), (8, 4)))
    arena, loads = bytearray(), []
    units = [(Kind.RECURRENT, 4, 2), (Kind.FULL, 7, 7), (Kind.FULL, 3, 3)]
    for kind, slot, dst in units:
        content = bytes(writer.transfer.read(kind, slot))
        loads.append(load(ANNA, kind, dst, len(arena), content, digest_of(content)))
        arena += content
    seeds = (RowSeed(0, as_token_ids(ANNA.tokens[:8])),)
    with CopyStream() as copies:
        runner = toy_runner(device, copies)
        runner.host_tier.attach(mapped(arena))
        with ForwardStream(runner, context=device.entered()) as stream:
            step = prefill(0, [(ANNA, 8, 9)], SlotOps(loads=tuple(loads), seeds=seeds))
            outcome = stream.submit(step).result(60)
            (second,) = stream.submit(decode(1, [(ANNA, 9)])).result(60).sampled
    assert outcome.corrupt == ()
    assert outcome.loaded.num_bytes == len(arena)
    assert outcome.loaded.seconds > 0
    assert [outcome.sampled[0].token_id, second.token_id] == toy_tokens(ANNA.tokens, 2)
