"""A forward waits for the fence of its loads: here the fence notes that it was awaited, and when.

On a host device copies have ended when the copying call returns, so a wait that is left out changes
nothing but this note. On a card the forward would read slots that are still being written.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import pytest
from tests.doubles.stamps import StampSlabs, fake_manifest
from tests.engine.plans import Guest, full_pages, load, prefill
from tests.engine.toy_model import SIZES, ToyModel

from ferryman.cache.manifest import Kind
from ferryman.cache.units import HostUnit
from ferryman.engine.device import HostDevice
from ferryman.engine.memory.copy_stream import Copies, CopyFence, CopyRun, CopySide, CopyStream
from ferryman.engine.memory.loads import AT_ONCE, LoadQueue
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.memory.transfer import HostTransfer, digest_of
from ferryman.engine.runner import Runner
from ferryman.model.sampling.prompt_logprobs import PrefilledRows
from ferryman.model.shapes.batch import PrefillBatch
from ferryman.model.shapes.state import ModelState
from ferryman.schedule.batch import SlotLoad, SlotOps

ANNA = Guest("anna", [3, 1, 4, 1, 5, 9], row=0, working_slot=2, pages=full_pages(7, 3))


@dataclass
class NotedFence:
    """Of one run of copies, by its number."""

    log: list[str]
    number: int

    def wait(self) -> None:
        self.log.append(f"waited for {self.number}")

    def finish(self) -> None:
        raise AssertionError("the host need not stand still for this")

    def seconds(self) -> float:
        return 0.0


@dataclass
class NotedSide(HostDevice):
    """A host device whose copies have fences that are noted, as are its forwards."""

    log: list[str] = field(default_factory=list)
    num_runs: int = 0

    def copy_side(self) -> CopySide:
        return NotedCopies(self)


@dataclass
class NotedCopies:
    device: NotedSide

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self) -> CopyRun:
        self.device.num_runs += 1
        return self

    def end(self) -> CopyFence:
        self.device.log.append(f"copied {self.device.num_runs}")
        return NotedFence(self.device.log, self.device.num_runs)


class NotedModel(ToyModel):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def prefill(self, batch: PrefillBatch, state: ModelState) -> PrefilledRows:
        self.log.append("forward")
        return super().prefill(batch, state)


def _runner(device: NotedSide, copies: Copies) -> Runner:
    model = NotedModel(device.log)
    slabs = Slabs.allocate(model.manifest, SIZES, device.torch_device)
    return Runner(model, slabs, max_rows=4, max_len=64, device=device, copies=copies)


@pytest.mark.parametrize("begins", ["when it is submitted", "when it is launched"])
@pytest.mark.parametrize("beside", [False, True], ids=["at once", "on a copy stream"])
def test_a_forward_comes_behind_the_fence_of_its_own_loads(begins: str, beside: bool) -> None:
    device = NotedSide()
    with CopyStream() as stream:
        runner = _runner(device, stream if beside else AT_ONCE)
        size = len(runner.transfer.read(Kind.FULL, 0))
        content = bytes(range(64)) * (size // 64)
        runner.host_tier.attach(memoryview(content))
        loads = (load(ANNA, Kind.FULL, 7, 0, content, digest_of(content)),)
        for step_id in (0, 1):
            ops = SlotOps(loads=loads, clears=(2,))
            plan = prefill(step_id, [(ANNA, 4 + step_id, 5 + step_id)], ops)
            if begins == "when it is submitted":
                runner.begin(plan)
            runner.launch(plan)
    assert device.log == [
        "copied 1",
        "waited for 1",
        "forward",
        "copied 2",
        "waited for 2",
        "forward",
    ]


def test_a_step_without_loads_waits_for_no_copies() -> None:
    device = NotedSide()
    _runner(device, AT_ONCE).launch(prefill(0, [(ANNA, 0, 4)], SlotOps(clears=(2,))))
    assert device.log == ["forward"]


def test_a_step_with_loads_awaits_their_fence_before_it_is_launched() -> None:
    manifest = fake_manifest(4)
    slabs = StampSlabs(manifest, dict.fromkeys(manifest.kinds, 4))
    device = NotedSide()
    tier = LoadQueue(HostTransfer(slabs), AT_ONCE, NotedCopies(device))
    content = bytes(manifest.layout(Kind.FULL).slot_bytes)
    tier.attach(memoryview(content))
    unit = HostUnit(Kind.FULL, 0, b"k" * 16, 0, len(content), digest_of(content))
    loads = [SlotLoad("r1", unit, 2)]
    tier.begin(1, loads)
    assert device.log == ["copied 1"]
    loaded = tier.arrived(1, loads)
    assert loaded.corrupt == ()
    assert device.log == ["copied 1", "waited for 1"]
