"""DeepSeek-V4's attention to windows and blocks, against transformers' module, and equal bits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.like_a_card import on_a_card
from tests.model.deepseek_v4_mixer import HIDDEN_DIM, VOCAB_SIZE, block_model, drawn_oracle
from tests.model.differences import difference
from tests.model.paged_run import PagedRun, Part
from tests.model.ragged import ragged_logits, random_prompt
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.model.layers import block_row_attention
from ferryman.model.one_order import in_one_order
from ferryman.model.shapes.batch import PrefillBatch
from ferryman.model.weights import linear
from ferryman_kernels.attention.blocks import block_rows
from ferryman_kernels.attention.blocks.joined_rows import PlacedRows, joined_rows
from ferryman_kernels.attention.sparse_index import index_scores
from ferryman_kernels.ragged import PaddedSpan

HEAVY, SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"
CARD = "cuda/9.0-nvidia-h200/float32/r00000000/tp1"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}

every_type = pytest.mark.parametrize("layer_type", [HEAVY, SPARSE])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def prompts_of(rng: random.Random, *lengths: int) -> list[list[int]]:
    return [random_prompt(rng, length, VOCAB_SIZE) for length in lengths]


@every_type
@pytest.mark.parametrize("page_size", [2, 4, 8, 32])
def test_windows_and_blocks_are_attended_to_as_transformers_does(
    layer_type: str, page_size: int, tmp_path: Path
) -> None:
    """Pages shorter than a block, as long, and longer; the index chooses 5 of up to 22 blocks."""
    oracle, rng = drawn_oracle(layer_type, seed=3), random.Random(page_size)
    prompts = prompts_of(rng, 3, 15, 90)
    answers = [oracle.answer(prompt) for prompt in prompts]
    for dtype, tolerance in TOLERANCE.items():
        run = PagedRun(block_model(oracle, tmp_path, dtype, page_size))
        for made, answer in zip(ragged_logits(run, prompts, rng), answers, strict=True):
            right = answer.shown_to(str(dtype).removeprefix("torch."))
            assert len(right) > 2
            assert difference(made[: len(right)], right) < tolerance


@every_type
@every_dtype
def test_a_token_s_bits_do_not_depend_on_chunks(
    layer_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = block_model(drawn_oracle(layer_type, seed=4), tmp_path, dtype, 8)
    rng = random.Random(7)
    prompts = prompts_of(rng, 41, 75, 6)
    whole = PagedRun(model)
    expected = [whole.prefill([Part(whole.start(), prompt)])[0] for prompt in prompts]
    for made, right in zip(ragged_logits(PagedRun(model), prompts, rng), expected, strict=True):
        assert torch.equal(made, right)


@every_type
@every_dtype
def test_tokens_in_pieces_have_the_bits_of_a_whole_step(
    layer_type: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of the lists' places and of the index' scores."""
    model = block_model(drawn_oracle(layer_type, seed=4), tmp_path, dtype, 8)
    (prompt,) = prompts_of(random.Random(8), 75)
    whole_run, run, listed, scored = PagedRun(model), PagedRun(model), list[int](), list[int]()
    (whole,) = whole_run.prefill([Part(whole_run.start(), prompt)])

    def joined(near: PlacedRows, far: PlacedRows) -> PlacedRows:
        listed.append(len(far.places))
        return joined_rows(near, far)

    def scores(q: Tensor, *rest: Any) -> Tensor:
        scored.append(len(q))
        return index_scores(q, *rest)

    monkeypatch.setattr(block_row_attention, "joined_rows", joined)
    monkeypatch.setattr(block_rows, "index_scores", scores)
    monkeypatch.setattr(block_row_attention, "PLACES", 40 * (11 + 5))
    monkeypatch.setattr(block_rows, "SCORES", 30 * 18)
    (made,) = run.prefill([Part(run.start(), prompt)])
    assert torch.equal(made, whole)
    # Four blocks of 16 are closed, and eighteen of 4, of which the index chooses five.
    assert listed == ([42, 33] if layer_type == HEAVY else [40, 35])
    assert scored == ([] if layer_type == HEAVY else [30, 10, 30, 5])


@every_type
@every_dtype
@pytest.mark.parametrize("position", [4, 20, 24])
def test_a_snapshot_within_a_block_is_resumed_with_equal_bits(
    layer_type: str, dtype: torch.dtype, position: int, tmp_path: Path
) -> None:
    """Pages have 4 tokens, so half a block of 16 is behind a page's end; where a block of 4 ends,
    its tokens still matter to the next one."""
    model = block_model(drawn_oracle(layer_type, seed=5), tmp_path, dtype, 4)
    (prompt,) = prompts_of(random.Random(position), 60)
    whole_run, run = PagedRun(model), PagedRun(model)
    inside, at_end = whole_run.free_slots.pop(), run.free_slots.pop()
    (whole,) = whole_run.prefill([Part(whole_run.start(), prompt, {position: inside})])
    lane = run.start()
    run.prefill([Part(lane, prompt[:position], {position: at_end})])
    kept = run.slabs.by_kind[Kind.RECURRENT].tensor[at_end]
    assert torch.equal(whole_run.slabs.by_kind[Kind.RECURRENT].tensor[inside], kept)
    resumed = run.resume(at_end, lane, position)
    (rest,) = run.prefill([Part(resumed, prompt[position:])])
    assert torch.equal(rest, whole[position:])


@every_type
def test_rejected_drafts_leave_no_trace(layer_type: str, tmp_path: Path) -> None:
    """Three drafts close a block and are rejected; the tokens after them are as if alone."""
    model = block_model(drawn_oracle(layer_type, seed=6), tmp_path, torch.float32, 8)
    rng = random.Random(9)
    (prompt,) = prompts_of(rng, 40)
    run = PagedRun(model)
    (whole,) = run.prefill([Part(run.start(), prompt)])
    lane, outputs = run.start(), list[Tensor]()
    outputs += run.prefill([Part(lane, prompt[:13])])
    while lane.position < len(prompt) - 4:
        position = lane.position
        kept = rng.randint(1, 4)
        drafts = prompt[position : position + kept]
        drafts += [rng.randrange(VOCAB_SIZE) for _ in range(4 - kept)]
        (rows,) = run.verify([lane], [drafts])
        run.keep(lane, 4, kept)
        outputs.append(rows[:kept])
    made = torch.cat(outputs)
    assert made.shape == (lane.position, HIDDEN_DIM)
    assert torch.equal(made, whole[: lane.position])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for it")
@every_type
def test_a_card_s_chunks_have_the_bits_of_single_tokens(
    layer_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "packed_bytes", lambda weight: 0)
    oracle, rng = drawn_oracle(layer_type, seed=8), random.Random(4)
    first, second = prompts_of(rng, 38, 9)
    answer = oracle.answer(first)
    with on_a_card():
        model = block_model(oracle, tmp_path, torch.float32, 8, CARD)
        model = replace(model, mixer=in_one_order(model.mixer))
        whole_run, run = PagedRun(model), PagedRun(model, seed=1)
        (whole,) = whole_run.prefill([Part(whole_run.start(), first)])
        lane, other, rows = run.start(), run.start(), list[Tensor]()
        for low, high in ((0, 21), (21, 34)):
            parts = [Part(other, second[low % 5 : low % 5 + 2]), Part(lane, first[low:high])]
            rows.append(run.prefill(parts)[1])
        rows += [run.decode([other, lane], [9, token])[1:] for token in first[34:]]
    assert torch.equal(torch.cat(rows), whole)
    right = answer.shown_to("float32")
    assert difference(whole[: len(right)], right) < TOLERANCE[torch.float32]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for it")
@every_type
def test_padding_behind_a_chunk_changes_nothing(
    layer_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a card's recorded steps have it: rows at position -1, and a table with room."""
    monkeypatch.setattr(linear, "packed_bytes", lambda weight: 0)
    (prompt,), room, start = prompts_of(random.Random(5), 40), 24, 21
    with on_a_card():
        model = block_model(drawn_oracle(layer_type, seed=8), tmp_path, torch.float32, 8, CARD)
        model = replace(model, mixer=in_one_order(model.mixer))
        run, padded_run = PagedRun(model), PagedRun(model)
        lane, padded = run.start(), padded_run.start()
        for each_run, each_lane in ((run, lane), (padded_run, padded)):
            each_run.prefill([Part(each_lane, prompt[:start])])
        (rows,) = run.prefill([Part(lane, prompt[start:])])
        count = len(prompt) - start
        padded_run._advance(padded, count)
        tables = padded_run._page_tables([padded])
        positions, token_ids = torch.full((room,), -1), torch.zeros(room, dtype=torch.int64)
        positions[:count] = torch.arange(start, len(prompt))
        token_ids[:count] = torch.tensor(prompt[start:])
        slot = padded.working_slot
        runs = torch.tensor([[0, count, slot, slot, -1, 0]])
        span = PaddedSpan(room, torch.tensor(start), torch.tensor(count), runs, torch.empty(0, 4))
        batch = PrefillBatch(
            token_ids=token_ids,
            positions=positions,
            rows=torch.zeros(room, dtype=torch.int64),
            spans=span,
            page_tables={
                kind: torch.nn.functional.pad(table, (0, 3), value=-1)
                for kind, table in tables.items()
            },
            working_slots=torch.tensor([slot]),
            snapshots=(),
            last_tokens=torch.arange(count),
        )
        output = model.prefill(batch, padded_run.state).logits(torch.arange(room))
        padded_run._slide([padded])
    assert torch.equal(output[:count], rows)
    assert output.isfinite().all()
    for kind, slab in run.slabs.tensors.items():
        assert torch.equal(slab, padded_run.slabs.tensors[kind])


@every_type
def test_pages_that_cut_a_row_in_two_are_refused(layer_type: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="page_size=6: layer 0 keeps a row for each"):
        block_model(drawn_oracle(layer_type, seed=3), tmp_path, torch.float32, 6)
