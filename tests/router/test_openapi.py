"""`/openapi.json` says what the parsers do: every field and every example is taken as shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from tests.harness.router import RouterCluster

from ferryman.errors import InvalidRequest
from ferryman_router.bodies.parsed_request import ParsedRequest
from ferryman_router.bodies.place import BodyPlace, BodyRules
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.doors.openapi import BODIES, OPERATIONS
from ferryman_router.intake.reader import BODY_KINDS

KINDS = {
    "Chat": Api.CHAT,
    "Completion": Api.COMPLETION,
    "Response": Api.RESPONSES,
    "Message": Api.MESSAGES,
}
# Fields that mean nothing without another one.
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "tool_choice": {},
    "continue_final_message": {},
}
NO_VALUE: dict[str, Any] = {
    "boolean": "yes",
    "string": 7,
    "integer": "7",
    "number": "7",
    "array": 7,
    "object": 7,
}


def _shape(body: str, name: str) -> dict[str, Any]:
    shape = BODIES[body]["properties"][name]
    return dict(shape.get("anyOf", [shape])[0])


def _asked(body: str, name: str, value: Any) -> dict[str, Any]:
    """A small body with this field."""
    needed = {one: _shape(body, one)["examples"][0] for one in BODIES[body]["required"]}
    return {**needed, **BESIDE.get(name, {}), name: value}


def _reader(body: str) -> Callable[[dict[str, Any]], ParsedRequest]:
    """The reader of one body."""
    return lambda asked: BODY_KINDS[KINDS[body]](asked, BodyPlace.of_body())


async def test_the_document_is_valid_and_has_every_endpoint(one_pair: RouterCluster) -> None:
    response = await one_pair.http.get("/openapi.json")
    found = response.json()
    validate(found)
    assert set(found["paths"]) == set(OPERATIONS)
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            place = path.replace("{id}", "tiny")
            body = {"model": 7} if "requestBody" in operation else None
            asked = await one_pair.http.request(method.upper(), place, json=body)
            assert asked.status_code == (400 if body else 200), path


@pytest.mark.parametrize("body", KINDS)
def test_every_example_is_taken_and_is_as_its_schema_says(body: str) -> None:
    read = _reader(body)
    for name in BODIES[body]["properties"]:
        for value in _shape(body, name).get("examples", ["anything"]):
            asked = _asked(body, name, value)
            Draft202012Validator(BODIES[body]).validate(asked)
            assert read(asked).prompts, name


@pytest.mark.parametrize("body", KINDS)
def test_a_value_of_another_type_is_refused_by_its_name(body: str) -> None:
    read, checked = _reader(body), 0
    for name in BODIES[body]["properties"]:
        kind = _shape(body, name).get("type")
        if not isinstance(kind, str):
            continue
        asked = _asked(body, name, NO_VALUE[kind])
        assert not Draft202012Validator(BODIES[body]).is_valid(asked)
        with pytest.raises(InvalidRequest) as caught:
            read(asked)
        assert caught.value.param.startswith(name), name
        checked += 1
    assert checked > 20


@pytest.mark.parametrize("body", KINDS)
def test_a_number_is_taken_up_to_its_bounds_and_not_beyond(body: str) -> None:
    read, checked = _reader(body), 0
    for name in BODIES[body]["properties"]:
        shape = _shape(body, name)
        if "maximum" not in shape:
            continue
        beside = {"logprobs": True} if (body, name) == ("Chat", "top_logprobs") else {}
        is_open, high = "exclusiveMinimum" in shape, shape["maximum"]
        low = shape["exclusiveMinimum" if is_open else "minimum"]
        taken, refused = [high], [low - 1, high + 1]
        (refused if is_open else taken).append(low)
        for value in taken:
            assert read({**_asked(body, name, value), **beside}).prompts, (name, value)
        for value in refused:
            with pytest.raises(InvalidRequest) as caught:
                read({**_asked(body, name, value), **beside})
            assert caught.value.param == name
        checked += 1
    assert checked > 8


def test_a_field_that_is_not_shown_has_no_effect_or_is_refused() -> None:
    for body, kind in KINDS.items():
        asked = _asked(body, "not_a_field", 1)
        assert not Draft202012Validator(BODIES[body]).is_valid(asked)
        with pytest.raises(InvalidRequest) as caught:
            BODY_KINDS[kind](asked, BodyPlace.of_body(BodyRules(is_strict=True)))
        assert caught.value.param == "not_a_field"
        BODY_KINDS[kind](asked, lenient := BodyPlace.of_body())
        assert [field.name for field in lenient.ignored.listed] == ["not_a_field"]
