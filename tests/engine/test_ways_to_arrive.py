"""Every way to arrive at a prompt's state × chunkings × overlap × alone and in one batch, exact.

Another engine, with another chunking, computed the loaded units; units from storage went through
files. Plans prove that each prompt arrived in the intended way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engine.from_storage import bring_from_storage, host_store
from tests.engine.host_fed import PAGE_SIZE, Cell, HostFed, HostMemory, assert_same, engine
from tests.variants import save_variant

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import Reason, ResumePlan
from ferryman.cache.units import Tier
from ferryman.llm import Completion
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.limits import IN_TURNS, TOGETHER
from ferryman.schedule.request import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5, ignore_eos=True)
ROOM = {Kind.FULL: 64, Kind.WINDOW: 32, Kind.RECURRENT: 8}
LITTLE_ROOM = {Kind.FULL: 4, Kind.WINDOW: 4, Kind.RECURRENT: 2}


def tokens(family: int, length: int = 75) -> list[int]:
    return [(7 * i * i + 3 * i + 11 * family) % 120 + 3 for i in range(length)]


STEM = tokens(2, 40)
LEFT_AT_PAGE_2 = [[*STEM, *[4] * 40], [*STEM, *[6] * 30]]
TURNS = [tokens(5, 55), tokens(5, 120)]
FIRST_TURN = tokens(7, 41)


@dataclass(frozen=True)
class ArrivalWay:
    """How far a prompt is not computed: pages of the device, and what is loaded from where."""

    prompt: list[int]
    device_pages: int
    position: int
    loads: frozenset[tuple[Kind, Tier]] = frozenset()
    reason: Reason | None = None

    def check(self, plan: ResumePlan) -> None:
        assert plan.position == self.position
        assert plan.anchor_pages == self.device_pages
        assert {(unit.kind, unit.origin) for unit in plan.loads} == self.loads
        reasons = {span.reason for span in plan.uncached}
        assert self.reason is None or self.reason in reasons


def each(kinds: Iterable[Kind], tier: Tier) -> frozenset[tuple[Kind, Tier]]:
    return frozenset((kind, tier) for kind in kinds)


@dataclass(frozen=True)
class World:
    """All that another engine has computed, and the cold answers."""

    folder: Path
    lost: Kind
    host: HostMemory
    ways: Mapping[str, ArrivalWay]
    cold: Mapping[str, Completion]


def ways_behind(turn: Completion, kinds: Sequence[Kind]) -> dict[str, ArrivalWay]:
    """By name, for a model with state of these kinds, full pages first; `turn` is what another
    engine answered to the first turn."""
    history = [*FIRST_TURN, *turn.token_ids]
    known = (len(history) - 1) // PAGE_SIZE * PAGE_SIZE
    assert known > len(FIRST_TURN), "decode left a point of its own"
    host, storage = (each(kinds, tier) for tier in (Tier.HOST, Tier.STORAGE))
    return {
        "cold": ArrivalWay(tokens(0), 0, 0),
        "device hit": ArrivalWay(tokens(1), 4, 64),
        "fork": ArrivalWay([*tokens(1, 66), 5, 5], 4, 64),
        "partial hit": ArrivalWay([*STEM[:33], 8, 8], 2, 32),
        "host hit": ArrivalWay(tokens(3), 0, 64, host),
        "storage hit": ArrivalWay(tokens(4), 0, 64, storage),
        "truncated prefetch": ArrivalWay(TURNS[1], 0, 48, storage, Reason.HOST_FULL),
        "one kind loaded": ArrivalWay(tokens(6), 4, 64, each(kinds[-1:], Tier.HOST)),
        "next turn": ArrivalWay([*history, 9, 9, 9], 0, known, host),
    }


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = save_variant(tmp_path_factory.mktemp(request.param), request.param)
    manifest = load_model(folder, LoadOptions("float64", page_size=PAGE_SIZE)).manifest
    with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
        turn = llm.generate([FIRST_TURN], GREEDY)[0]
        ways = ways_behind(turn, manifest.kinds)
        cold = {name: llm.generate([way.prompt], GREEDY)[0] for name, way in ways.items()}
    with engine(folder, Cell(40, overlap=True)) as llm:
        for prompt in (tokens(3), tokens(4), *TURNS, tokens(6), FIRST_TURN):
            llm.generate([prompt], GREEDY)
        for prompt in (tokens(3), tokens(4), TURNS[1], tokens(6), ways["next turn"].prompt):
            llm.write_through(prompt)
        there = llm.host
        keys = {name: llm.keys_of(way.prompt) for name, way in ways.items()}
    host = HostMemory()
    for name in ("host hit", "one kind loaded", "next turn"):
        host.take(there, keys[name])
    for name, slots in (("storage hit", ROOM), ("truncated prefetch", LITTLE_ROOM)):
        store, disk = host_store(manifest, slots), tmp_path_factory.mktemp("storage")
        host.take(asyncio.run(bring_from_storage(there, keys[name], store, disk)), keys[name])
    return World(folder, manifest.kinds[-1], host, ways, cold)


def prepare(llm: HostFed, world: World) -> None:
    """The device has what ways need of it, computed here, and nothing else."""
    llm.forget()
    llm.attach(HostMemory())
    llm.generate([world.ways["one kind loaded"].prompt], GREEDY)
    assert llm.forget(world.lost) > 0
    llm.generate([tokens(1), LEFT_AT_PAGE_2[0]], GREEDY)
    llm.generate([LEFT_AT_PAGE_2[1]], GREEDY)
    llm.attach(world.host)


def check(llm: HostFed, world: World, names: Sequence[str]) -> None:
    arrived = llm.arrive([world.ways[name].prompt for name in names], GREEDY)
    for name, (found, plan) in zip(names, arrived, strict=True):
        world.ways[name].check(plan)
        assert_same(found, world.cold[name])


CELLS = [
    Cell(chunk, overlap, max_running=10) for chunk in (16, 40, 1024) for overlap in (False, True)
]
BOTH = [Cell(40, overlap=True, max_running=10, order=order) for order in (IN_TURNS, TOGETHER)]
PAIRS = [CELLS[1], CELLS[2], CELLS[5], *BOTH]
"""Every chunking, overlap on and off, and workers for both: other combinations are `slow`, or not
run."""

CELLS_OF = {
    "granite_moe": CELLS,
    "bamba": CELLS,
    "native": PAIRS,
    "gpt_oss": PAIRS,
    "gemma3": PAIRS,
}


@pytest.mark.parametrize(
    ("world", "cell"),
    [
        pytest.param(
            variant,
            cell,
            id=f"{variant}, chunks of {cell.chunk_tokens}, overlap {cell.overlap}, {cell.order}",
            marks=[] if cell in PAIRS else [pytest.mark.slow],
        )
        for variant, cells in CELLS_OF.items()
        for cell in cells
    ],
    indirect=["world"],
)
def test_however_a_prompt_arrives_the_answer_is_the_cold_one(world: World, cell: Cell) -> None:
    with engine(world.folder, cell) as llm:
        prepare(llm, world)
        check(llm, world, list(world.ways))
        prepare(llm, world)
        for name in world.ways:
            check(llm, world, [name])
        llm.check_integrity()
        assert all(set(ledger.by_role) <= {"tree"} for ledger in llm.ledgers().values())
