"""Logits of every family equal transformers' for any division of the prompt."""

from __future__ import annotations

import random

import pytest
import torch
from tests.model.conftest import NUM_PROMPTS, PROMPT_LEN, AnswerOf, FolderOf, ModelOf, prompt
from tests.model.differences import difference
from tests.model.paged_run import Lane, PagedRun, Part
from tests.oracle import load_oracle
from tests.tiny_models import VARIANTS
from torch import Tensor

TOLERANCES = {"float32": 1e-4, "float64": 1e-12}
RAGGED = (1, 2, 15, 16, 17, 64, 130, 300)
PAGE_SIZE = 16

every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCES)


@every_variant
@every_dtype
@pytest.mark.parametrize("page_size", [16, 64])
def test_ragged_prompts_in_one_chunk_equal_the_oracle(
    variant: str, dtype: str, page_size: int, model_of: ModelOf, answer_of: AnswerOf
) -> None:
    run = PagedRun(model_of(variant, dtype, page_size))
    parts = [Part(run.start(), prompt(i)[:length]) for i, length in enumerate(RAGGED)]
    found = run.prefill(parts)
    for index, (length, logits) in enumerate(zip(RAGGED, found, strict=True)):
        assert difference(logits, answer_of(variant, index)[:length]) < TOLERANCES[dtype]


@every_variant
@every_dtype
@pytest.mark.parametrize("seed", range(3))
def test_chunks_that_cut_anywhere_on_the_page_grid_equal_the_oracle(
    variant: str, dtype: str, seed: int, model_of: ModelOf, answer_of: AnswerOf
) -> None:
    run, rng = PagedRun(model_of(variant, dtype, PAGE_SIZE), seed), random.Random(seed)
    lengths = [rng.randint(1, PROMPT_LEN) for _ in range(NUM_PROMPTS)]
    lanes = [run.start() for _ in lengths]
    found: list[list[Tensor]] = [[] for _ in lengths]
    while unfinished := [i for i, lane in enumerate(lanes) if lane.position < lengths[i]]:
        chosen = sorted(rng.sample(unfinished, rng.randint(1, len(unfinished))))
        parts = [_next_part(lanes[i], i, lengths[i], rng.randint(1, 6)) for i in chosen]
        for index, logits in zip(chosen, run.prefill(parts), strict=True):
            found[index].append(logits)
    for index, length in enumerate(lengths):
        expected = answer_of(variant, index)[:length]
        assert difference(torch.cat(found[index]), expected) < TOLERANCES[dtype]


def _next_part(lane: Lane, index: int, length: int, num_pages: int) -> Part:
    end = min(length, lane.position + num_pages * PAGE_SIZE)
    return Part(lane, prompt(index)[lane.position : end])


@every_variant
@every_dtype
def test_decoding_token_by_token_in_a_mixed_batch_equals_the_oracle(
    variant: str, dtype: str, model_of: ModelOf, answer_of: AnswerOf
) -> None:
    run, num_steps = PagedRun(model_of(variant, dtype, PAGE_SIZE)), 20
    lengths = [1, 5, 15, 16, 31, 100, 200, PROMPT_LEN - num_steps]
    lanes = [run.start() for _ in lengths]
    run.prefill([Part(lane, prompt(i)[: lengths[i]]) for i, lane in enumerate(lanes)])
    for step in range(num_steps):
        # the decoding requests differ by step
        members = [i for i in range(len(lanes)) if (step + i) % 5]
        tokens = [prompt(i)[lanes[i].position] for i in members]
        found = run.decode([lanes[i] for i in members], tokens)
        expected = torch.stack([answer_of(variant, i)[lanes[i].position - 1] for i in members])
        assert difference(found, expected) < TOLERANCES[dtype]


@every_variant
def test_each_layer_that_ran_is_counted_for_a_watcher(variant: str, model_of: ModelOf) -> None:
    run = PagedRun(model_of(variant, "float32", PAGE_SIZE))
    num_layers, lane = run.model.config.trunk.num_layers, run.start()
    run.prefill([Part(lane, prompt(0)[:5])])
    assert run.state.layers_run.num_done == num_layers
    run.decode([lane], [prompt(0)[5]])
    assert run.state.layers_run.num_done == 2 * num_layers


@every_variant
@every_dtype
def test_resuming_from_a_snapshot_equals_the_cold_run(
    variant: str, dtype: str, model_of: ModelOf, answer_of: AnswerOf
) -> None:
    run = PagedRun(model_of(variant, dtype, PAGE_SIZE))
    cold, expected = run.start(), answer_of(variant, 0)
    snapshots = {position: run.free_slots.pop() for position in (16, 64, 112, 128)}
    run.prefill([Part(cold, prompt(0)[:128], snapshots)])
    for position, slot in snapshots.items():
        resumed = run.resume(slot, cold, position)
        (found,) = run.prefill([Part(resumed, prompt(0)[position:150])])
        assert difference(found, expected[position:150]) < TOLERANCES[dtype]
        again = run.resume(slot, cold, position)  # the snapshot itself is unchanged
        found = run.decode([again], [prompt(0)[position]])
        assert difference(found, expected[position : position + 1]) < TOLERANCES[dtype]


@every_variant
def test_a_snapshot_is_bitwise_the_state_of_the_run_that_ends_there(
    variant: str, model_of: ModelOf
) -> None:
    run = PagedRun(model_of(variant, "float64", PAGE_SIZE))
    slot, onward, ending = run.free_slots.pop(), run.start(), run.start()
    run.prefill([Part(onward, prompt(0)[:96], {96: slot})])
    run.prefill([Part(ending, prompt(0)[:96])])
    for states in (*run.state.conv.values(), *run.state.ssm.values()):
        assert torch.equal(states[slot], states[onward.working_slot])
        assert torch.equal(states[slot], states[ending.working_slot])


@every_variant
def test_bfloat16_is_as_near_the_truth_as_transformers_is(
    variant: str, folder_of: FolderOf, model_of: ModelOf, answer_of: AnswerOf
) -> None:
    run, truth = PagedRun(model_of(variant, "bfloat16", PAGE_SIZE)), answer_of(variant, 0)
    lane = run.start()
    (prefilled,) = run.prefill([Part(lane, prompt(0)[:240])])
    decoded = [run.decode([lane], [prompt(0)[p]]) for p in range(240, PROMPT_LEN)]
    theirs = load_oracle(folder_of(variant), torch.bfloat16).logits(prompt(0))
    ours = torch.cat([prefilled, *decoded])
    assert ours.dtype is torch.float32
    assert _spread(ours - truth) < 1.2 * _spread(theirs - truth)


def _spread(difference: Tensor) -> float:
    return float(difference.square().mean().sqrt())


@pytest.mark.parametrize("variant", ["granite_moe_rope", "bamba"])
def test_float32_equals_transformers_in_float32(
    variant: str, folder_of: FolderOf, model_of: ModelOf
) -> None:
    run = PagedRun(model_of(variant, "float32", PAGE_SIZE))
    (found,) = run.prefill([Part(run.start(), prompt(1))])
    expected = load_oracle(folder_of(variant), torch.float32).logits(prompt(1))
    assert difference(found, expected.double()) < TOLERANCES["float32"]
