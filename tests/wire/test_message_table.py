"""A table holds every field of both sides, and says the first of several things that are wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ferryman.errors import InvalidRequest
from ferryman.wire.codec.inference import event_from_wire
from ferryman.wire.codec.message_table import At, oneof, table, within
from ferryman.wire.codec.prefill import prefill_order_from_wire, progress_from_wire
from ferryman.wire.v1 import inference_pb2, prefill_pb2, types_pb2
from ferryman.wire.values import PrefillQueued


@dataclass(frozen=True, slots=True)
class InnerValue:
    host: str
    port: str


@dataclass(frozen=True, slots=True)
class OuterValue:
    worker_id: str
    inner: InnerValue


def test_a_value_without_a_message_lies_in_that_of_another() -> None:
    inner = within(InnerValue, host="address", port=At(int, str, "epoch"))
    to_wire, from_wire = table(OuterValue, types_pb2.WorkerAddress, inner=inner)
    value = OuterValue("decode-1", InnerValue("host", "80"))
    message = types_pb2.WorkerAddress(worker_id="decode-1", address="host", epoch=80)
    assert to_wire(value) == message
    assert from_wire(message) == value


def test_a_field_of_the_message_without_a_place_is_a_mistake_of_the_table() -> None:
    with pytest.raises(TypeError, match=r"WorkerAddress: \['epoch'\] have no place"):
        table(
            InnerValue,
            types_pb2.WorkerAddress,
            host="worker_id",
            port="address",
        )


def test_a_field_of_the_value_without_a_place_is_a_mistake_of_the_table() -> None:
    with pytest.raises(TypeError, match=r"\['host', 'port'\] have no place"):
        table(InnerValue, prefill_pb2.PrefillQueued)
    with pytest.raises(TypeError, match=r"InnerValue has no \['address'\]"):
        within(InnerValue, address="host")


def test_a_oneof_without_a_case_for_one_of_its_fields_is_a_mistake_of_the_table() -> None:
    queued = (PrefillQueued, table(PrefillQueued, prefill_pb2.PrefillQueued))
    with pytest.raises(
        TypeError, match=r"\['admitted', 'chunk', 'handed_off', 'scored'\] have no place"
    ):
        oneof(prefill_pb2.PrefillResponse, "progress", "nothing is said", queued=queued)


def test_what_says_nothing_is_refused_by_the_name_of_its_oneof() -> None:
    with pytest.raises(InvalidRequest, match="a progress message says nothing") as caught:
        progress_from_wire(prefill_pb2.PrefillResponse())
    assert caught.value.param == "progress"
    with pytest.raises(InvalidRequest, match="an event says nothing") as caught:
        event_from_wire(inference_pb2.GenerateResponse())
    assert caught.value.param == "event"


def wrong_field(message: prefill_pb2.PrefillRequest) -> str:
    with pytest.raises(InvalidRequest) as caught:
        prefill_order_from_wire(message)
    return str(caught.value.param)


def test_of_several_things_that_are_wrong_the_first_is_said() -> None:
    """An order's tokens come before its context, and the context before its decode worker."""
    context = types_pb2.RequestContext(request_id="r", tenant_salt=bytes(65), deadline_ms=2**31)
    message = prefill_pb2.PrefillRequest(context=context)
    assert wrong_field(message) == "token_ids"
    message.token_ids = b"abcd"
    assert wrong_field(message) == "tenant_salt"
    message.context.tenant_salt = b""
    assert wrong_field(message) == "deadline_ms"
    message.context.deadline_ms = 1
    assert wrong_field(message) == "decode.address"
