"""A whole hand-off costs a card on either side this much, in counts: prefill, frames, decode."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.doubles.fake_card import FakeCard, PinnedMemory
from tests.doubles.stamps import StampSlabs
from tests.harness import schedule
from tests.harness.pair import WorkerPair, expected, fake_engine, pair_of_engines
from tests.harness.schedule import PAGE
from tests.planes import plane_of
from tests.waiting import until

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.engine.engine import Engine
from ferryman.engine.memory import pinned_pieces
from ferryman.engine.memory import transfer as transfer_module
from ferryman.wire.handoff import grpc_plane, memory_plane
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.plane_values import PlaneChoice

SLOT_BYTES = 4 << 20
PIECE, FRAME = 64 << 10, 256 << 10
PROMPT_LEN = 21
with_nixl = pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed")
PLANES = ["grpc", "auto", pytest.param("nixl-unlocked", marks=with_nixl)]


def section(name: str, length: int) -> SectionSpec:
    return SectionSpec(name, 0, (length,), "float64", shard_axis=0)


# Two stamps, and as many bytes behind them as make a slot of many frames.
STATE = [section("stamps", 2), section("ballast", SLOT_BYTES // 8 - 2)]
LARGE_STATES = StateManifest(
    "large states",
    PAGE,
    PAGE,
    0,
    (lay_out(Kind.FULL, [section("stamps", PAGE)]), lay_out(Kind.RECURRENT, STATE)),
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_pieces, "LEAVING_BYTES", PIECE)
    monkeypatch.setattr(transfer_module, "LANDING_BYTES", FRAME)
    monkeypatch.setattr(grpc_plane, "MAX_FRAME_BYTES", FRAME)
    monkeypatch.setattr(memory_plane, "FRAME_BYTES", FRAME)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
    return PinnedMemory.counted(monkeypatch)


def on_card(engine: Engine) -> Engine:
    slabs = engine.transfer._slots  # type: ignore[attr-defined]
    assert isinstance(slabs, StampSlabs)
    return replace(engine, transfer=FakeCard(slabs._bytes))


def card_of(engine: Engine) -> FakeCard:
    assert isinstance(engine.transfer, FakeCard)
    return engine.transfer


@asynccontextmanager
async def pair_on_cards(planes: PlaneChoice) -> AsyncIterator[WorkerPair]:
    with (
        fake_engine(LARGE_STATES, num_slots=12) as first,
        fake_engine(LARGE_STATES, num_slots=12) as second,
    ):
        async with pair_of_engines(on_card(first), on_card(second), planes) as pair:
            yield pair


async def hand_off(pair: WorkerPair, name: str, token_id: int) -> int:
    """Returns the bytes of the hand-off of a prompt of these tokens, which is answered right."""
    asked = schedule.request(LARGE_STATES, name, [token_id] * PROMPT_LEN, 6)
    await pair.run_prefill(pair.order(asked))
    tokens, _ = await pair.read_tokens(name)
    assert tokens == expected(asked)
    await until(lambda: not pair.leased())
    num_bytes = pair.prefill.facts("handed_off")[-1]["bytes"]
    assert isinstance(num_bytes, int)
    return num_bytes


@pytest.mark.parametrize("planes", PLANES)
async def test_no_memory_of_a_slot_s_size_is_taken(
    planes: PlaneChoice, pinned: PinnedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Units are read in threads: with more pairs their number would be that of the readers at once.
    monkeypatch.setattr(pinned_pieces, "NUM_PAIRS", 1)
    async with pair_on_cards(planes) as pair:
        await hand_off(pair, "first", 3)
        assert set(pinned.sizes) <= {PIECE, FRAME}
        num_taken = len(pinned.sizes)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            assert await hand_off(pair, "second", 5) > SLOT_BYTES
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak - before < SLOT_BYTES // 2
        assert len(pinned.sizes) == num_taken, "pieces are used again"
        assert pair.prefill.facts("handed_off")[-1]["path"] == plane_of(planes)


@pytest.mark.parametrize("planes", PLANES)
async def test_each_byte_leaves_once_lands_once_and_is_hashed_on_its_way(
    planes: PlaneChoice,
) -> None:
    async with pair_on_cards(planes) as pair:
        num_bytes = await hand_off(pair, "r1", 3)
        prefill, decode = card_of(pair.prefill.engine), card_of(pair.decode.engine)
        if plane_of(planes) == "nixl":  # it reads and writes the slots itself
            assert (prefill.bytes_read, decode.bytes_landed) == (0, 0)
            assert prefill.num_digests == decode.num_digests > 0
            return
        assert prefill.bytes_read == num_bytes
        assert decode.bytes_landed == decode.bytes_hashed_on_landing == num_bytes
        assert (prefill.num_digests, decode.num_digests) == (0, 0), "nothing is read a second time"
        assert prefill.side.num_waits == prefill.side.num_runs
        assert decode.side.num_waits == decode.side.num_runs


@pytest.mark.parametrize("planes", ["grpc", "auto"])
async def test_a_piece_is_hashed_while_the_card_copies_the_next(planes: PlaneChoice) -> None:
    async with pair_on_cards(planes) as pair:
        await hand_off(pair, "r1", 3)
        log = card_of(pair.prefill.engine).side.log
    whole = sum("begins" in line for line in log)
    assert whole >= SLOT_BYTES // PIECE
    ahead = sum(
        f"{number + 1} begins" in log[: log.index(f"{number} ends")] for number in range(1, whole)
    )
    # All pieces of a frame but its last one have the next one under way.
    assert ahead >= SLOT_BYTES // PIECE * 3 // 4
