"""Calls, checks and bounds where the parts of an engine meet: each was once left out by a draw of
planted defects, and no quick test noticed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ferryman.cache.manifest import Kind
from ferryman.engine import engine
from ferryman.engine.forward import token_source
from ferryman.engine.memory.copy_stream import CopyStream
from ferryman.engine.memory.loads import LoadedUnits, LoadQueue
from ferryman.engine.memory.transfer import HostTransfer
from ferryman.engine.runner import Runner, _as_scores
from ferryman.engine.stream import StreamClosed
from ferryman.engine.tensor_parallel import group
from ferryman.engine.tensor_parallel.rendezvous import RankLost
from ferryman.errors import CorruptState
from ferryman.model.sampling.token_rules import OutputTail
from ferryman.schedule.batch import NOTHING_LOADED, LoadReport
from ferryman.schedule.prompt_scores import ScoreRequest
from ferryman.schedule.request import NO_ADAPTER, Adapter


def test_an_answer_s_first_token_is_part_of_words_and_the_prompt_s_last_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tails: list[OutputTail] = []

    def note(logits: torch.Tensor, rules: object, tail: OutputTail) -> torch.Tensor:
        tails.append(tail)
        return logits

    monkeypatch.setattr(token_source, "apply_rules", note)
    draws = SimpleNamespace(
        positions=torch.tensor([5, 4]), rows=torch.tensor([0, 1]), prompt_lens=torch.tensor([4, 4])
    )
    rules = SimpleNamespace(bad_words=SimpleNamespace(token_ids=torch.zeros(1, 3)))
    history = torch.arange(20).reshape(2, 10)
    token_source._ruled(torch.zeros(2, 7), cast(Any, draws), cast(Any, rules), history)
    assert tails[0].token_ids.tolist() == [[-1, 4], [-1, -1]]


def test_copies_end_with_their_block() -> None:
    with CopyStream() as copies:
        assert copies.submit(lambda: 3).result(60) == 3
    assert not copies._thread.is_alive()
    with pytest.raises(StreamClosed):
        copies.submit(lambda: 3)


def test_the_loads_of_a_step_begin_once_however_often_it_is_begun() -> None:
    submitted: list[Any] = []
    copies = SimpleNamespace(submit=submitted.append)
    loads = LoadQueue(cast(Any, None), cast(Any, copies))
    for step_id in (1, 1, 0, 2, 2):
        loads.begin(step_id, cast(Any, ["a load"]))
    loads.begin(3, [])
    assert len(submitted) == 2


def test_loads_are_told_with_their_bytes_and_seconds() -> None:
    fence = cast(Any, SimpleNamespace(seconds=lambda: 0.5))
    assert LoadedUnits((), 9, fence).report() == LoadReport(9, 0.5)
    assert LoadedUnits((), 0, fence).report() is NOTHING_LOADED


def test_a_plan_s_loads_begin_when_it_is_submitted() -> None:
    begun: list[Any] = []
    tier = SimpleNamespace(begin=lambda *step: begun.append(step))
    plan = SimpleNamespace(step_id=4, ops=SimpleNamespace(loads="its loads"))
    Runner.begin(cast(Any, SimpleNamespace(host_tier=tier)), cast(Any, plan))
    assert begun == [(4, "its loads")]


def test_a_rank_that_started_beside_one_that_could_not_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []
    ended: list[int] = []

    def start(orders: Any) -> tuple[Any, Any]:
        return orders.rank, SimpleNamespace(close=lambda: closed.append(orders.rank))

    def lost(connection: object, rank: int) -> None:
        raise RankLost(f"rank {rank}")

    monkeypatch.setattr(group, "start_rank", start)
    monkeypatch.setattr(group, "_end", ended.append)
    monkeypatch.setattr(group, "read_reply", lost)
    orders = SimpleNamespace(meeting="meeting", num_ranks=3)
    monkeypatch.setattr(
        group, "replace", lambda told, **more: SimpleNamespace(**(vars(told) | more))
    )
    with pytest.raises(RankLost, match="rank 1"), group.start_ranks(cast(Any, orders)):
        pass
    assert closed == ended == [1, 2]


def test_each_request_has_its_own_part_of_a_step_s_scores() -> None:
    wanted = [ScoreRequest(5, np.zeros(2, "<u4"), 1), ScoreRequest(9, np.zeros(1, "<u4"), 2)]
    token_ids = np.arange(12).reshape(4, 3)
    first, second = _as_scores(wanted, (token_ids / 2, token_ids, np.arange(4) + 100))
    assert (first.first, second.first) == (5, 9)
    assert first.token_ids.tolist() == [[0, 1], [3, 4]]
    assert first.logprobs.tolist() == [[0.0, 0.5], [1.5, 2.0]]
    assert first.ranks.tolist() == [100, 101]
    assert second.token_ids.tolist() == [[6, 7, 8]]
    assert second.logprobs.tolist() == [[3.0, 3.5, 4.0]]
    assert second.ranks.tolist() == [102]


def test_adapters_are_numbered_behind_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "Decoder", SimpleNamespace)
    names = [SimpleNamespace(name=name, digest=name * 32) for name in "ab"]
    model = cast(Any, SimpleNamespace(lora=SimpleNamespace(names=names)))
    assert engine._adapters(model) == {"a": Adapter(1, "a" * 32), "b": Adapter(2, "b" * 32)}
    assert NO_ADAPTER.number == 0


def test_a_unit_of_another_size_reaches_no_slot() -> None:
    slot = bytearray(8)
    transfer = SimpleNamespace(_slots=SimpleNamespace(bytes_of=lambda *_: memoryview(slot)))
    for num_bytes in (7, 9):
        arena = memoryview(bytearray(b"x" * num_bytes))
        with pytest.raises(CorruptState, match="bytes"):
            HostTransfer.load_unit(cast(Any, transfer), Kind.FULL, 0, arena, bytes(16))
    assert slot == bytearray(8)
