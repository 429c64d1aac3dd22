"""Errors leave as statuses and come back as the errors they were."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from ferryman import errors
from ferryman.errors import FerrymanError
from ferryman.wire.grpc.status import WITHHELD, error_of, failure_of, status_of, typed

ALL = [
    errors.InvalidRequest("temperature must be finite", "temperature"),
    errors.TooLarge("the body is too large", "body"),
    errors.UnsupportedMedia("content-type text/plain is not read here", "content-type"),
    errors.ContextLengthExceeded("too long", "prompt"),
    errors.GrammarDeadEnd("the grammar leaves no token at position 7", "grammar"),
    errors.GrammarTooSlow("the grammar takes too long for each token", "grammar"),
    errors.UnknownModel("no model x", "model"),
    errors.Unauthenticated("the call has no token of this cluster"),
    errors.PermissionDenied("a process of role decode may not call Prefill"),
    errors.NotFound("no request r"),
    errors.Exhausted("busy", 0.25),
    errors.OutOfSlots("12 full slots wanted, 3 free", 2.0),
    errors.QueueFull("1024 wait", 5.0),
    errors.RateLimited("shop may use 60 requests a minute", 12.5),
    errors.Overloaded("too late", 2.0),
    errors.Stale("attempt 1 was replaced"),
    errors.LeaseLost("reservation gone"),
    errors.WrongEpoch("epoch 5, not 4"),
    errors.ManifestMismatch(("page_size: 16 here, 64 there", "kinds: a here, b there")),
    errors.Unavailable("draining"),
    errors.Unreachable("no answer"),
    errors.NoWorker("no decode worker is ready"),
    errors.NoWorker("the cluster is starting", 12.5),
    errors.Stopping("this router is ending"),
    errors.RequestDetached("it goes on at another decode worker"),
    errors.TakenOver("another router goes on with it"),
    errors.RequestIdInUse("another router has one of that id"),
    errors.Suspect("three workers died while they ran it"),
    errors.NonFiniteLogits("prefill-1: no finite numbers"),
    errors.NonFiniteState("prefill-1: no finite numbers from reused state"),
    errors.CorruptState("full page 3"),
    errors.DeadlineExceeded("over"),
    errors.Cancelled("gone"),
]


def received(error: BaseException) -> grpc.aio.AioRpcError:
    """The gRPC error that a client receives for an error."""
    code, details, trailers = status_of(failure_of(error))
    metadata = grpc.aio.Metadata(*trailers)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way(error: FerrymanError) -> None:
    back = typed(received(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert back.code == error.code


def test_every_error_there_is_was_tried() -> None:
    def kinds(kind: type[FerrymanError]) -> set[type[FerrymanError]]:
        return {kind}.union(*(kinds(child) for child in kind.__subclasses__()))

    shared = {kind for kind in kinds(FerrymanError) if kind.__module__ == errors.__name__}
    assert {type(error) for error in ALL} == shared - {FerrymanError}


def test_a_bug_is_internal_and_its_message_stays_at_home() -> None:
    failure = failure_of(ZeroDivisionError("secret"))
    assert (failure.code, failure.message) == ("INTERNAL", WITHHELD)
    assert type(error_of(failure)) is FerrymanError


def test_of_a_group_the_error_with_a_status_counts() -> None:
    group = ExceptionGroup("two", [ValueError("x"), errors.QueueFull("full", 3.0)])
    assert failure_of(group).reason == "QueueFull"
    assert failure_of(ExceptionGroup("one", [ValueError("x")])).code == "INTERNAL"


def test_timeouts_and_cancellation_have_their_own_codes() -> None:
    assert failure_of(TimeoutError()).code == "DEADLINE_EXCEEDED"
    assert failure_of(asyncio.CancelledError()).code == "CANCELLED"


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect", errors.Unreachable),
        (grpc.StatusCode.UNKNOWN, "Stream removed", errors.Unreachable),
        (grpc.StatusCode.CANCELLED, "", errors.Unreachable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max", errors.TooLarge),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "concurrent rpcs", errors.Exhausted),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", errors.DeadlineExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, "no such method", FerrymanError),
    ],
)
def test_what_grpc_itself_answers_has_a_type_too(
    code: grpc.StatusCode, details: str, kind: type[FerrymanError]
) -> None:
    nothing = grpc.aio.Metadata()
    assert type(typed(grpc.aio.AioRpcError(code, nothing, nothing, details))) is kind


def test_a_param_outside_ascii_still_travels() -> None:
    back = typed(received(errors.InvalidRequest("odd", "größe")))
    assert isinstance(back, errors.InvalidRequest)
    assert back.param == "gr\\xf6\\xdfe"


def test_a_time_to_come_back_is_a_retry_info_to_the_byte() -> None:
    _, _, trailers = status_of(failure_of(errors.QueueFull("full", 2.5)))
    delay = b"\x08\x02\x10\x80\xca\xb5\xee\x01"  # 2 s and 500,000,000 ns
    info = b"\x0a\x08" + delay
    name = b"type.googleapis.com/google.rpc.RetryInfo"
    packed = b"\x0a\x28" + name + b"\x12\x0a" + info
    assert dict(trailers)["grpc-status-details-bin"] == (
        b"\x08\x08" + b"\x12\x04full" + b"\x1a" + bytes([len(packed)]) + packed
    )


def test_only_what_is_worth_trying_again_has_a_time() -> None:
    _, _, trailers = status_of(failure_of(errors.NotFound("nothing")))
    assert "grpc-status-details-bin" not in dict(trailers)
