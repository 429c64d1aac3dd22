"""Conversations behind one long system message, asked of a cluster that runs: what they find again.

    ferryman up                                             # any model with a chat template
    python -m tools.campaigns.forks --tokens 6000

Asks several conversations in a row that share a system message nobody has sent before, and prints
of each how much of what it shares with an earlier one was cached, how long it took, and how many
snapshots its prompt left. Whole pages count. Exit status 1 if one after the first finds less than
95 of 100 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

import httpx

from ferryman.cache.keys import TokenIds, as_token_ids
from ferryman.client import Client
from ferryman.runtime.lifecycle import decode_event
from ferryman.text.chat_beginnings import common_length

LEAST_SHARE = 0.95
SENTENCE = "The red kite is in Oslo. A fox sleeps in the night. The blue kite is in Lima. "
QUESTIONS = ("Where is the red kite?", "Where is the fox?", "What is in Lima?", "Who sleeps?")


@dataclass(frozen=True, slots=True)
class AskedConversation:
    """One conversation: its tokens, of which so many `usable` ones were `cached`, and the positions
    at which prefill kept its state."""

    prompt: int
    usable: int
    cached: int
    seconds: float
    snapshots: tuple[int, ...]

    @property
    def share(self) -> float:
        return self.cached / self.usable if self.usable else 0.0


class Forks:
    """Asks over HTTP, and reads what prefill kept from the log."""

    def __init__(self, http: httpx.AsyncClient, sdk: Client, model: str, tokens: int) -> None:
        self._http, self._sdk, self._model = http, sdk, model
        self._system, self._tokens = "", tokens
        self._prompts: list[TokenIds] = []

    async def begin(self) -> None:
        """Makes a system message of so many tokens, or a few more, that begins as no other."""
        self._system = f"This is {secrets.token_hex(4)}. "
        one = len(await self._token_ids([{"role": "user", "content": SENTENCE * 9}]))
        two = len(await self._token_ids([{"role": "user", "content": SENTENCE * 10}]))
        self._system += SENTENCE * (self._tokens // (two - one) + 1)

    async def ask(self, question: str) -> AskedConversation:
        messages = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": question},
        ]
        ids, name = await self._token_ids(messages), f"fork-{secrets.token_hex(6)}"
        body = {"model": self._model, "messages": messages, "max_tokens": 8}
        begun = time.monotonic()
        answer = await self._post("/v1/chat/completions", body, name)
        seconds = time.monotonic() - begun
        admitted = await self._admitted(name)
        page = admitted["page_size"]
        alike = max((common_length(ids, other) for other in self._prompts), default=0)
        self._prompts.append(ids)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        usable = min(alike, len(ids) - 1) // page * page
        return AskedConversation(len(ids), usable, cached, seconds, tuple(admitted["snapshots"]))

    async def _token_ids(self, messages: list[dict[str, str]]) -> TokenIds:
        body = {"model": self._model, "messages": messages}
        return as_token_ids((await self._post("/tokenize", body, "tokenize"))["tokens"])

    async def _admitted(self, name: str) -> dict[str, Any]:
        """The facts of a request's plan, with the size of a page, once the log has them."""
        while True:
            facts: dict[str, Any] = {}
            for event in await self._sdk.trace(name):
                told = decode_event(event.json.encode())
                if told.name in ("received", "admitted"):
                    facts |= told.facts
            if "snapshots" in facts:
                return facts
            await asyncio.sleep(0.1)

    async def _post(self, path: str, body: dict[str, Any], name: str) -> dict[str, Any]:
        response = await self._http.post(path, json=body, headers={"x-request-id": name})
        response.raise_for_status()
        return dict(response.json())


async def run(http: str, grpc: str, model: str, tokens: int, count: int) -> list[AskedConversation]:
    """All conversations, one after the other."""
    async with httpx.AsyncClient(base_url=http, timeout=600) as client, Client(grpc) as sdk:
        asked = Forks(client, sdk, model, tokens)
        await asked.begin()
        return [
            await asked.ask(f"{QUESTIONS[number % len(QUESTIONS)]} Say {number}.")
            for number in range(count)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--http", default="http://127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    parser.add_argument("--model", default="ferryman-demo")
    parser.add_argument("--tokens", type=int, default=6000, help="of the system message")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    told = asyncio.run(run(asked.http, asked.grpc, asked.model, asked.tokens, asked.conversations))
    if asked.json:
        print(json.dumps([[each.prompt, each.usable, each.cached, each.seconds] for each in told]))
    else:
        print("prompt  usable  cached   share  seconds  snapshots")
        for each in told:
            print(
                f"{each.prompt:6}  {each.usable:6}  {each.cached:6}  {each.share:6.1%}"
                f"  {each.seconds:7.2f}  {', '.join(map(str, each.snapshots))}"
            )
    return int(any(each.share < LEAST_SHARE for each in told[1:]))


if __name__ == "__main__":
    raise SystemExit(main())
