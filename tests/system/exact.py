"""The meaning of "equal" between an answer of a cluster and that of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.system.cluster import PAGE_SIZE, Generated

from ferryman.llm import LLM, Completion


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
    """The same tokens, log probabilities within 1e-9, those of the prompt with their ranks."""
    assert tuple(found.token_ids) == wanted.token_ids
    for mine, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9, rel=0)
    assert len(found.prompt_logprobs) == len(wanted.prompt_logprobs)
    for scored, right in zip(found.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
        assert scored is not None
        assert right is not None
        assert list(scored) == list(right)
        for token_id, (logprob, rank) in scored.items():
            assert logprob == pytest.approx(right[token_id].logprob, abs=1e-9, rel=0)
            assert rank == right[token_id].rank
