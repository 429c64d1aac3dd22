"""`/openapi.json`: the HTTP API in the form of OpenAPI 3.1, made of the fields that are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferryman_router.bodies.field_table import FIELDS
from ferryman_router.bodies.unread_fields import WITHOUT_EFFECT, Api, reasons


def _body(*apis: Api, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """The schema of a body, as one or more endpoints have it; any field may be null, which is
    leaving it out."""
    ignored = {name: why for api in apis for name, why in reasons(WITHOUT_EFFECT, api).items()}
    schemas: dict[str, Any] = {
        name: {"description": f"Without effect: {why}."} for name, why in ignored.items()
    }
    for field in FIELDS:
        if not field.on.isdisjoint(apis) and field.name not in schemas:
            schemas[field.name] = {"anyOf": [field.schema, {"type": "null"}]}
    return {
        "type": "object",
        "properties": dict(sorted(schemas.items())),
        "required": list(required),
        "additionalProperties": False,
    }


BODIES: Mapping[str, Mapping[str, Any]] = {
    "Chat": _body(Api.CHAT, required=("messages",)),
    "Completion": _body(Api.COMPLETION, required=("prompt",)),
    "Response": _body(Api.RESPONSES, required=("input",)),
    "Message": _body(Api.MESSAGES, required=("messages", "max_tokens")),
    "CountTokens": _body(Api.COUNT, required=("messages",)),
    "Tokenize": _body(Api.TOKENIZE_TEXT, Api.TOKENIZE_CHAT),
    "Detokenize": _body(Api.DETOKENIZE, required=("tokens",)),
}


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """An endpoint as the document shows it; `body` is one of BODIES, or empty."""

    summary: str
    body: str = ""
    is_streamed: bool = False
    media_type: str = "application/json"


OPERATIONS: Mapping[str, ApiOperation] = {
    "/v1/chat/completions": ApiOperation("Answers a conversation", "Chat", is_streamed=True),
    "/v1/completions": ApiOperation("Goes on with texts", "Completion", is_streamed=True),
    "/v1/responses": ApiOperation(
        "Answers items, and stores nothing", "Response", is_streamed=True
    ),
    "/v1/responses/input_tokens": ApiOperation("Counts the tokens of items", "Response"),
    "/v1/messages": ApiOperation("Answers in the form of Anthropic", "Message", is_streamed=True),
    "/v1/messages/count_tokens": ApiOperation("Counts the tokens of a conversation", "CountTokens"),
    "/tokenize": ApiOperation("The token ids of a prompt", "Tokenize"),
    "/detokenize": ApiOperation("The text of token ids", "Detokenize"),
    "/v1/models": ApiOperation("The model that is served"),
    "/v1/models/{id}": ApiOperation("The model that is served, by its name"),
    "/version": ApiOperation("The version of the router"),
    "/ping": ApiOperation("Whether the router lives"),
    "/health": ApiOperation("Whether the router lives"),
    "/ready": ApiOperation("Whether requests would be served"),
    "/metrics": ApiOperation("Metrics in the form of Prometheus", media_type="text/plain"),
    "/openapi.json": ApiOperation("This document"),
}


def document(methods: Mapping[str, str], version: str) -> dict[str, Any]:
    """The document of endpoints, given by path with their methods. Raises KeyError for a path
    without an operation."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ferryman", "version": version},
        "paths": {
            path: {method.lower(): _operation(path, OPERATIONS[path])}
            for path, method in methods.items()
        },
        "components": {
            "schemas": {**BODIES, "Refusal": _REFUSAL},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


_REFUSAL = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
            "required": ["message", "type"],
        }
    },
    "required": ["error"],
}


def _operation(path: str, operation: ApiOperation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {}}
    if operation.is_streamed:
        content["text/event-stream"] = {}
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    fields: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {"description": "A refusal", "content": refusal},
        },
    }
    if operation.body:
        schema = {"$ref": f"#/components/schemas/{operation.body}"}
        fields["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if path.endswith("{id}"):
        place = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        fields["parameters"] = [place]
    return fields
