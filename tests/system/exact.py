"""What equal means between an answer of a cluster and that of one process."""

from __future__ import annotations

import pytest
from tests.system.cluster import Generated

from ferryman.llm import Completion


def assert_same(found: Generated, wanted: Completion) -> None:
    """The same tokens, log probabilities within 1e-9."""
    assert tuple(found.token_ids) == wanted.token_ids
    for mine, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9, rel=0)
