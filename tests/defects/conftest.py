"""A prefill and a decode worker of all kinds of state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.defects.hosts import worker_for
from tests.defects.pair import StampedPair, pair_of
from tests.defects.watch import ALL_KINDS


@pytest.fixture
def pair() -> Iterator[StampedPair]:
    with pair_of(worker_for(ALL_KINDS), worker_for(ALL_KINDS)) as both:
        yield both
