"""Several tokens of a request in one decode step give the results of one token after the other.

Each step takes the tokens that follow, then wrong drafts; a wrong draft leaves no trace.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.model.comparison import FAMILIES, random_config, swept
from tests.model.differences import difference
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import Lane, PagedRun, Part
from tests.tiny_models import save_random
from torch import Tensor

from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

NUM_TOKENS = 70


@pytest.mark.parametrize("family", swept(FAMILIES))
def test_verified_tokens_have_the_logits_of_tokens_one_by_one(family: str, tmp_path: Path) -> None:
    seed = 2
    rng = random.Random(f"drafts of {family} {seed}")
    folder = save_random(tmp_path, random_config(family, seed), seed)
    run = PagedRun(load_model(folder, LoadOptions("float64", page_size=rng.choice([4, 16]))), seed)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(NUM_TOKENS)] for _ in range(3)]
    whole = run.prefill([Part(run.start(), prompt) for prompt in prompts])
    lanes = [run.start() for _ in prompts]
    starts = [rng.randint(1, 40) for _ in prompts]
    run.prefill(
        [Part(lane, p[:start]) for lane, p, start in zip(lanes, prompts, starts, strict=True)]
    )
    num_steps = 0
    while under_way := [i for i in range(len(lanes)) if lanes[i].position < NUM_TOKENS]:
        num_steps += 1
        _verify(run, [(lanes[i], prompts[i], whole[i]) for i in under_way], rng)
    assert num_steps < NUM_TOKENS - min(starts), "some step was meant to take several tokens"


def _verify(
    run: PagedRun, members: list[tuple[Lane, list[int], Tensor]], rng: random.Random
) -> None:
    right = [rng.randint(1, 4) for _ in members]
    right = [
        min(n, NUM_TOKENS - lane.position) for n, (lane, _, _) in zip(right, members, strict=True)
    ]
    drafts = [
        prompt[lane.position : lane.position + n]
        + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 3))]
        for n, (lane, prompt, _) in zip(right, members, strict=True)
    ]
    order = sorted(range(len(members)), key=lambda i: -len(drafts[i]))
    found = run.verify([members[i][0] for i in order], [drafts[i] for i in order])
    for i, logits in zip(order, found, strict=True):
        lane, _, whole = members[i]
        run.keep(lane, len(drafts[i]), right[i])
        expected = whole[lane.position - right[i] : lane.position]
        assert torch.isfinite(logits[: right[i]]).all()
        assert difference(logits[: right[i]], expected) < 1e-12
