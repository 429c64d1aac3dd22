"""The table of other nodes' extents, against a naive one: it may forget, and never makes up."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.tiers.state_shapes import chain

from ferryman.cache.manifest import Kind
from ferryman.tiers.folder_table import ExtentName, FolderTable, UnitPlace
from ferryman.tiers.storage_values import FoundExtent
from ferryman.tiers.values import StoredUnit

OURS, THEIRS = "ours", "another model's"
MAX_ENTRIES = 12
KEYS = chain(1, 2, 3, 4, 5)
NAMES = st.builds(ExtentName, st.sampled_from(["one", "two"]), st.integers(1, 4))
KINDS = st.sampled_from([Kind.FULL, Kind.RECURRENT])
KEY = st.sampled_from(KEYS)
PAGES = st.sets(st.tuples(KINDS, st.integers(0, len(KEYS) - 1)), max_size=8)


def unit_of(generation: int, kind: Kind, page: int) -> StoredUnit:
    return StoredUnit(kind, page, KEYS[page], 64, bytes(16), generation, page, 4096 * page)


def extent_of(generation: int, pages: set[tuple[Kind, int]], model: str) -> FoundExtent:
    units = tuple(unit_of(generation, kind, page) for kind, page in sorted(pages))
    return FoundExtent(generation, model, KEYS, units, 4096, 4096, 4096)


class FolderTableMachine(RuleBasedStateMachine):
    """`shown` are the units that each extent showed last and that nobody missed since."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FolderTable(OURS, MAX_ENTRIES)
        self.shown: dict[ExtentName, set[tuple[Kind, int]]] = {}

    @rule(name=NAMES, pages=PAGES, model=st.sampled_from([OURS, OURS, THEIRS]))
    def add(self, name: ExtentName, pages: set[tuple[Kind, int]], model: str) -> None:
        self.table.add(name, extent_of(name.generation, pages, model))
        self.shown[name] = set(pages) if model == OURS else set()
        assert self.found(name) == self.shown[name]

    @rule(name=NAMES)
    def add_one_of_another_number(self, name: ExtentName) -> None:
        self.table.add(name, extent_of(name.generation + 1, {(Kind.FULL, 0)}, OURS))
        self.shown[name] = set()

    @rule(name=NAMES)
    def remove(self, name: ExtentName) -> None:
        self.table.remove(name)
        self.shown[name] = set()

    @rule(name=NAMES, kind=KINDS, page=st.integers(0, len(KEYS) - 1))
    def drop(self, name: ExtentName, kind: Kind, page: int) -> None:
        self.table.drop(name, unit_of(name.generation, kind, page))
        self.shown.get(name, set()).discard((kind, page))

    @rule(places=st.lists(st.tuples(NAMES, KINDS, KEY), max_size=8), most=st.integers(0, 4))
    def ask_for_those_to_read(self, places: list[UnitPlace], most: int) -> None:
        unknown = [name for name, kind, key in places if not self.table.unit(name, kind, key)]
        assert list(self.table.lacking(places, most)) == list(dict.fromkeys(unknown))[:most]

    def found(self, name: ExtentName) -> set[tuple[Kind, int]]:
        return {
            (kind, page)
            for kind in (Kind.FULL, Kind.RECURRENT)
            for page, key in enumerate(KEYS)
            if self.table.unit(name, kind, key) == unit_of(name.generation, kind, page)
        }

    @invariant()
    def every_unit_is_one_that_was_shown(self) -> None:
        """An extent is forgotten as a whole, or not at all."""
        self.table.check_integrity()
        for name, shown in self.shown.items():
            assert self.found(name) in (shown, set())


TestFolderTable = FolderTableMachine.TestCase
TestFolderTable.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
