"""Calls over a plain socket: heads, cuts and orders that no library sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

HELLO = [{"role": "user", "content": "hi"}]
# The smallest body that each endpoint answers.
POSTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
GENERATES = tuple(POSTS)[:4]
GETS = ("/v1/models", "/v1/models/tiny", "/version", "/ping", "/health", "/ready", "/metrics")


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """An answer with its status line and headers (lower case), as they came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class RawClient:
    """A client that sends any bytes, and reads answers one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def send(self, *pieces: bytes) -> None:
        """Sends each piece apart: the server reads the one before the next one comes."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def answer(self, *, has_body: bool = True) -> RawAnswer:
        """The next answer. Raises IncompleteReadError where the server closed before."""
        async with asyncio.timeout(120):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.rstrip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = b""
            if has_body and "content-length" in headers:
                body = await self._reader.readexactly(int(headers["content-length"]))
            return RawAnswer(int(first.split()[1]), headers, body)

    async def is_closed(self) -> bool:
        """Whether the server closes, and has nothing more to say."""
        async with asyncio.timeout(120):
            return not await self._reader.read()


@asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()


def head(target: str, *headers: str, method: str = "POST", num_bytes: int | None = None) -> bytes:
    """The head of a request, with its length if there is a body."""
    lines = [f"{method} {target} HTTP/1.1", "host: a", *headers]
    if num_bytes is not None:
        lines.append(f"content-length: {num_bytes}")
    return "\r\n".join([*lines, "", ""]).encode()
