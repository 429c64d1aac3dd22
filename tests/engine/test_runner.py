"""Steps on a real runner with a model that can be recomputed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.engine.plans import Guest, decode, full_pages, load, prefill, with_snapshots
from tests.engine.toy_model import toy_logits, toy_runner, toy_tokens
from torch import Tensor

from ferryman.cache.keys import as_token_ids
from ferryman.cache.manifest import Kind
from ferryman.engine.device import HostDevice
from ferryman.engine.memory.copy_stream import CopyStream
from ferryman.engine.memory.transfer import digest_of
from ferryman.engine.ops import SlotConflict
from ferryman.engine.runner import Runner
from ferryman.engine.stream import ForwardStream
from ferryman.schedule.batch import Ints, RowSeed, SlotCopy, SlotOps, SlotSnapshot
from ferryman.schedule.request import SamplingParams

ANNA = Guest("anna", [3, 1, 4, 1, 5, 9, 2, 6, 5], row=0, working_slot=2, pages=full_pages(7, 3, 5))
BERT = Guest("bert", [2, 7, 1, 8, 2], row=3, working_slot=6, pages=full_pages(1, 9))


def tokens_of(runner: Runner, *steps: object) -> list[int]:
    """The token that each step draws for its first request."""
    outcomes = [runner.run(step) for step in steps]  # type: ignore[arg-type]
    return [outcome.sampled[0].token_id for outcome in outcomes if outcome.sampled]


def test_chunks_and_decode_give_what_one_forward_over_all_tokens_gives() -> None:
    runner = toy_runner()
    found = tokens_of(
        runner,
        prefill(0, [(ANNA, 0, 4)], SlotOps(clears=(2,))),
        prefill(1, [(ANNA, 4, 9)]),
        decode(2, [(ANNA, 9)]),
        decode(3, [(ANNA, 10)]),
    )
    assert found == toy_tokens(ANNA.tokens, 3)


def test_requests_of_different_length_share_a_step() -> None:
    runner = toy_runner()
    runner.run(prefill(0, [(BERT, 0, 3), (ANNA, 0, 7)], SlotOps(clears=(2, 6))))
    first = runner.run(prefill(1, [(ANNA, 7, 9), (BERT, 3, 5)]))
    second = runner.run(decode(2, [(BERT, 5), (ANNA, 9)]))
    assert [s.token_id for s in first.sampled] == [
        toy_tokens(ANNA.tokens, 1)[0],
        toy_tokens(BERT.tokens, 1)[0],
    ]
    assert [s.token_id for s in second.sampled] == [
        toy_tokens(BERT.tokens, 2)[1],
        toy_tokens(ANNA.tokens, 2)[1],
    ]


@pytest.fixture
def copies() -> Iterator[CopyStream]:
    with CopyStream() as made:
        yield made


def test_the_prologue_loads_before_it_copies_and_seeds_before_the_forward_reads(
    copies: CopyStream,
) -> None:
    runner = toy_runner()
    runner.run(with_snapshots(prefill(0, [(ANNA, 0, 9)], SlotOps(clears=(2,))), (8, 4)))
    arena, offsets = bytearray(), []
    units = [(Kind.RECURRENT, 4), (Kind.FULL, 7), (Kind.FULL, 3)]
    for kind, slot in units:
        offsets.append(len(arena))
        arena += runner.transfer.read(kind, slot)
    other = toy_runner(copies=copies)
    other.host_tier.attach(memoryview(arena))
    carl = Guest("carl", ANNA.tokens, row=1, working_slot=0, pages=full_pages(10, 11, 12))
    loads = tuple(
        load(carl, kind, dst, offset, bytes(content), digest_of(content))
        for (kind, slot), dst, offset in zip(units, (5, 10, 11), offsets, strict=True)
        for content in [runner.transfer.read(kind, slot)]
    )
    seeds = (RowSeed(1, as_token_ids(ANNA.tokens[:8])),)
    # The load of slot 5 must come before the copy from it.
    ops = SlotOps(loads=loads, copies=(SlotCopy(5, 0),), seeds=seeds)
    params = SamplingParams(temperature=0.0, repetition_penalty=3.0)
    with ForwardStream(other) as stream:
        step = prefill(7, [(replace(carl, params=params), 8, 9)], ops)
        outcome = stream.submit(step).result(60)
    logits = toy_logits(ANNA.tokens)
    seen = torch.tensor(sorted(set(ANNA.tokens)))
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 3, logits[seen] * 3)
    assert outcome.sampled[0].token_id == int(logits.argmax())
    assert outcome.corrupt == ()
    assert outcome.loaded.num_bytes == len(arena)
    assert outcome.loaded.seconds > 0


def test_the_epilogue_freezes_the_state_behind_the_token_of_the_step() -> None:
    runner = toy_runner()
    runner.run(prefill(0, [(ANNA, 0, 9)], SlotOps(clears=(2,))))
    runner.run(decode(1, [(ANNA, 9)], SlotOps(snapshots=(SlotSnapshot(2, 4, 10),))))
    frozen = bytes(runner.transfer.read(Kind.RECURRENT, 4))
    assert frozen == bytes(runner.transfer.read(Kind.RECURRENT, 2))
    runner.run(decode(2, [(ANNA, 10)]))
    assert frozen == bytes(runner.transfer.read(Kind.RECURRENT, 4))
    fork = replace(ANNA, request_id="fork", working_slot=7)
    again = runner.run(decode(3, [(fork, 10)], SlotOps(copies=(SlotCopy(4, 7),))))
    assert again.sampled[0].token_id == toy_tokens(ANNA.tokens, 3)[2]


def test_a_snapshot_of_the_scan_is_the_state_at_its_position() -> None:
    runner = toy_runner()
    runner.run(with_snapshots(prefill(0, [(ANNA, 0, 9)], SlotOps(clears=(2,))), (4, 0), (8, 1)))
    at_four = toy_runner()
    at_four.run(prefill(0, [(ANNA, 0, 4)], SlotOps(clears=(2,))))
    # The scan writes sections; the padding of a slot after them is unused.
    used = slice(0, 3 * 64 + 8)
    expected = bytes(at_four.transfer.read(Kind.RECURRENT, 2)[used])
    assert bytes(runner.transfer.read(Kind.RECURRENT, 0)[used]) == expected


def test_running_a_plan_again_finds_no_slot_operation_left() -> None:
    """Defect 3: the lists stayed on a batch that a second pass reused."""
    runner = toy_runner()
    ops = SlotOps(clears=(2,), copies=(SlotCopy(0, 5),), snapshots=(SlotSnapshot(2, 3, 9),))
    step = with_snapshots(prefill(0, [(ANNA, 0, 9)], ops), (4, 1))
    runner.run(step)
    assert runner.once.num_consumed == 4
    marked = (1, 3, 5)
    for slot in marked:
        runner.transfer.write(Kind.RECURRENT, slot, 0, b"mark")
    advanced = runner.transfer.digest(Kind.RECURRENT, 2)
    runner.run(step)
    assert runner.once.num_consumed == 4
    for slot in marked:
        assert bytes(runner.transfer.read(Kind.RECURRENT, slot)[:4]) == b"mark"
    # The forward ran on from where it was: had the clear run again, this would be as before.
    assert runner.transfer.digest(Kind.RECURRENT, 2) != advanced


def test_a_second_step_reads_the_first_ones_token_on_the_device() -> None:
    runner = toy_runner()
    with ForwardStream(runner) as stream:
        steps = [
            stream.submit(prefill(0, [(ANNA, 0, 9)], SlotOps(clears=(2,)))),
            stream.submit(decode(1, [(ANNA, 9)])),
            stream.submit(decode(2, [(ANNA, 10)])),
        ]
        found = [step.result().sampled[0].token_id for step in steps]
    assert found == toy_tokens(ANNA.tokens, 3)


def test_a_corrupt_load_names_its_request_and_spares_the_others() -> None:
    runner = toy_runner()
    content = bytes(runner.transfer.read(Kind.FULL, 0))
    runner.host_tier.attach(memoryview(content))
    bad = load(BERT, Kind.FULL, 1, 0, content, digest_of(b"other bytes"))
    step = prefill(0, [(ANNA, 0, 9), (BERT, 4, 5)], SlotOps(loads=(bad, bad), clears=(2, 6)))
    with pytest.raises(SlotConflict, match=r"full slot 1 .* bert and by the load"):
        runner.run(step)
    outcome = runner.run(replace(step, ops=replace(step.ops, loads=(bad,))))
    assert outcome.corrupt == ("bert",)
    assert outcome.sampled[0].token_id == toy_tokens(ANNA.tokens, 1)[0]


def test_a_unit_outside_the_arena_is_corrupt() -> None:
    runner = toy_runner()
    content = bytes(runner.transfer.read(Kind.FULL, 0))
    lost = load(ANNA, Kind.FULL, 7, 64, content, digest_of(content))
    outcome = runner.run(prefill(0, [(ANNA, 0, 9)], SlotOps(loads=(lost,), clears=(2,))))
    assert outcome.corrupt == ("anna",)


class CountingDevice(HostDevice):
    """Counts what crosses to the device, and how much comes back."""

    def __init__(self) -> None:
        self.num_uploads = 0

    def upload(self, integers: Ints) -> Tensor:
        self.num_uploads += 1
        return super().upload(integers)


def test_every_step_is_one_transfer() -> None:
    device = CountingDevice()
    runner = toy_runner(device)
    params = SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.5, seed=4, logprobs=2)
    warm = replace(ANNA, params=params)
    seeds = (RowSeed(3, as_token_ids([1, 2])),)
    runner.run(prefill(0, [(warm, 0, 9)], SlotOps(clears=(2, 0), seeds=seeds)))
    assert device.num_uploads == 1
    ops = SlotOps(copies=(SlotCopy(0, 6),), snapshots=(SlotSnapshot(2, 4, 10),))
    runner.run(decode(1, [(warm, 9)], ops))
    assert device.num_uploads == 2


def test_logprobs_are_of_the_models_own_distribution() -> None:
    runner = toy_runner()
    params = SamplingParams(temperature=5.0, seed=11, logprobs=3, repetition_penalty=2.0)
    loud, quiet = replace(ANNA, params=params), BERT
    step = prefill(0, [(loud, 0, 9), (quiet, 0, 5)], SlotOps(clears=(2, 6)))
    sampled = runner.run(step).sampled
    logs = torch.log_softmax(toy_logits(ANNA.tokens), dim=0)
    best = {int(i): float(logs[i]) for i in logs.argsort(descending=True)[:3]}
    expected = {**best, sampled[0].token_id: float(logs[sampled[0].token_id])}
    assert sampled[0].logprobs == pytest.approx(expected)
    assert sampled[1].logprobs == {}


def test_a_token_beyond_the_history_is_refused_by_name() -> None:
    runner = toy_runner()
    with pytest.raises(IndexError, match="position 9 of row 4 does not fit the history of 4 rows"):
        runner.run(prefill(0, [(replace(ANNA, row=4), 0, 9)], SlotOps(clears=(2,))))
