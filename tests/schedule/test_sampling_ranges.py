"""Every number of a request's sampling has a range: its ends are taken, the next value is not."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

from ferryman.errors import InvalidRequest
from ferryman.schedule.request import SamplingParams

WHOLE: dict[str, tuple[int, int]] = {
    "max_tokens": (1, 2**31 - 1),
    "top_k": (0, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
REAL: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (math.ulp(0.0), 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.ulp(0.0), 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


def test_the_ranges_name_every_number() -> None:
    numbers = {f.name for f in fields(SamplingParams) if f.type in ("int", "float", "int | None")}
    assert numbers == WHOLE.keys() | REAL.keys()


@pytest.mark.parametrize("name", [*WHOLE, *REAL])
def test_a_number_is_taken_at_both_ends_of_its_range_and_refused_beyond(name: str) -> None:
    low, high = (WHOLE | REAL)[name]
    for end in (low, high):
        assert getattr(SamplingParams(**{name: end}), name) == end  # type: ignore[arg-type]
    if name in WHOLE:
        beyond = [low - 1, high + 1, 1.5, True, "1"]
    else:
        beyond = [np.nextafter(low, -9.0), np.nextafter(high, 999.0), math.nan, math.inf, True]
    for value in beyond:
        with pytest.raises(InvalidRequest) as refused:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert refused.value.param == name
