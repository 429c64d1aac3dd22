"""An engine of several ranks, each a process, answers as one rank does: cold, hit, fork, loaded.

One engine stores units and the other loads them, whichever of the two has several ranks: a unit is
the whole model's. All runs use drafts, which rank 0 proposes and all ranks verify. With
FERRYMAN_TEST_RANKS set, the tests run for a mixture of experts too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.host_fed import Cell, HostFed, assert_same, engine
from tests.native import ALL_KINDS, native_config, save_native
from tests.tiny_models import save_tiny_model

from ferryman.schedule.request import SamplingParams

PROMPT = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=5, ignore_eos=True)
DRAWN = SamplingParams(
    max_tokens=12, temperature=0.9, top_p=0.9, seed=3, repetition_penalty=1.3, ignore_eos=True
)


BY_HAND = ["granite_moe"] if "FERRYMAN_TEST_RANKS" in os.environ else []


@pytest.fixture(scope="module", params=["native", *BY_HAND])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "native":
        return save_native(path, native_config(ALL_KINDS), 0)
    return save_tiny_model(path, request.param)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Iterator[HostFed]:
    with engine(folder, Cell(1024, overlap=False, draft=drafter_of(folder))) as llm:
        yield llm


@pytest.fixture(scope="module")
def cut(folder: Path) -> Iterator[HostFed]:
    cell = Cell(32, overlap=True, draft=drafter_of(folder), tp_size=2)
    with engine(folder, cell) as llm:
        yield llm


def drafter_of(folder: Path) -> str:
    """A draft model whose every draft is right, or the text, which drafts what is mostly wrong."""
    return "ngram" if folder.name.startswith("granite") else str(folder)


def test_two_ranks_answer_as_one_does(whole: HostFed, cut: HostFed) -> None:
    for llm in (whole, cut):
        llm.forget()
    cold = whole.generate([PROMPT], GREEDY)[0]
    assert_same(cut.generate([PROMPT], GREEDY)[0], cold)
    hit = cut.generate([PROMPT], GREEDY)[0]
    assert hit.cached_tokens["device"] == 64
    assert_same(hit, cold)
    forks = [[*PROMPT[:66], *tail] for tail in ([5], [9] * 20, PROMPT[66:])]
    mixed = [*forks, *(PROMPT[:n] for n in (1, 16, 17, 40))]
    for found, right in zip(
        cut.generate(mixed, GREEDY), whole.generate(mixed, GREEDY), strict=True
    ):
        assert_same(found, right)
    assert cut._engine.scheduler.statistics().drafted_tokens > 0
    cut.check_integrity()


def test_the_slabs_of_both_ranks_have_places(whole: HostFed, cut: HostFed) -> None:
    ours, alone = cut._engine, whole._engine
    assert ours.shares.digest == alone.shares.of(2).digest, "each computes what the other keeps"
    assert alone.shares.digest == ours.manifest.digest
    for kind, place in ours.places.items():
        size = alone.shares.of(2).layout(kind).slot_bytes
        assert [slab.slot_bytes for slab in place.ranks] == [size, size]
        assert place.num_bytes == 2 * size * ours.capacity.slots[kind]
        first, second = place.ranks
        assert not set(range(first.address, first.address + first.num_bytes, 64)) & {second.address}


def test_what_is_drawn_is_drawn_once_for_all_ranks(whole: HostFed, cut: HostFed) -> None:
    """The second step reads on every rank what rank 0 drew in the first."""
    prompts = [PROMPT[:n] for n in (20, 33)]
    found = [one.token_ids for one in cut.generate(prompts, DRAWN)]
    assert found == [one.token_ids for one in whole.generate(prompts, DRAWN)]


@pytest.mark.parametrize("reader", ["cut", "whole"])
def test_what_one_stored_the_other_loads(whole: HostFed, cut: HostFed, reader: str) -> None:
    loads, stores = (cut, whole) if reader == "cut" else (whole, cut)
    for llm in (loads, stores):
        llm.forget()
    cold = whole.generate([PROMPT], GREEDY)[0]
    stores.generate([PROMPT], GREEDY)
    stores.write_through(PROMPT)
    loads.forget()
    loads.attach(stores.host)
    found = loads.generate([PROMPT], GREEDY)[0]
    assert found.cached_tokens == {"device": 0, "host": 64, "storage": 0}
    assert_same(found, cold)
    loads.check_integrity()
