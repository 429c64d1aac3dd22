"""The connection to an endpoint: one method for each form of delivery."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import httpx

from ferryman.errors import ConfigError, Unavailable
from ferryman_bench.endpoint.inquiry import (
    Delivery,
    EndpointDoor,
    Inquiry,
    body_of,
    stream_fields,
)
from ferryman_bench.endpoint.reply import Reply, ReplyReader

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0
# Pieces of a stream that are read before the client hangs up.
CUT_PIECES = 3
_SHOWN_CHARACTERS = 300
# httpx's words for a connection that ended before the first byte of an answer.
_UNANSWERED = "without sending a response"


class EndpointRefusal(Unavailable):
    """The endpoint refused a request, or its answer cannot be read.

    `status` is HTTP's: 200 for an error within an answer. It is 0 where there is no answer, or none
    that can be read.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class AskedEngine(Protocol):
    """Sends requests to an engine."""

    async def ask(self, inquiry: Inquiry, delivery: Delivery = Delivery.WHOLE) -> Reply:
        """The answer; with `CUT`, as far as it came. Raises EndpointRefusal."""
        ...


@dataclass(frozen=True, slots=True)
class ServedCard:
    """A model as `/v1/models` lists it, with the name of the software where that is told."""

    model: str
    owner: str


@dataclass(frozen=True, slots=True)
class EndpointClient:
    """An `AskedEngine` by HTTP, for one door and one model. `url` ends before `/v1`."""

    http: httpx.AsyncClient
    url: str
    door: EndpointDoor
    model: str

    @property
    def place(self) -> str:
        return f"{self.url}/v1/{self.door}"

    def body(self, inquiry: Inquiry, delivery: Delivery = Delivery.WHOLE) -> dict[str, Any]:
        streamed = {} if delivery is Delivery.WHOLE else stream_fields()
        return {**body_of(inquiry, self.model, self.door), **streamed}

    async def ask(self, inquiry: Inquiry, delivery: Delivery = Delivery.WHOLE) -> Reply:
        """Sends `inquiry` and reads its answer; arrivals are by this machine's clock."""
        reader, began = ReplyReader(), perf_counter()
        try:
            try:
                await self._read(inquiry, delivery, reader, began)
            except httpx.RemoteProtocolError as error:
                # A server may close a kept connection just when a request is sent on it
                # (llama-server does so after five). OpenAI's clients send it again, too.
                if _UNANSWERED not in str(error):
                    raise
                await self._read(inquiry, delivery, reader, began)
        except httpx.HTTPError as error:
            raise EndpointRefusal(f"{self.place}: {type(error).__name__} {error}") from None
        return reader.reply(perf_counter() - began)

    async def _read(
        self, inquiry: Inquiry, delivery: Delivery, reader: ReplyReader, began: float
    ) -> None:
        body = self.body(inquiry, delivery)
        if delivery is Delivery.WHOLE:
            answer = await self.http.post(self.place, json=body)
            _check(answer.status_code, answer.text)
            reader.add(_object(answer.text), perf_counter() - began)
        else:
            await self._stream(body, reader, began, is_cut=delivery is Delivery.CUT)

    async def _stream(
        self, body: Mapping[str, Any], reader: ReplyReader, began: float, *, is_cut: bool
    ) -> None:
        async with self.http.stream("POST", self.place, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                _check(answer.status_code, (await answer.aread()).decode(errors="replace"))
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                reader.add(_object(line.removeprefix("data:")), perf_counter() - began)
                if is_cut and len(reader.arrivals) >= CUT_PIECES:
                    return


@asynccontextmanager
async def open_endpoint(
    url: str, *, model: str = "", api_key: str = "", door: EndpointDoor = EndpointDoor.CHAT
) -> AsyncIterator[tuple[EndpointClient, ServedCard]]:
    """A client of the server at `url`, with or without `/v1` at its end, and its model.

    Without `model` the first that the server lists is asked. Raises ConfigError for a `url` without
    a server that lists models.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: give the URL of a server, such as http://127.0.0.1:8000")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits) as http:
        card = _chosen(base, await _cards(http, base), model)
        yield EndpointClient(http, base, door, card.model), card


def _chosen(base: str, cards: Sequence[ServedCard], model: str) -> ServedCard:
    """The card of `model`; for a name that is not listed, as of an adapter, one of that name."""
    if model:
        owner = cards[0].owner if cards else ""
        return next((card for card in cards if card.model == model), ServedCard(model, owner))
    if not cards:
        raise ConfigError(f"{base}/v1/models lists no model: name one with --model")
    return cards[0]


async def _cards(http: httpx.AsyncClient, base: str) -> list[ServedCard]:
    try:
        answer = await http.get(f"{base}/v1/models")
        _check(answer.status_code, answer.text)
        listed = _object(answer.text).get("data") or []
    except (httpx.HTTPError, EndpointRefusal) as error:
        raise ConfigError(f"{base}/v1/models: {type(error).__name__} {error}") from None
    return [ServedCard(str(card["id"]), str(card.get("owned_by") or "")) for card in listed]


def _check(status: int, text: str) -> None:
    if status != httpx.codes.OK:
        raise EndpointRefusal(f"HTTP {status}: {text[:_SHOWN_CHARACTERS]}", status)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise EndpointRefusal(f"no JSON: {text[:_SHOWN_CHARACTERS]}") from None
    if not isinstance(value, dict):
        raise EndpointRefusal(f"no JSON object: {text[:_SHOWN_CHARACTERS]}")
    if error := value.get("error"):
        message = f"an error within the answer: {str(error)[:_SHOWN_CHARACTERS]}"
        raise EndpointRefusal(message, httpx.codes.OK)
    return value
