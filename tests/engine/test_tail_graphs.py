"""A prompt's short chunk replayed as a graph is the chunk that is launched as long as it is.

A card is not needed: `replayed_graphs.py` stands for one, with Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.plans import NO_OPS, Guest, chunk, prefill, tables
from tests.engine.replayed_graphs import ReplayedGraphs, like_a_card
from tests.engine.runner_pair import PAGE_SIZE
from tests.engine.test_step_graphs import SMALL, guests
from tests.model.telling import ALL_FAMILIES, NATIVE, save_telling
from tests.native import save_native
from torch.utils._python_dispatch import TorchDispatchMode

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.step import StepGraphs
from ferryman.engine.forward.step_tensors import pack
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.runner import Runner
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.manifest import pads_prompts
from ferryman.schedule.batch import AuditStep, PrefillStep, SlotOps
from ferryman.schedule.prompt_scores import ScoreRequest
from ferryman.schedule.step_sizes import PADDING, StepSizes, TailSize

SLOTS = {Kind.FULL: 24, Kind.WINDOW: 24, Kind.RECURRENT: 16}
SIZES = StepSizes(0, 4, PAGE_SIZE, tail_rows=(16, 32))
BITS = "cuda/9.0-nvidia-h200/float32/r00000000/tp1"
FAMILIES = ALL_FAMILIES if "FERRYMAN_TEST_ALL_CELLS" in os.environ else (NATIVE,)


class WideFunctions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Functions of single numbers, computed in float64 and rounded. On a card they do not depend on
    the rows; on the processor the last ones of a tensor take another way, a last bit apart."""

    NAMES = frozenset({"exp", "sigmoid", "silu", "softplus", "log1p", "tanh", "cos", "sin"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().removeprefix("aten::") not in self.NAMES or args[0].dtype != torch.float32:
            return func(*args, **(kwargs or {}))
        return func(args[0].double(), *args[1:], **(kwargs or {})).float()


@dataclass(frozen=True)
class ChunkPair:
    """One runner launches chunks as long as they are, the other replays padded ones."""

    launched: Runner
    replayed: Runner
    slabs: tuple[Slabs, Slabs]
    graphs: ReplayedGraphs

    def run(self, step: PrefillStep) -> None:
        """Both draw the same token, and leave the same bits in all slots."""
        assert self.replayed.run(step).sampled == self.launched.run(step).sampled
        for kind, slab in self.slabs[0].tensors.items():
            assert slab.equal(self.slabs[1].tensors[kind]), kind


def pair_of(folder: Path) -> ChunkPair | None:
    """None for a model whose chunks are not padded."""
    options = LoadOptions("float32", page_size=PAGE_SIZE, arithmetic=BITS)
    model, graphs = load_model(folder, options), ReplayedGraphs()
    if not pads_prompts(model.config):
        return None
    slabs = [Slabs.allocate(model.manifest, SLOTS, "cpu") for _ in range(2)]
    launched = Runner(model, slabs[0], max_rows=4, max_len=64)
    maker = StepGraphs(SIZES.max_tokens, graphs)
    replayed = Runner(model, slabs[1], max_rows=4, max_len=64, sizes=SIZES, replays=maker)
    return ChunkPair(launched, replayed, (slabs[0], slabs[1]), graphs)


def cut(
    step_id: int,
    guest: Guest,
    start: int,
    end: int,
    snapshots: Sequence[tuple[int, int]] = (),
    ops: SlotOps = NO_OPS,
) -> PrefillStep:
    kept = snapshots if guest.working_slot >= 0 else ()
    return PrefillStep(step_id, ops, (chunk(guest, start, end, kept),), tables([guest]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for it")
# Memory behind the chunk's rows may hold anything, which kernels compute on and leave out.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("layers_of_a_card")
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_chunks_have_the_bits_of_launched_ones(family: str, tmp_path: Path) -> None:
    folder = tmp_path
    if family == NATIVE:
        save_native(folder, SMALL)
    else:
        save_telling(folder, family, PAGE_SIZE, 64)
    pair = pair_of(folder)
    if pair is None:
        pytest.skip("its chunks are cut on the host")
    with like_a_card(), WideFunctions():  # type: ignore[no-untyped-call]
        _, bert, carl = guests(tuple(pair.slabs[0].by_kind))
        clears = tuple(g.working_slot for g in (bert, carl) if g.working_slot >= 0)
        # Each graph was captured on padding alone, and the second chunk finds the first one's
        # numbers in its rows. Slots 3 and 11 are nobody's.
        pair.run(cut(1, carl, 0, 14, ops=SlotOps(clears=clears)))
        pair.run(cut(2, bert, 0, 5))
        pair.run(cut(3, carl, 14, 33, ((16, 3), (32, 11))))
    assert [graph.num_replays for graph in pair.graphs.captured] == [2, 1]


def test_only_one_short_chunk_that_asks_for_a_token_alone_is_padded() -> None:
    anna = Guest("anna", list(range(300)), 0, 0, {Kind.FULL: range(8)})
    bert = Guest("bert", list(range(9)), 1, 1, {Kind.FULL: range(8)})
    sizes = StepSizes(2, 8, PAGE_SIZE, tail_rows=(16, 64, 256))
    short = cut(1, anna, 290, 300)
    assert sizes.tail_of(short) == TailSize(16, 64)
    assert sizes.tail_of(cut(1, anna, 283, 300)) == TailSize(64, 64)
    assert sizes.tail_of(cut(1, anna, 0, 256)) == TailSize(256, 64), "no token is drawn"
    assert sizes.tail_of(cut(1, anna, 0, 257)) is None
    assert sizes.tail_of(prefill(1, [(anna, 290, 300), (bert, 0, 9)])) is None
    assert sizes.tail_of(replace(short, adapters=np.array([1]))) is None
    assert sizes.tail_of(AuditStep(1, short.ops, short.chunks, short.page_tables)) is None
    scored = replace(short.chunks[0], scores=(ScoreRequest(291, np.zeros(9, "<u4"), 0),))
    assert sizes.tail_of(replace(short, chunks=(scored,))) is None
    three = tuple((292 + n, n) for n in range(3))
    assert sizes.tail_of(cut(1, anna, 290, 300, three)) is None
    assert sizes.tail_of(cut(1, anna, 290, 300, three[:2])) == TailSize(16, 64)
    assert replace(sizes, tail_rows=()).tail_of(short) is None


def test_the_body_of_a_padded_chunk_lies_at_the_same_places() -> None:
    anna = Guest("anna", list(range(40)), 2, 5, {Kind.FULL: range(3)})
    first = pack(cut(1, anna, 24, 40, ((32, 7),)), SIZES)
    other = pack(cut(2, anna, 0, 3, ops=SlotOps(clears=(5,))), SIZES)
    end = first.places["tail"][0]
    body = [name for name, (begin, _) in first.places.items() if begin < end]
    assert {name: first.places[name] for name in body} == {
        name: other.places[name] for name in body
    }
    assert other.places["tail"][0] == end
    assert all(begin % 2 == 0 for begin, _ in first.places.values()), "two words are aligned"
    assert other.array("positions").tolist() == [0, 1, 2, *[PADDING] * 13]
    assert other.array("pages.full")[0].tolist() == [0, 1, 2, *[PADDING] * 61]
    assert other.array("rows").tolist() == [2] * 3
    assert first.array("runs")[:, :5].tolist() == [
        [0, 8, 5, 5, 7],
        [8, 8, 5, 5, PADDING],
        [1, 0, PADDING, PADDING, PADDING],
    ]
    assert first.array("stores")[:, 2:].tolist() == [[8, 7], [PADDING] * 2, [16, PADDING]]
