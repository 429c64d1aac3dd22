"""The extent format: there and back, and nothing but BadExtent for what is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cluster_keys import STORED, STRANGERS_STORED
from tests.tiers.state_shapes import manifest_of

from ferryman.cache.manifest import Kind
from ferryman.tiers.extents import ENTRY_BYTES, aligned, lay_out_extent
from ferryman.tiers.storage_values import ExtentPlan, Flaw, FoundExtent
from ferryman.tiers.values import StoredUnit
from ferryman_hostcache.storage.extent import (
    BadExtent,
    ExtentSeals,
    ForeignExtent,
    entry_offset,
    flag_offset,
    flaw_of_entry,
    header_from_bytes,
    header_to_bytes,
)

DIGEST = manifest_of(Kind.FULL).digest
SEALS = ExtentSeals(STORED, DIGEST)
sixteen = st.binary(min_size=16, max_size=16)


@st.composite
def plans(draw: st.DrawFn) -> ExtentPlan:
    keys = tuple(draw(st.lists(sixteen, min_size=1, max_size=6, unique=True)))
    names = st.tuples(st.sampled_from(list(Kind)), st.integers(0, len(keys) - 1))
    group = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    sizes = [draw(st.integers(1, 10**10)) for _ in group]
    layout, generation = lay_out_extent(len(keys), sizes), draw(st.integers(1, 2**63))
    units = tuple(
        StoredUnit(
            kind, page, keys[page], sizes[i], draw(sixteen), generation, i, layout.offsets[i]
        )
        for i, (kind, page) in enumerate(group)
    )
    return ExtentPlan(generation, keys, units, layout.file_bytes, len(units))


def read(header: bytes, plan: ExtentPlan) -> FoundExtent:
    return header_from_bytes(header, STORED, generation=plan.generation, file_bytes=plan.file_bytes)


def entry_of(header: bytes, index: int) -> bytes:
    return header[entry_offset(index) :][:ENTRY_BYTES]


@given(plans(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_header_says_what_was_written_less_what_was_dropped(
    plan: ExtentPlan, data: st.DataObject
) -> None:
    header = bytearray(header_to_bytes(plan, SEALS))
    dead = data.draw(st.sets(st.integers(0, len(plan.units) - 1)))
    for index in dead:
        header[flag_offset(index)] = 0
    found = read(bytes(header), plan)
    assert (found.generation, found.keys) == (plan.generation, plan.keys)
    assert found.manifest_digest == DIGEST
    assert found.units == tuple(unit for unit in plan.units if unit.index not in dead)
    assert found.header_bytes == len(header)
    sizes = (aligned(unit.num_bytes) for unit in found.units)
    assert found.num_bytes == len(header) + sum(sizes)
    for unit in plan.units:
        flaw = Flaw.OTHER_UNIT if unit.index in dead else None
        assert flaw_of_entry(entry_of(bytes(header), unit.index), unit, SEALS) == flaw


@given(plans(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_breaks_a_seal_or_changes_nothing(
    plan: ExtentPlan, data: st.DataObject
) -> None:
    """Padding and flags are in no seal: what they hold is never taken for something else."""
    header = header_to_bytes(plan, SEALS)
    where = data.draw(st.integers(0, len(header) * 8 - 1))
    flipped = bytearray(header)
    flipped[where // 8] ^= 1 << where % 8
    flags = {flag_offset(unit.index) for unit in plan.units}
    try:
        found = read(bytes(flipped), plan)
    except BadExtent:
        assert where // 8 not in flags
        return
    left = [unit for unit in plan.units if flag_offset(unit.index) != where // 8]
    assert list(found.units) == left
    assert found.keys == plan.keys


@given(plans(), st.data())
@settings(max_examples=50, deadline=None)
def test_a_header_cut_short_or_under_another_name_is_none(
    plan: ExtentPlan, data: st.DataObject
) -> None:
    header = header_to_bytes(plan, SEALS)
    with pytest.raises(BadExtent):
        read(header[: data.draw(st.integers(0, len(header) - 1))], plan)
    with pytest.raises(BadExtent):
        header_from_bytes(
            header, STORED, generation=plan.generation + 1, file_bytes=plan.file_bytes
        )
    with pytest.raises(BadExtent):
        header_from_bytes(
            header, STORED, generation=plan.generation, file_bytes=plan.file_bytes - 1
        )


@given(st.binary(max_size=600), st.booleans())
@settings(max_examples=100, deadline=None)
def test_whatever_else_a_file_holds_is_no_extent(data: bytes, has_magic: bool) -> None:
    if has_magic:
        data = b"FERRYEXT\x02\x00\x00\x00" + data
    with pytest.raises(BadExtent):
        header_from_bytes(data, STORED, generation=1, file_bytes=len(data))


@given(plans())
@settings(max_examples=30, deadline=None)
def test_the_entry_of_another_model_is_known_by_its_seal(plan: ExtentPlan) -> None:
    other = manifest_of(Kind.FULL, fingerprint="other").digest
    header = header_to_bytes(plan, ExtentSeals(STORED, other))
    for unit in plan.units:
        assert flaw_of_entry(entry_of(header, unit.index), unit, SEALS) is Flaw.SEAL


@given(plans())
@settings(max_examples=30, deadline=None)
def test_an_extent_of_another_cluster_is_foreign_and_none_of_its_entries_is_taken(
    plan: ExtentPlan,
) -> None:
    header = header_to_bytes(plan, ExtentSeals(STRANGERS_STORED, DIGEST))
    with pytest.raises(ForeignExtent):
        read(header, plan)
    for unit in plan.units:
        assert flaw_of_entry(entry_of(header, unit.index), unit, SEALS) is Flaw.SEAL


@given(plans())
@settings(max_examples=30, deadline=None)
def test_a_name_of_our_key_over_a_stranger_s_seal_is_no_extent(plan: ExtentPlan) -> None:
    ours = header_to_bytes(plan, SEALS)
    forged = bytearray(header_to_bytes(plan, ExtentSeals(STRANGERS_STORED, DIGEST)))
    forged[56:72] = ours[56:72]
    with pytest.raises(BadExtent) as refused:
        read(bytes(forged), plan)
    assert not isinstance(refused.value, ForeignExtent), "it is removed, and told of"


def test_another_version_s_extent_is_foreign() -> None:
    with pytest.raises(ForeignExtent):
        header_from_bytes(
            b"FERRYEXT\x01".ljust(4096, b"\x00"), STORED, generation=1, file_bytes=4096
        )
