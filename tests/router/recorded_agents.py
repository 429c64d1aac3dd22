"""The requests that real agents sent (`agents/`), and a small reader of what they mean.

It shares nothing with the router's own readers, and knows no more than the recorded bodies need.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "agents"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One request of a client."""

    client: str
    file: str
    method: str
    path: str
    body: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.client}/{self.file}"

    @property
    def endpoint(self) -> str:
        return self.path.partition("?")[0]

    @property
    def max_tokens(self) -> int | None:
        names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        limits = [self.body[name] for name in names if self.body.get(name) is not None]
        return limits[0] if limits else None

    @property
    def tools(self) -> set[str]:
        """The names of the functions that the model shall know from the start."""
        return {name for tool in self.body.get("tools") or [] for name in _tool_names(tool)}

    @property
    def texts(self) -> list[str]:
        """All texts of the conversation, in order, without those of calls and the line that is for
        billing."""
        return [text for text in _texts(self.body) if not text.startswith("x-anthropic-billing")]

    @property
    def calls(self) -> list[tuple[str, str, Any]]:
        """Id, name and arguments of each call in the conversation, in order."""
        return list(_calls(self.body))

    @property
    def results(self) -> list[str]:
        """The ids of the calls whose results are in the conversation, in order."""
        return list(_results(self.body))


def recorded_calls() -> list[RecordedCall]:
    """All recorded requests, client by client."""
    calls = []
    for file in sorted(FOLDER.glob("*/*.json")):
        sent = json.loads(file.read_text())
        body = sent.get("body") or {}
        calls.append(RecordedCall(file.parent.name, file.stem, sent["method"], sent["path"], body))
    return calls


def _tool_names(tool: Mapping[str, Any]) -> Iterator[str]:
    kind = tool.get("type", "custom")
    if tool.get("defer_loading"):
        return
    if kind == "namespace":
        yield from (f"{tool['name']}__{inner['name']}" for inner in tool["tools"])
    elif kind in ("function", "custom"):
        yield tool.get("function", tool)["name"]


def _items(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Messages or items, those before the conversation first."""
    first = [
        {"role": "system", "content": body[n]} for n in ("instructions", "system") if n in body
    ]
    rest = body.get("messages", body.get("input"))
    return [*first, *([{"role": "user", "content": rest}] if isinstance(rest, str) else rest)]


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    for item in _items(body):
        for field in ("reasoning_content", "content", "output"):
            yield from _words(item.get(field))


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in value if isinstance(value, list) else []:
        yield from _words(part.get("text", part.get("thinking", part.get("content"))))


def _calls(body: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for item in _items(body):
        for call in item.get("tool_calls") or []:
            function = call["function"]
            yield call["id"], function["name"], json.loads(function["arguments"])
        if item.get("type") == "function_call":
            yield item["call_id"], item["name"], json.loads(item["arguments"])
        content = item.get("content")
        for block in content if isinstance(content, list) else []:
            if block.get("type") == "tool_use":
                yield block["id"], block["name"], block["input"]


def _results(body: Mapping[str, Any]) -> Iterator[str]:
    for item in _items(body):
        if item.get("role") == "tool":
            yield item["tool_call_id"]
        if item.get("type") == "function_call_output":
            yield item["call_id"]
        content = item.get("content")
        for block in content if isinstance(content, list) else []:
            if block.get("type") == "tool_result":
                yield block["tool_use_id"]
