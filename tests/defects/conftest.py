"""A prefill and a decode worker of all kinds of state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.harness.pair import StampedPair, stepped_pair
from tests.harness.schedule import ALL_KINDS, worker_for


@pytest.fixture
def pair() -> Iterator[StampedPair]:
    with stepped_pair(worker_for(ALL_KINDS), worker_for(ALL_KINDS)) as both:
        yield both
