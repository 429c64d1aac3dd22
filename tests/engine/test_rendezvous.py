"""Ranks over gloo: the same bits on every rank, and no waiting for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from ferryman.engine.tensor_parallel.rendezvous import (
    RankLost,
    Rendezvous,
    TorchGroup,
    check_cards,
    device_of_rank,
    join,
)
from ferryman.errors import ConfigError

T = TypeVar("T")
CPU = torch.device("cpu")
PATIENCE_SECONDS = 60.0


def on_ranks(
    folder: Path,
    num_ranks: int,
    work: Callable[[TorchGroup], T],
    silence_seconds: float = PATIENCE_SECONDS,
) -> list[T]:
    """The result of `work` on each rank; a rank is a thread here.

    Raises the error of the lowest rank that failed.
    """
    meeting = Rendezvous(folder / "meeting", num_ranks, silence_seconds)
    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(_met, meeting, rank, work) for rank in range(num_ranks)]
    return [future.result() for future in futures]


def _met(meeting: Rendezvous, rank: int, work: Callable[[TorchGroup], T]) -> T:
    return work(join(meeting, rank, CPU))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_sum_has_the_same_bits_on_every_rank(
    tmp_path: Path, num_ranks: int, dtype: torch.dtype
) -> None:
    """Or ranks would part: each routes tokens and chooses positions by what it has itself."""
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(num_ranks, 37, 301, generator=generator, dtype=torch.float64).to(dtype)
    first, *ranks = on_ranks(tmp_path, num_ranks, lambda g: g.summed(parts[g.rank].clone()))
    for other in ranks:
        assert torch.equal(other, first)
    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(first, parts.sum(0), rtol=tolerance, atol=tolerance)


def test_parts_are_joined_in_the_order_of_ranks(tmp_path: Path) -> None:
    parts = torch.arange(3 * 2 * 4).view(3, 2, 4)
    for found in on_ranks(tmp_path, 3, lambda group: group.joined(parts[group.rank].clone())):
        assert torch.equal(found, torch.cat(tuple(parts), dim=-1))


def test_what_rank_0_tells_is_there_for_all_and_nothing_needs_no_call(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> tuple[list[int], tuple[int, ...]]:
        told = group.from_first(torch.tensor([7, 8, 9]) * (group.rank == 0))
        nothing = group.joined(torch.empty(0, 4))
        return told.tolist(), tuple(nothing.shape)

    assert on_ranks(tmp_path, 2, work) == [([7, 8, 9], (0, 8))] * 2


def test_a_rank_that_does_not_come_to_a_collective_is_lost(tmp_path: Path) -> None:
    over = threading.Event()

    def work(group: TorchGroup) -> bool:
        if group.rank == 1:
            return over.wait(PATIENCE_SECONDS)
        try:
            with pytest.raises(RankLost, match="gone or is silent"):
                group.summed(torch.ones(3))
        finally:
            over.set()
        return True

    assert on_ranks(tmp_path, 2, work, silence_seconds=3.0) == [True, True]


def test_a_rank_that_never_meets_the_others_is_lost(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match="did not meet"):
        join(Rendezvous(tmp_path / "meeting", 2, 0.2), 0, CPU)


def test_cards_are_numbered_on_from_the_workers_own() -> None:
    assert [str(device_of_rank("cuda:1", rank)) for rank in range(3)] == [
        "cuda:1",
        "cuda:2",
        "cuda:3",
    ]
    assert device_of_rank("cpu", 2) == CPU


def test_cards_are_counted_from_the_workers_own() -> None:
    check_cards(first=0, num_ranks=4, num_cards=4)
    check_cards(first=1, num_ranks=4, num_cards=5)
    with pytest.raises(ConfigError, match="needs cards 1 to 4, there are 4"):
        check_cards(first=1, num_ranks=4, num_cards=4)
