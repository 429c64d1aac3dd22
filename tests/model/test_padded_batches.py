"""Rows that pad a decode batch, at position -1, read nothing, write nothing and change no bit.

A step with padding is compared with one of as many rows, all of them requests: a product of
matrices has its bits by the number of its rows. CI runs it for a model of each kind of state; with
FERRYMAN_TEST_ALL_CELLS set, for all families.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.model.differences import difference
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import Lane, PagedRun, Part
from tests.model.telling import ALL_FAMILIES, NATIVE, save_telling
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.batch import DecodeBatch

PAGE_SIZE = 16
OF_EACH_KIND = (
    NATIVE,
    "deepseek_v32",
    "deepseek_v4",
    "dots3_note",
    "falcon_mamba",
    "kimi_linear",
    "ling_25",
    "llama4",
    "minimax",
    "minimax_m3",
    "qwen4_exp",
)
FAMILIES = ALL_FAMILIES if "FERRYMAN_TEST_ALL_CELLS" in os.environ else OF_EACH_KIND


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_leaves_all_other_bytes_and_bits_alone(family: str, tmp_path: Path) -> None:
    folder = save_telling(tmp_path, family, PAGE_SIZE, 64)
    run = PagedRun(load_model(folder, LoadOptions("float64", page_size=PAGE_SIZE)))
    rng = random.Random(f"padding of {family}")
    lanes = [run.start() for _ in range(4)]
    run.prefill([Part(lane, _tokens(rng, rng.randint(1, 70))) for lane in lanes])
    for num_waves in (1, 3):
        run_lens = [num_waves, rng.randint(1, num_waves), 1, rng.randint(1, num_waves)]
        _compare(run, lanes, run_lens, rng)


def _compare(run: PagedRun, lanes: list[Lane], run_lens: list[int], rng: random.Random) -> None:
    """Steps with the last request, and with a row of padding in its place."""
    for lane, run_len in zip(lanes, run_lens, strict=True):
        lane.scratch = [run.start().working_slot for _ in range(run_len - 1)]
        run._advance(lane, run_len)
    before = {kind: slab.clone() for kind, slab in run.slabs.tensors.items()}
    whole = _batch(run, lanes, run_lens, rng)
    logits = run.model.decode(whole, run.state)
    stepped = {kind: slab.clone() for kind, slab in run.slabs.tensors.items()}
    for kind, slab in run.slabs.tensors.items():
        slab.copy_(before[kind])
    is_last = torch.arange(len(whole.positions)) % len(lanes) == len(lanes) - 1
    found = run.model.decode(_without(whole, is_last), run.state)
    others = (whole.positions >= 0) & ~is_last
    has_experts = not found[others].equal(logits[others])
    assert difference(found[others], logits[others]) < 1e-12
    assert not has_experts or "experts" in repr(run.model), "an expert has the tokens that chose it"
    assert found.isfinite().all(), "padding reads no slot: what it computes are numbers"
    for kind, slab in run.slabs.tensors.items():
        own = _slots_of(lanes[-1], kind)
        assert slab[own].equal(before[kind][own]), kind
        ends = range(lanes[-1].position - run_lens[-1], lanes[-1].position)
        sections = run.model.manifest.layout(kind).sections
        is_written = any(section.rows_within(ends) for section in sections)
        assert is_written != slab[own].equal(stepped[kind][own]), "the request itself writes there"
        _assert_others_as(stepped[kind], before[kind], slab, own, has_experts)
        slab.copy_(stepped[kind])


def _assert_others_as(
    stepped: Tensor, before: Tensor, slab: Tensor, own: list[int], has_experts: bool
) -> None:
    """All slots but `own` have the bytes of `stepped`; of the written ones those may differ in
    their last bits where experts had other numbers of tokens."""
    is_written = (stepped != before).any(1)
    is_written[own] = False
    is_free = ~is_written
    is_free[own] = False
    assert slab[is_free].equal(before[is_free])
    if not has_experts:
        assert slab[is_written].equal(stepped[is_written])


def _batch(
    run: PagedRun, lanes: Sequence[Lane], run_lens: Sequence[int], rng: random.Random
) -> DecodeBatch:
    """As many waves as the longest run, each of all lanes; padding where a run has no token."""
    runs = list(zip(lanes, run_lens, strict=True))
    tokens = [(lane, n, wave) for wave in range(max(run_lens)) for lane, n in runs]
    tables = run._page_tables([lane for lane, _, _ in tokens])
    batch = DecodeBatch(
        token_ids=torch.tensor(_tokens(rng, len(tokens))),
        positions=torch.tensor([lane.position - n + wave for lane, n, wave in tokens]),
        page_tables=tables,
        read_slots=torch.tensor([_states(lane)[max(0, wave - 1)] for lane, n, wave in tokens]),
        write_slots=torch.tensor([_states(lane)[wave] for lane, n, wave in tokens]),
        waves=(len(lanes),) * max(run_lens),
        rows=torch.arange(len(tokens)),
    )
    return _without(batch, torch.tensor([wave >= n for _, n, wave in tokens]))


def _without(batch: DecodeBatch, is_padding: Tensor) -> DecodeBatch:
    return DecodeBatch(
        token_ids=batch.token_ids.masked_fill(is_padding, 0),
        positions=batch.positions.masked_fill(is_padding, -1),
        page_tables={
            kind: table.masked_fill(is_padding[:, None], -1)
            for kind, table in batch.page_tables.items()
        },
        read_slots=batch.read_slots.masked_fill(is_padding, -1),
        write_slots=batch.write_slots.masked_fill(is_padding, -1),
        waves=batch.waves,
        rows=batch.rows,
    )


def _states(lane: Lane) -> list[int]:
    return [lane.working_slot, *lane.scratch, -1, -1]


def _slots_of(lane: Lane, kind: Kind) -> list[int]:
    if kind is Kind.RECURRENT:
        return [lane.working_slot, *lane.scratch]
    return list(lane.pages[kind].values())


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]
