"""`/openapi.json`: the HTTP API in the form of OpenAPI 3.1, made of the fields that are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferryman_router.bodies.api_fields import (
    CHAT,
    COMPLETION,
    COUNT_TOKENS,
    DETOKENIZE,
    MESSAGES,
    MESSAGES_WITHOUT_EFFECT,
    RESPONSES,
    RESPONSES_WITHOUT_EFFECT,
    TOKENIZE_CHAT,
    TOKENIZE_TEXT,
    WITHOUT_EFFECT,
)
from ferryman_router.bodies.field_shapes import OF_CHAT, OF_MESSAGES, OF_RESPONSES, body_schema

BODIES: Mapping[str, Mapping[str, Any]] = {
    "Chat": body_schema(CHAT, ("messages",), WITHOUT_EFFECT, OF_CHAT),
    "Completion": body_schema(COMPLETION, ("prompt",), WITHOUT_EFFECT, {}),
    "Response": body_schema(RESPONSES, ("input",), RESPONSES_WITHOUT_EFFECT, OF_RESPONSES),
    "Message": body_schema(
        MESSAGES, ("messages", "max_tokens"), MESSAGES_WITHOUT_EFFECT, OF_MESSAGES
    ),
    "CountTokens": body_schema(COUNT_TOKENS, ("messages",), MESSAGES_WITHOUT_EFFECT, OF_MESSAGES),
    "Tokenize": body_schema(TOKENIZE_TEXT | TOKENIZE_CHAT, (), {}, {}),
    "Detokenize": body_schema(DETOKENIZE, ("tokens",), {}, {}),
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
    found: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {"description": "A refusal", "content": refusal},
        },
    }
    if operation.body:
        schema = {"$ref": f"#/components/schemas/{operation.body}"}
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if path.endswith("{id}"):
        place = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [place]
    return found
