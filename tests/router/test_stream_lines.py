"""Streams are split by line feeds alone, whatever the model or the caller writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.router.raw_http import GENERATES, POSTS
from tests.router.tool_folders import WEATHER_TOOL, tool_cluster

LINE_ENDS = "one\u2028two\u2029three\x85four é"
_MORE: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"logprobs": True, "top_logprobs": 1}, {"tools": [WEATHER_TOOL]}],
    "/v1/completions": [{"logprobs": 1, "echo": True}],
    "/v1/responses": [{"metadata": {"a\x85b": "c\u2028d"}, "instructions": "e\u2029f"}],
    "/v1/messages": [
        {"system": "g\u2028h", "tools": [{"name": "a", "input_schema": {"type": "object"}}]}
    ],
}


async def test_a_stream_has_no_line_ends_but_its_own(nats_url: str, tools_folder: Path) -> None:
    async with tool_cluster(nats_url, tools_folder, LINE_ENDS) as made:
        for path in GENERATES:
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            body = {**POSTS[path], limit: 64, "unknown\u2028field": 1}
            for more in ({}, *_MORE[path]):
                stream = await made.post(path, **body, **more, stream=True)
                lines = stream.text.split("\n")
                assert stream.text.splitlines() == lines[:-1], (path, more)
                values = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
                assert LINE_ENDS in "".join(map(_deltas, values)), (path, more)
                whole = await made.post(path, **body, **more)
                assert LINE_ENDS in json.dumps(whole.json(), ensure_ascii=False)


def _deltas(frame: dict[str, Any]) -> str:
    """The piece of an answer in a frame of any endpoint."""
    for choice in frame.get("choices", ()):
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    delta = frame.get("delta", "")
    return str(delta.get("text", "")) if isinstance(delta, dict) else str(delta)
