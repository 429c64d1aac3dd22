"""Random prompts, and their logits by a model that gets them in ragged pieces."""

from __future__ import annotations

import random

import torch
from tests.model.paged_run import Lane, PagedRun, Part
from torch import Tensor

NUM_DECODED = 6


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


def ragged_logits(run: PagedRun, prompts: list[list[int]], rng: random.Random) -> list[Tensor]:
    """Logits at every position: ragged chunks first, the last tokens one by one."""
    lanes = [run.start() for _ in prompts]
    found: list[list[Tensor]] = [[] for _ in prompts]
    ends = [max(1, len(prompt) - NUM_DECODED) for prompt in prompts]
    while unfinished := [i for i, lane in enumerate(lanes) if lane.position < ends[i]]:
        chosen = sorted(rng.sample(unfinished, rng.randint(1, len(unfinished))))
        parts = [_part(run, lanes[i], prompts[i][: ends[i]], rng) for i in chosen]
        for index, logits in zip(chosen, run.prefill(parts), strict=True):
            found[index].append(logits)
    while under_way := [i for i, lane in enumerate(lanes) if lane.position < len(prompts[i])]:
        tokens = [prompts[i][lanes[i].position] for i in under_way]
        decoded = run.decode([lanes[i] for i in under_way], tokens)
        for index, logits in zip(
            under_way, decoded.split_with_sizes([1] * len(under_way)), strict=True
        ):
            found[index].append(logits)
    return [torch.cat(parts) for parts in found]


def _part(run: PagedRun, lane: Lane, prompt: list[int], rng: random.Random) -> Part:
    """The next chunk; it ends on the scan's grid or with the prompt."""
    grid = run.model.manifest.scan_chunk
    end = min(len(prompt), lane.position + rng.randint(1, 5) * grid)
    return Part(lane, prompt[lane.position : end])
