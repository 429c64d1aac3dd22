"""Two requests with non-finite logits take a worker out; attempts of one request count once.

If such a request used reused state, the state is blamed, unless it happens again and again.
"""

from __future__ import annotations

import pytest

from ferryman.errors import NonFiniteLogits, NonFiniteState, OutOfSlots
from ferryman.schedule.events import ChainDropped, Event, Finished, RequestFailed
from ferryman.schedule.request import FinishReason
from ferryman.wire.grpc.status import error_of, failure_of
from ferryman.worker.numeric_watch import MAX_REUSING, NumericWatch

NAN = NonFiniteLogits("the logits behind position 3 are no finite numbers")


def watched(watch: NumericWatch, events: list[Event]) -> list[Event]:
    """The events after the watch has handled them, as the worker receives them."""
    for event in events:
        if isinstance(event, ChainDropped):
            watch.on_chain_dropped(event)
    return [watch.on_failure(e) if isinstance(e, RequestFailed) else e for e in events]


class Drained:
    """Counts the orders to drain."""

    def __init__(self) -> None:
        self.num_orders = 0

    def __call__(self) -> None:
        self.num_orders += 1


def test_the_second_request_takes_the_worker_out_once() -> None:
    drained = Drained()
    watch = NumericWatch("decode-1", drained)
    watched(watch, [RequestFailed("r1.1", NAN), RequestFailed("r1.2", NAN)])
    watch.check()
    assert (drained.num_orders, watch.statistics().num_non_finite) == (0, 1)
    watched(watch, [RequestFailed("r2.1", NAN)])
    assert (drained.num_orders, watch.statistics().num_non_finite) == (1, 2)
    watched(watch, [RequestFailed("r3.1", NAN)])
    assert (drained.num_orders, watch.statistics().num_non_finite) == (1, 3)
    with pytest.raises(NonFiniteLogits, match=r"decode-1.*3 requests"):
        watch.check()


def test_the_error_names_the_worker_and_others_pass_as_they_are() -> None:
    watch = NumericWatch("decode-1", Drained())
    other = RequestFailed("r2.1", OutOfSlots("no room"))
    done = Finished("r3.1", FinishReason.STOP, 4)
    failed, *rest = watched(watch, [RequestFailed("r1.1", NAN), other, done])
    assert rest == [other, done]
    assert isinstance(failed, RequestFailed)
    there = error_of(failure_of(failed.error))
    assert isinstance(there, NonFiniteLogits), "it arrives as what it was"
    assert (there.code, there.http_status) == ("UNAVAILABLE", 503)
    assert str(there) == f"decode-1: {NAN}"


def reused(request_id: str) -> list[Event]:
    """The schedule's events for a non-finite row that was computed from other requests' state."""
    error = NonFiniteState("no finite numbers; the state that was reused is dropped")
    return [ChainDropped(request_id, b"page", was_reused=True), RequestFailed(request_id, error)]


def test_reused_state_is_blamed_before_the_worker_is() -> None:
    drained = Drained()
    watch = NumericWatch("prefill-1", drained)
    for number in range(MAX_REUSING - 1):
        _, failed = watched(watch, reused(f"r{number}.1"))
        assert isinstance(failed, RequestFailed)
        there = error_of(failure_of(failed.error))
        assert isinstance(there, NonFiniteState), "the router computes anew"
        assert str(there).startswith("prefill-1: ")
    watched(watch, reused("r0.2"))
    watch.check()
    counts = watch.statistics()
    assert (counts.num_non_finite, counts.num_non_finite_reused) == (0, MAX_REUSING - 1)
    assert drained.num_orders == 0
    watched(watch, reused("the last one.1"))
    assert drained.num_orders == 1
    with pytest.raises(NonFiniteLogits, match=f"{MAX_REUSING} requests"):
        watch.check()


def test_a_chain_that_its_own_request_computed_adds_no_blame_to_the_row() -> None:
    watch = NumericWatch("prefill-1", Drained())
    watched(watch, [ChainDropped("r1.1", b"page", was_reused=False), RequestFailed("r1.1", NAN)])
    counts = watch.statistics()
    assert (counts.num_non_finite, counts.num_non_finite_reused) == (1, 0)
