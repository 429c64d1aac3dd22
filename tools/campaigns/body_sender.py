"""The largest bodies there may be, and a process that sends all of them at once.

    python -m tools.campaigns.body_sender URL

It imports little, so that it can begin at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import httpx

NUM_BODIES = 20
LARGEST = 8 << 20
SEND_SECONDS = 500.0  # the sender and the router's readers are niced


def _filled(head: str, piece: str, tail: str) -> bytes:
    """As many pieces as fit a body of the largest size."""
    return (head + piece * ((LARGEST - len(head) - len(tail)) // len(piece)) + tail).encode()


# Each would hold up a loop that reads it: to decode, to parse, to check, to render, to tokenize.
BODIES = {
    "one text": (_filled('{"prompt":"', "the ferry carries, ", '"}'), 400),
    "escapes": (_filled('{"prompt":"', "\\n\\u00e9", '"}'), 400),
    "control tokens": (_filled('{"messages":[{"role":"user","content":"', "<|user|>", '"}]}'), 400),
    "messages": (
        _filled('{"messages":[', '{"role":"user","content":"a"},', '{"role":"user"}]}'),
        413,
    ),
    "token ids": (_filled('{"prompt":[', "1,", "1]}"), 413),
    "many texts": (_filled('{"prompt":[', '"a",', '"a"]}'), 413),
    "stop token ids": (_filled('{"prompt":"a","stop_token_ids":[', "1234567890123,", "1]}"), 413),
    "keys": (b'{"k":1' + b"".join(b',"k%d":1' % i for i in range(600_000)) + b"}", 413),
    "no JSON": (_filled("[", "[],", "]"), 413),
    "close to the limit": (json.dumps({"prompt": "a question " * 11_000}).encode(), 400),
}


async def refused(http: httpx.AsyncClient, body: bytes, status: int) -> None:
    """Sends a body that has to be refused with this status and a typed error."""
    path = "/v1/chat/completions" if b'"messages"' in body[:20] else "/v1/completions"
    answer = await http.post(path, content=body)
    assert (answer.status_code, "error" in answer.json()) == (status, True), answer.text


async def _send_all(http: str) -> int:
    """Sends all bodies at once; how many that were."""
    kinds = list(BODIES.values())
    async with (
        httpx.AsyncClient(base_url=http, timeout=SEND_SECONDS) as client,
        asyncio.TaskGroup() as group,
    ):
        for index in range(NUM_BODIES):
            group.create_task(refused(client, *kinds[index % len(kinds)]))
    return NUM_BODIES


def _send_when_told(http: str) -> None:
    """The other process: waits for a line; an empty one means that it sends nothing."""
    os.nice(10)
    print("ready", flush=True)
    is_wanted = bool(sys.stdin.readline().strip())
    print(asyncio.run(_send_all(http)) if is_wanted else 0)


if __name__ == "__main__":
    _send_when_told(sys.argv[1])
