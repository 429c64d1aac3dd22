"""Rows 30 and 46: the messages of a worker of several ranks, and fewer heads than ranks."""

from __future__ import annotations

from itertools import product

import grimp
import pytest

from ferryman.cache.shards import piece_of
from ferryman.errors import ConfigError
from ferryman.model.shapes.ranks import per_rank, per_rank_replicated

# A module that imports these decides something, or sends messages to other processes.
DECIDES_OR_SPEAKS = (
    "ferryman.schedule.scheduler",
    "ferryman.schedule.reservations",
    "ferryman.cache.planner",
    "ferryman.cache.tree",
    "ferryman.engine.memory.loads",
    "ferryman.wire",
    "ferryman.handoff",
    "ferryman.worker",
)


def test_row_30_ranks_beside_the_first_have_nothing_to_decide_or_say() -> None:
    """Only rank 0 sends a hand-off's messages: the other ranks import no module that could."""
    graph = grimp.build_graph("ferryman")
    known = graph.find_upstream_modules("ferryman.engine.tensor_parallel.rank")
    assert "ferryman.engine.forward.step" in known, "the question must find what a rank does know"
    found = [n for n in known if n.startswith(DECIDES_OR_SPEAKS)]
    assert found == []


def test_row_46_every_rank_keeps_at_least_one_head_or_the_model_is_refused() -> None:
    """And the heads of all ranks together are all heads, each as often as any other."""
    for heads, num_ranks in product(range(1, 17), repeat=2):
        if heads % num_ranks and num_ranks % heads:
            with pytest.raises(ConfigError, match=f"tp_size={num_ranks} does not divide kv_heads"):
                per_rank_replicated("kv_heads", heads, num_ranks)
            continue
        own = per_rank_replicated("kv_heads", heads, num_ranks)
        assert own >= 1
        pieces = heads // own
        keepers = [piece_of(pieces, rank, num_ranks) for rank in range(num_ranks)]
        assert sorted(set(keepers)) == list(range(pieces))
        assert {keepers.count(piece) for piece in range(pieces)} == {num_ranks // pieces}


def test_row_46_heads_that_are_computed_are_never_replicated() -> None:
    assert per_rank("q_heads", 8, 4) == 2
    with pytest.raises(ConfigError, match="tp_size=4 does not divide q_heads 2"):
        per_rank("q_heads", 2, 4)
