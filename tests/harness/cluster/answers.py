"""The answers of a cluster, as the SDK sees them, and of one process, which is their oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.harness.cluster.shape import PAGE_SIZE

from ferryman.cache.manifest import Exactness
from ferryman.client import Client
from ferryman.llm import LLM, Completion
from ferryman.schedule.prompt_scores import Position, PromptScores, by_position
from ferryman.schedule.request import FinishReason, SamplingParams
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman.wire.values import Usage


@dataclass
class Generated:
    """One answer as the SDK saw it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, float]] = field(default_factory=list)
    prompt_logprobs: tuple[Position, ...] = ()
    reason: FinishReason | None = None
    usage: Usage | None = None
    exactness: Exactness | None = None


async def generate(
    client: Client,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    request_id: str = "",
    deadline_seconds: float = 60.0,
    into: Generated | None = None,
) -> Generated:
    """One request through the SDK, collected; offsets are checked on the way.

    `into` shows others how far it has come.
    """
    found = Generated() if into is None else into
    async for event in client.generate(
        list(prompt), sampling, request_id=request_id, deadline_seconds=deadline_seconds
    ):
        if isinstance(event, PromptScores):
            assert not found.token_ids, "the prompt comes before the answer"
            found.prompt_logprobs += by_position(event)
        elif isinstance(event, TokenChunk):
            assert event.offset == len(found.token_ids), "each token once and in order"
            found.token_ids += event.token_ids
            found.logprobs += event.logprobs
        elif isinstance(event, GenerateFinished):
            found.reason, found.usage = event.reason, event.usage
            found.exactness = event.exactness
    return found


async def generate_all(
    client: Client, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> list[Generated]:
    """All at once."""
    return list(await asyncio.gather(*(generate(client, p, sampling) for p in prompts)))


@contextmanager
def one_process(
    model: Path, *, memory_bytes: int = 64 << 20, kv_dtype: str = "auto"
) -> Iterator[LLM]:
    """The oracle: the model in this process, always cold, one step after the other, in float64."""
    with LLM(
        model,
        dtype="float64",
        kv_dtype=kv_dtype,
        page_size=PAGE_SIZE,
        chunk_tokens=1024,
        memory_bytes=memory_bytes,
        prefix_cache=False,
        overlap=False,
    ) as llm:
        yield llm


def assert_same(found: Generated, wanted: Completion) -> None:
    """The same tokens, log probabilities within 1e-12, those of the prompt with their ranks."""
    assert tuple(found.token_ids) == wanted.token_ids
    for mine, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-12, rel=0)
    assert len(found.prompt_logprobs) == len(wanted.prompt_logprobs)
    for scored, right in zip(found.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
        assert scored is not None
        assert right is not None
        assert list(scored) == list(right)
        for token_id, (logprob, rank) in scored.items():
            assert logprob == pytest.approx(right[token_id].logprob, abs=1e-12, rel=0)
            assert rank == right[token_id].rank
