"""Decode steps replayed as graphs are the steps that are launched kernel by kernel.

A card is not needed: `replayed_graphs.py` stands for one, with Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.engine.plans import Guest, decode, prefill, verify
from tests.engine.replayed_graphs import (
    NotAsCaptured,
    ReadOnHost,
    ReplayedGraphs,
    like_a_card,
)
from tests.engine.runner_pair import PAGE_SIZE, RunnerPair, runner_pair
from tests.model.telling import ALL_FAMILIES, NATIVE, save_telling
from tests.native import native_config, save_native

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.step import StepGraphs
from ferryman.schedule.batch import SlotOps, StepOutcome, StepPlan
from ferryman.schedule.step_sizes import StepSizes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for it")


def test_a_number_read_on_the_host_cannot_be_captured() -> None:
    x = torch.arange(3)
    for run in (
        lambda: x.add_(int(x[0])),
        lambda: x.add_(len(x[x > 1])),
        lambda: x.add_(len(x.nonzero())),
        lambda: x.copy_(torch.tensor(x.tolist())),
    ):
        with pytest.raises(ReadOnHost):
            ReplayedGraphs().capture(run)  # type: ignore[arg-type]


def test_a_replay_with_another_number_address_or_size_is_noticed() -> None:
    x, other, state = torch.zeros(4), torch.zeros(4), {"factor": 2}
    taken = [x]

    def run() -> None:
        x.add_(taken[0] * state["factor"]).sub_(1)

    graph = ReplayedGraphs().capture(run)
    x.fill_(3)
    graph.replay()
    assert x.tolist() == [8.0] * 4
    state["factor"] = 3
    with pytest.raises(NotAsCaptured, match=r"2.* and now .*3"):
        graph.replay()
    state["factor"], taken[0] = 2, other
    with pytest.raises(NotAsCaptured):
        graph.replay()
    taken[0] = x[:1]
    with pytest.raises(NotAsCaptured):
        graph.replay()
    assert x.tolist() == [8.0] * 4, "a refused replay changes nothing"


SIZES = {Kind.FULL: 24, Kind.WINDOW: 24, Kind.RECURRENT: 16}
LENS = (18, 5, 33)
STEP_SIZES = StepSizes(max_requests=4, max_pages=4, page_size=PAGE_SIZE, num_drafts=1)
FAMILIES = ALL_FAMILIES if "FERRYMAN_TEST_ALL_CELLS" in os.environ else (NATIVE,)

SMALL = native_config(
    ("sliding_attention+mamba", "full_attention", "linear_attention"),
    hidden_size=16,
    intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    mamba_n_heads=2,
    mamba_n_groups=1,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
)


@dataclass(frozen=True)
class GraphedPair:
    """A pair of runners, and the graphs of the one that replays."""

    runners: RunnerPair
    graphs: ReplayedGraphs

    def run(self, step: StepPlan) -> StepOutcome:
        return self.runners.run(step)


def pair_of(folder: Path) -> GraphedPair:
    graphs = ReplayedGraphs()
    maker = StepGraphs(STEP_SIZES.max_tokens, graphs)
    return GraphedPair(runner_pair(folder, SIZES, maker, max_len=64, sizes=STEP_SIZES), graphs)


def guests(kinds: Sequence[Kind]) -> list[Guest]:
    """Requests with four pages of each kind, and with slots for two drafts."""
    paged = [kind for kind in kinds if kind is not Kind.RECURRENT]
    found = []
    for row, length in enumerate(LENS):
        slots = range(4 * row, 4 * row + 4)
        tokens = [(7 * i * i + 3 * i + row) % 40 + 3 for i in range(length)]
        working = 4 * row if Kind.RECURRENT in kinds else -1
        found.append(Guest(f"{row}", tokens, row, working, dict.fromkeys(paged, slots)))
    return found


def saved(folder: Path, family: str) -> Path:
    if family == NATIVE:
        return save_native(folder, SMALL)
    return save_telling(folder, family, PAGE_SIZE, 64)


@pytest.mark.usefixtures("layers_of_a_card")
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_have_the_bits_of_launched_ones(family: str, tmp_path: Path) -> None:
    pair = pair_of(saved(tmp_path, family))
    anna, bert, carl = guests(tuple(pair.runners.slabs[0].by_kind))
    clears = tuple(g.working_slot for g in (anna, bert, carl) if g.working_slot >= 0)
    spans = [(g, 0, len(g.tokens)) for g in (anna, bert, carl)]
    pair.run(prefill(1, spans, SlotOps(clears=clears)))
    with like_a_card():
        # Each graph was captured on padding alone. These are padded to four requests, and to two
        # with two tokens each.
        pair.run(decode(2, [(anna, 18), (bert, 5), (carl, 33)]))
        pair.run(verify(3, anna, 19, [5], [anna.working_slot + 1] if clears else [-1]))
    assert [graph.num_replays for graph in pair.graphs.captured] == [1, 1]
