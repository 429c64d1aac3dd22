"""A prefill and a decode worker of all kinds of state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.defects.hosts import worker_for
from tests.defects.watch import ALL_KINDS
from tests.harness.pair import StampedPair, stepped_pair


@pytest.fixture
def pair() -> Iterator[StampedPair]:
    with stepped_pair(worker_for(ALL_KINDS), worker_for(ALL_KINDS)) as both:
        yield both
