"""The figures that are compared, and the bounds within which a simulation is trusted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.handoff.usage import CachedTokens
from ferryman_simulator.result import RequestOutcome
from ferryman_simulator.trace import TracedRequest, own
from ferryman_simulator.what_if.figures import MIN_JUDGED, Calibration, Figures, JudgedLog

PROMPT_LEN = 100
MEASURED = Figures({"device": 0.5, "host": 0.2}, 0.4, 0.9)


def requests(count: int) -> list[TracedRequest]:
    return [TracedRequest(f"r{i}", float(i), own(i, 120), PROMPT_LEN) for i in range(count)]


def outcomes(cached: list[int], seconds: list[float]) -> dict[str, RequestOutcome]:
    return {
        f"r{i}": RequestOutcome(CachedTokens(device=tokens), first)
        for i, (tokens, first) in enumerate(zip(cached, seconds, strict=True))
    }


def calibration(simulated: Figures, num_judged: int = MIN_JUDGED) -> Calibration:
    return Calibration(MEASURED, simulated, num_judged, 0.0)


def test_the_earlier_half_warms_the_caches_and_the_later_is_judged() -> None:
    measured = outcomes([0, 0, 50, 100], [1.0, 1.0, 0.2, 0.1])
    figures = JudgedLog.of(requests(4), measured).measured_figures()
    assert figures == Figures({"device": 0.75, "host": 0, "storage": 0, "peer": 0}, 0.1, 0.2)


def test_what_a_request_costs_besides_is_fitted_on_the_earlier_half() -> None:
    measured = outcomes([0] * 4, [0.35, 0.45, 0.9, 0.9])
    simulated = outcomes([0] * 4, [0.3, 0.4, 0.1, 0.1])
    log = JudgedLog.of(requests(4), measured)
    assert log.extra_seconds(simulated) == pytest.approx(0.05)
    assert log.figures(simulated, 0.05).p50 == pytest.approx(0.15), "and not the 0.9 measured"


@given(
    st.lists(st.tuples(st.integers(0, 100), st.floats(0.01, 9)), min_size=2, max_size=80),
    st.floats(0, 5),
)
def test_a_simulation_that_is_late_by_a_constant_alone_is_trusted(
    rows: list[tuple[int, float]], extra: float
) -> None:
    cached, seconds = [row[0] for row in rows], [row[1] for row in rows]
    log = JudgedLog.of(requests(len(rows)), outcomes(cached, [late + extra for late in seconds]))
    simulated = outcomes(cached, seconds)
    figures = log.figures(simulated, log.extra_seconds(simulated))
    judged = Calibration(log.measured_figures(), figures, MIN_JUDGED, extra)
    assert judged.is_trusted, judged.doubts


@pytest.mark.parametrize(
    ("simulated", "words"),
    [
        pytest.param(
            replace(MEASURED, shares={"device": 0.5, "host": 0.26}), "reused: 70.0%", id="reuse"
        ),
        pytest.param(
            replace(MEASURED, shares={"device": 0.38, "host": 0.32}), "from device", id="a tier"
        ),
        pytest.param(replace(MEASURED, p50=0.62), "first token p50", id="half of the requests"),
        pytest.param(replace(MEASURED, p90=0.58), "first token p90", id="the slow requests"),
    ],
)
def test_what_differs_too_much_is_named_with_its_bound(simulated: Figures, words: str) -> None:
    doubted = calibration(simulated)
    assert not doubted.is_trusted
    assert any(words in doubt and "bound" in doubt for doubt in doubted.doubts)


@pytest.mark.parametrize(
    "simulated",
    [
        pytest.param(MEASURED, id="the same"),
        pytest.param(
            replace(MEASURED, shares={"device": 0.45, "host": 0.27}), id="a little of each tier"
        ),
        pytest.param(replace(MEASURED, p50=0.55, p90=0.65), id="times within the factor"),
    ],
)
def test_within_the_bounds_it_is_trusted(simulated: Figures) -> None:
    assert calibration(simulated).is_trusted


def test_of_too_few_requests_nothing_is_trusted() -> None:
    (doubt,) = calibration(MEASURED, MIN_JUDGED - 1).doubts
    assert "compare: 19" in doubt


def test_tiny_times_may_differ_by_any_factor() -> None:
    tiny = replace(MEASURED, p50=0.001, p90=0.003)
    assert Calibration(tiny, replace(tiny, p50=0.015), MIN_JUDGED, 0.0).is_trusted
