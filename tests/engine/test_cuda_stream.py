"""The same steps on a card: one CUDA stream fed by the forward stream's thread."""

from __future__ import annotations

import pytest
import torch
from tests.engine.plans import Guest, decode, full_pages, prefill
from tests.engine.toy_model import toy_runner, toy_tokens

from ferryman.cache.manifest import Kind
from ferryman.engine.device import CudaDevice
from ferryman.engine.stream import ForwardStream
from ferryman.schedule.batch import SlotOps, Snapshot

ANNA = Guest("anna", [3, 1, 4, 1, 5, 9, 2, 6, 5], row=0, working_slot=2, pages=full_pages(7, 3, 5))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_steps_in_flight_on_a_card_say_what_the_processor_says() -> None:
    device = CudaDevice()
    runner = toy_runner(device)
    with ForwardStream(runner, context=device.entered()) as stream:
        steps = [
            stream.submit(prefill(0, [(ANNA, 0, 9)], SlotOps(clears=(2,)))),
            stream.submit(decode(1, [(ANNA, 9)], SlotOps(snapshots=(Snapshot(2, 4, 10),)))),
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
