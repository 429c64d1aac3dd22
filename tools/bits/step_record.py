"""The record of an engine's steps: the bits of the logits of every draw, and what proves a way.

It listens in this process where the engine launches a step, draws its tokens from logits, and
records or replays launches. Nothing is changed there.

A request is known by the seed of its sampling parameters, which no greedy draw uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ferryman.engine.forward.draw_tensors import DrawTensors
from ferryman.engine.forward.recorded_launches import LaunchRecorder, LaunchRecording
from ferryman.engine.forward.token_source import Sampler
from ferryman.engine.runner import Runner
from ferryman.schedule.batch import MixedStep, PrefillStep, StepPlan, halves_of


@dataclass(slots=True)
class StepRecord:
    """Steps since `clear`. A draw is (seed, position): `logits` has a digest of its row, and
    `neighbours` the number of requests in its step, itself included."""

    logits: dict[tuple[int, int], bytes] = field(default_factory=dict)
    neighbours: dict[tuple[int, int], int] = field(default_factory=dict)
    chunk_ends: list[int] = field(default_factory=list)
    mixed: set[tuple[int, int]] = field(default_factory=set)
    """Draws of steps that computed prompts and tokens."""
    is_mixed: bool = False
    replays: int = 0
    refusal: str = ""
    """Why a step could not be recorded, to be replayed."""
    threads: set[int] = field(default_factory=set)

    def clear(self) -> None:
        self.logits.clear()
        self.neighbours.clear()
        self.mixed.clear()
        self.chunk_ends.clear()
        self.threads.clear()
        self.replays, self.refusal = 0, ""

    def drawn(self, seed: int, prompt_len: int, count: int) -> tuple[bytes, ...]:
        """The digests of a request's draws, in the order of its tokens.

        A position is drawn again after a draft was refused; the last draw is the token's.
        """
        return tuple(self.logits[seed, prompt_len + index] for index in range(count))

    def mixed_draws(self, seed: int, prompt_len: int) -> tuple[bool, bool]:
        """Whether a mixed step drew the request's first token, and whether one drew a later one."""
        positions = {position - prompt_len for owner, position in self.mixed if owner == seed}
        return 0 in positions, bool(positions - {0})

    def most_neighbours(self, seed: int) -> int:
        return max(count for (owner, _), count in self.neighbours.items() if owner == seed)

    def on_launch(self, plan: StepPlan) -> None:
        self.threads.add(torch.get_num_threads())
        self.is_mixed = isinstance(plan, MixedStep)
        for half in halves_of(plan):
            if isinstance(half, PrefillStep):
                self.chunk_ends += [chunk.end for chunk in half.chunks]

    def on_draws(self, logits: Tensor, draws: DrawTensors) -> None:
        rows = len({draw.row for draw in draws.requests})
        for draw, digest in zip(draws.requests, row_digests(logits), strict=True):
            self.logits[draw.params.seed, draw.position] = digest
            self.neighbours[draw.params.seed, draw.position] = rows
            if self.is_mixed:
                self.mixed.add((draw.params.seed, draw.position))


def row_digests(logits: Tensor) -> Sequence[bytes]:
    """A digest of the bits of each row [rows, vocab]."""
    rows = logits.contiguous().cpu().numpy()
    return [blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


@contextmanager
def recorded_steps() -> Iterator[StepRecord]:
    """A record of all steps of engines that are built and run within the `with`."""
    record = StepRecord()
    launch, tokens = Runner.launch, Sampler.tokens
    replay, refuse = LaunchRecording.replay, LaunchRecorder.refuse
    replay_graph = torch.cuda.CUDAGraph.replay

    def launch_heard(runner: Runner, plan: StepPlan) -> Any:
        record.on_launch(plan)
        return launch(runner, plan)

    def tokens_heard(source: Sampler, logits: Tensor, draws: DrawTensors, history: Tensor) -> Any:
        record.on_draws(logits, draws)
        return tokens(source, logits, draws, history)

    def replay_heard(recording: LaunchRecording, progress: Any) -> None:
        record.replays += 1
        replay(recording, progress)

    def graph_heard(graph: Any) -> None:
        record.replays += 1
        replay_graph(graph)

    def refuse_heard(recorder: LaunchRecorder, name: str, reason: str) -> None:
        refuse(recorder, name, reason)
        record.refusal = recorder.refusal

    with (
        patch.object(Runner, "launch", launch_heard),
        patch.object(Sampler, "tokens", tokens_heard),
        patch.object(LaunchRecording, "replay", replay_heard),
        patch.object(torch.cuda.CUDAGraph, "replay", graph_heard),
        patch.object(LaunchRecorder, "refuse", refuse_heard),
    ):
        yield record
