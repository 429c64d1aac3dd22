"""Few sizes hold every decode step, and a padded step keeps its own tokens in their order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.plans import Guest, decode, full_pages

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.step_tensors import pack
from ferryman.schedule.batch import DecodeStep
from ferryman.schedule.step_sizes import ALIGNED_PAGES, PADDING, StepSizes

SIZES = st.builds(
    StepSizes,
    max_requests=st.integers(1, 70),
    max_pages=st.integers(1, 5000),
    page_size=st.sampled_from([4, 16, 64]),
    num_drafts=st.sampled_from([0, 1, 4]),
)


@st.composite
def steps_and_sizes(draw: st.DrawFn) -> tuple[DecodeStep, StepSizes]:
    """Runs of one token and its drafts; every number tells which token it is of."""
    sizes = draw(SIZES)
    lens = draw(st.lists(st.integers(1, 1 + sizes.num_drafts), min_size=1, max_size=70))
    runs = sorted(lens[: sizes.max_requests], reverse=True)
    waves = tuple(sum(n > wave for n in runs) for wave in range(runs[0]))
    tokens, pages = sum(waves), draw(st.integers(1, sizes.max_pages))
    numbers = np.arange(tokens)
    guest = Guest("anna", [1], 0, 0, full_pages(0))
    step = replace(
        decode(1, [(guest, 0)]),
        rows=numbers,
        positions=numbers + 100,
        read_slots=numbers + 200,
        write_slots=numbers + 300,
        verify_depths=waves,
        page_tables={Kind.FULL: np.repeat(numbers[:, None] + 400, pages, axis=1)},
        drafts=tuple(range(500, 500 + tokens - waves[0])),
    )
    return step, sizes


@given(steps_and_sizes())
def test_every_step_has_a_size_and_keeps_its_tokens(given_: tuple[DecodeStep, StepSizes]) -> None:
    step, sizes = given_
    size, packed = sizes.of(step), pack(step, sizes)
    assert size in set(sizes.each())
    assert size.num_tokens <= sizes.max_tokens
    kept = packed.array("kept")
    for name in ("rows", "positions", "read_slots", "write_slots"):
        assert packed.array(name)[kept].tolist() == getattr(step, name).tolist()
        assert (np.delete(packed.array(name), kept) == PADDING).all()
    table, own = packed.array("pages.full"), step.page_tables[Kind.FULL]
    assert (table[kept, : own.shape[1]] == own).all()
    assert (np.delete(table, kept, axis=0) == PADDING).all()
    assert (table[:, own.shape[1] :] == PADDING).all()
    places = dict(enumerate(kept.tolist()))
    for token, wave in enumerate(np.repeat(np.arange(len(step.verify_depths)), step.verify_depths)):
        assert places[token] // size.requests == wave
    if step.drafts:
        drafts = packed.array("drafts")
        assert drafts[kept[step.verify_depths[0] :] - size.requests].tolist() == list(step.drafts)


@given(steps_and_sizes())
def test_the_body_of_a_size_lies_at_the_same_places(given_: tuple[DecodeStep, StepSizes]) -> None:
    step, sizes = given_
    packed, body = pack(step, sizes), ["rows", "positions", "read_slots", "write_slots"]
    bare = replace(step, page_tables={Kind.FULL: step.page_tables[Kind.FULL][:, :1]}, draws=())
    narrow = pack(bare, replace(sizes, max_pages=1))
    assert [packed.places[name] for name in body] == [narrow.places[name] for name in body]
    assert all(begin % 2 == 0 for begin, _ in packed.places.values()), "two words are aligned"
    end = packed.places["kept"][0]
    assert all(begin < end for name, (begin, _) in packed.places.items() if name in body)


@given(SIZES)
def test_sizes_are_few_and_suit_what_kernels_are_compiled_for(sizes: StepSizes) -> None:
    found = list(sizes.each())
    assert len(found) == len(set(found)) <= 24 * 10
    assert all(size.pages % ALIGNED_PAGES == 0 for size in found)
    assert all(size.waves == 1 or size.requests % 2 == 0 for size in found)
    assert max(size.requests for size in found) >= sizes.max_requests
    assert sizes.widths()[-1] >= sizes.max_pages
