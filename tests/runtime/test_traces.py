"""A written header parses to the same context; any other text begins a new trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.runtime.traces import TraceContext, new_trace, parse_traceparent

contexts = st.builds(
    TraceContext,
    st.integers(1, 2**128 - 1).map("{:032x}".format),
    st.integers(1, 2**64 - 1).map("{:016x}".format),
    st.booleans(),
)


@given(contexts)
def test_a_context_comes_back_from_its_header(context: TraceContext) -> None:
    assert parse_traceparent(context.traceparent) == context


@given(contexts)
def test_a_child_is_of_the_same_trace(context: TraceContext) -> None:
    child = context.child(lambda bits: 7)
    assert child == TraceContext(context.trace_id, f"{7:016x}", context.is_sampled)


def test_a_new_trace_is_never_the_invalid_one() -> None:
    context = new_trace(lambda bits: 0, is_sampled=True)
    assert parse_traceparent(context.traceparent) == context


A, B = "a" * 32, "b" * 16


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param(f"00-{A}-{B}", id="no flags"),
        pytest.param(f"00-{'0' * 32}-{B}-01", id="trace of zeros"),
        pytest.param(f"00-{A}-{'0' * 16}-01", id="span of zeros"),
        pytest.param(f"ff-{A}-{B}-01", id="forbidden version"),
        pytest.param(f"00-{A}-{B}-01-more", id="too long for version 0"),
        pytest.param(f"00-{A.upper()}-{B}-01", id="upper case"),
    ],
)
def test_what_is_no_header_is_none(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_later_version_may_say_more() -> None:
    assert parse_traceparent(f"01-{A}-{B}-03-more") == TraceContext(A, B, True)
