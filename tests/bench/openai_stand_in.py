"""A server of OpenAI's HTTP over any `AskedEngine` of this process, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ferryman_bench.endpoint.client import AskedEngine
from ferryman_bench.endpoint.inquiry import ChatMessage, Delivery, EndpointDoor, Inquiry
from ferryman_bench.endpoint.reply import DrawnToken, Reply


@contextmanager
def openai_stand_in(engine: AskedEngine, owner: str = "stand-in") -> Iterator[str]:
    """The URL of a server of `engine`, which it asks one request after the other."""

    shared = {"asker": engine, "owned_by": owner, "lock": threading.Lock()}
    requests = type("_RequestsOfOne", (_StandInRequests,), shared)
    server = ThreadingHTTPServer(("127.0.0.1", 0), requests)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _StandInRequests(BaseHTTPRequestHandler):
    asker: AskedEngine
    owned_by: str
    lock: threading.Lock
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        cards = [{"id": "toy", "object": "model", "owned_by": self.owned_by}]
        self._send(200, {"object": "list", "data": cards})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        door = EndpointDoor(self.path.removeprefix("/v1/"))
        delivery = Delivery.STREAMED if body.get("stream") else Delivery.WHOLE
        with self.lock:
            reply = asyncio.run(self.asker.ask(_inquiry(body), delivery))
        # A client may hang up at any time.
        with suppress(ConnectionError):
            if delivery is Delivery.WHOLE:
                self._send(200, _answer(reply, door, delivery) | _usage(reply))
            else:
                self._stream(reply, door)

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, reply: Reply, door: EndpointDoor) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        for place, token in enumerate(reply.tokens):
            text = token.text if place == 0 else f" {token.text}"
            piece = Reply(text, (token,), "", reply.usage)
            self._event(_answer(piece, door, Delivery.STREAMED))
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        self._event({"choices": []} | _usage(reply))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, body: Mapping[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""


def _inquiry(body: Mapping[str, Any]) -> Inquiry:
    turns = body.get("messages") or [{"role": "user", "content": body.get("prompt")}]
    messages = tuple(ChatMessage(turn["role"], turn["content"]) for turn in turns)
    salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
    return Inquiry(messages, body["max_tokens"], salt)


def _answer(reply: Reply, door: EndpointDoor, delivery: Delivery) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": reply.finish_reason or None}
    if door is EndpointDoor.CHAT:
        name = "message" if delivery is Delivery.WHOLE else "delta"
        choice[name] = {"role": "assistant", "content": reply.text}
        choice["logprobs"] = {"content": [_listed(token) for token in reply.tokens]}
    else:
        choice["text"] = reply.text
        choice["logprobs"] = {
            "tokens": [token.text for token in reply.tokens],
            "token_logprobs": [token.logprob for token in reply.tokens],
            "top_logprobs": [dict(token.alternatives) for token in reply.tokens],
        }
    return {"choices": [choice]}


def _listed(token: DrawnToken) -> dict[str, Any]:
    top = [{"token": text, "logprob": value} for text, value in token.alternatives.items()]
    return {"token": token.text, "logprob": token.logprob, "top_logprobs": top}


def _usage(reply: Reply) -> dict[str, Any]:
    usage = reply.usage
    details = {"cached_tokens": usage.cached_tokens or 0}
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens or 0,
            "completion_tokens": usage.completion_tokens or 0,
            "prompt_tokens_details": details,
        }
    }
