"""`python -m ferryman_router.intake.reader FOLDER NAME`: reads large bodies for the router.

Its standard input is a socket to the router, and it ends when that closes. It has a low priority
on the machine: a body of megabytes can wait, the tokens of others cannot.

A message between the two is a head and a payload, each after its length. The head is JSON and
small, the payload is bytes as they are. The router asks, the process answers, one message each; a
failure is an answer too.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ferryman.cache.keys import as_token_ids
from ferryman.runtime.life import exit_on_config_errors
from ferryman.runtime.logs import configure_logs
from ferryman.schedule.output_grammar import GrammarKind, OutputGrammar
from ferryman.schedule.request import Pin, SamplingParams
from ferryman.schedule.token_rules import TokenRules
from ferryman.text.located_prompt import LocatedPrompt, NamedPlace
from ferryman.text.marked_turn import (
    MarkedChat,
    MarkedTurn,
    TextBreakpoint,
    ToolBreakpoint,
    marked,
)
from ferryman.text.tool_calls.thought import ContinuedMessage
from ferryman.wire.grpc.status import error_of, failure_of
from ferryman.wire.public import ChatPrompt, ChatTurn, Prompt, TextPrompt
from ferryman.wire.values import Failure
from ferryman_router.bodies.anthropic_requests import message_body
from ferryman_router.bodies.json_body import parse_object
from ferryman_router.bodies.openai_requests import chat_body, completion_body
from ferryman_router.bodies.parsed_request import AnswerOptions, ParsedRequest
from ferryman_router.bodies.place import AS_USUAL, BodyPlace, BodyRules, IgnoredField
from ferryman_router.bodies.responses_requests import response_body
from ferryman_router.bodies.tool_fields import ToolChoice
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.routing.generate_request import RequestedSampling, kept_tokens
from ferryman_router.served_model import ServedModel

log = logging.getLogger(__name__)

NICENESS = 10  # a tenth of the share of a process that is not niced
MAX_HEAD_BYTES, MAX_PAYLOAD_BYTES = 1 << 20, 1 << 30
MAX_SAID = 4096  # characters of an error's message
_LENGTHS = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class ReaderMessage:
    """A head and a payload, which may be in parts that are sent one after the other."""

    head: Mapping[str, Any]
    payload: Sequence[bytes] = ()

    def joined(self) -> bytes:
        """The whole payload."""
        return b"".join(self.payload)


def send_message(peer: socket.socket, message: ReaderMessage) -> None:
    """Sends part by part: a large payload is never copied into one piece."""
    head = json.dumps(message.head).encode()
    peer.sendall(_LENGTHS.pack(len(head), sum(map(len, message.payload))) + head)
    for part in message.payload:
        peer.sendall(part)


def receive_message(peer: socket.socket) -> ReaderMessage:
    """Raises ConnectionError when the peer is gone, ValueError for what is no message."""
    num_head, num_payload = _LENGTHS.unpack(_received(peer, _LENGTHS.size))
    if num_head > MAX_HEAD_BYTES or num_payload > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a message of {num_head} + {num_payload} bytes is too large")
    head = json.loads(_received(peer, num_head))
    return ReaderMessage(head, (_received(peer, num_payload),))


def _received(peer: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = peer.recv(min(num_bytes, 1 << 20))
        if not part:
            raise ConnectionError("the connection between router and reader ended")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


# Prompts, and the token ids they become.


def prompt_message(
    prompt: TextPrompt | ChatPrompt, max_tokens: int, kept: int = 0
) -> ReaderMessage:
    """Asks for the token ids of a prompt, or of the end that is `kept`. Half characters pass: the
    reader refuses them."""
    match prompt:
        case TextPrompt(text):
            kind, texts = "text prompt", [text]
        case ChatPrompt(turns, _, variables):
            kind, texts = "chat prompt", [variables]
            texts += [word for turn in turns for word in (turn.role, turn.content, turn.more)]
    parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    head = {
        "kind": kind,
        "lengths": [len(part) for part in parts],
        "parse_special": prompt.parse_special,
        "omit_special": isinstance(prompt, TextPrompt) and prompt.omit_special,
        "max_tokens": max_tokens,
        "kept": kept,
        **_marks_of(prompt),
    }
    return ReaderMessage(head, parts)


def prompt_of(message: ReaderMessage) -> Prompt:
    """The prompt that `prompt_message` was given."""
    head = message.head
    pieces = _pieces(message.joined(), head["lengths"])
    texts = [piece.decode("utf-8", "surrogatepass") for piece in pieces]
    if head["kind"] == "text prompt":
        return TextPrompt(texts[0], head["parse_special"], head["omit_special"])
    variables, *words = texts
    turns = (ChatTurn(*turn) for turn in zip(words[::3], words[1::3], words[2::3], strict=True))
    chat = list(turns)
    for index, marks in head["turn_marks"]:
        chat[index] = marked(chat[index], (TextBreakpoint(*mark) for mark in marks))
    of_tools = tuple(ToolBreakpoint(*mark) for mark in head["tool_marks"])
    return MarkedChat(tuple(chat), head["parse_special"], variables, of_tools)


def _marks_of(prompt: TextPrompt | ChatPrompt) -> dict[str, Any]:
    """The places that a caller marked, in few of a chat's turns and at its tools."""
    turns = prompt.turns if isinstance(prompt, ChatPrompt) else ()
    return {
        "turn_marks": [
            (index, turn.breakpoints)
            for index, turn in enumerate(turns)
            if isinstance(turn, MarkedTurn)
        ],
        "tool_marks": prompt.tool_breakpoints if isinstance(prompt, MarkedChat) else (),
    }


def tokens_message(prompts: Sequence[LocatedPrompt], **more: Any) -> ReaderMessage:
    """Answers with so many prompts; `more` goes into the head."""
    parts = [as_token_ids(prompt.token_ids).tobytes() for prompt in prompts]
    head = {
        "lengths": [len(part) for part in parts],
        "located": [[prompt.fork_points, prompt.places, prompt.breakpoints] for prompt in prompts],
    }
    return ReaderMessage({**head, **more}, parts)


def tokens_of(message: ReaderMessage) -> list[LocatedPrompt]:
    """The prompts; raises what the reader failed with."""
    if "failure" in message.head:
        raise error_of(Failure(**message.head["failure"]))
    pieces = _pieces(message.joined(), message.head["lengths"])
    return [
        LocatedPrompt(
            np.frombuffer(piece, dtype="<u4"),
            tuple(forks),
            tuple(NamedPlace(*place) for place in places),
            tuple(Pin(*place) for place in breakpoints),
        )
        for piece, (forks, places, breakpoints) in zip(pieces, message.head["located"], strict=True)
    ]


def failure_message(failure: Failure) -> ReaderMessage:
    """Answers with an error, which `tokens_of` raises. That of a chat template may be very
    long."""
    bounded = replace(failure, message=failure.message[:MAX_SAID])
    return ReaderMessage({"failure": asdict(bounded)})


def _pieces(payload: bytes, lengths: Sequence[int]) -> list[bytes]:
    cuts = [0]
    for length in lengths:
        cuts.append(cuts[-1] + length)
    return [payload[begin:end] for begin, end in pairwise(cuts)]


# Bodies, and what they ask for.

BODY_KINDS: Mapping[Api, Callable[[dict[str, Any], BodyPlace], ParsedRequest]] = {
    Api.CHAT: chat_body,
    Api.COMPLETION: completion_body,
    Api.RESPONSES: response_body,
    Api.MESSAGES: message_body,
}


def parse_body(
    model: ServedModel, api: Api, raw: bytes, rules: BodyRules = AS_USUAL
) -> ParsedRequest:
    """Parses and checks a body. Raises InvalidRequest, naming the field."""
    body = BodyPlace.of_body(rules)
    parsed = BODY_KINDS[api](model.with_defaults(parse_object(raw)), body)
    return replace(parsed, ignored=body.ignored.listed)


def body_message(
    api: Api, parts: Sequence[bytes], max_tokens: int, rules: BodyRules = AS_USUAL
) -> ReaderMessage:
    """Asks to read a body; `max_tokens` bounds each of its prompts."""
    head = {"kind": api, "max_tokens": max_tokens, **rules._asdict()}
    return ReaderMessage(head, parts)


def read_body(model: ServedModel, asked: ReaderMessage) -> ReaderMessage:
    """Parses, checks and tokenizes the body that `body_message` was given.

    Raises InvalidRequest, in the order in which a small body would be refused.
    """
    api = Api(asked.head["kind"])
    rules = BodyRules(*(asked.head[name] for name in BodyRules._fields))
    body = parse_body(model, api, asked.joined(), rules)
    model.check_name(body.model)
    most = asked.head["max_tokens"]
    kept = kept_tokens(body.answer.truncate, body.sampling, most)
    prompts = [model.tokenized(prompt, most, kept) for prompt in body.prompts]
    answer = tokens_message(prompts, body=_to_json(body))
    # The echo comes after the tokens: it may have megabytes, and a head is small.
    return replace(answer, payload=[*answer.payload, body.echo.encode()])


def body_of(answer: ReaderMessage) -> ParsedRequest:
    """The body that was read, with token ids for prompts; raises what it was refused with."""
    prompts = tuple(tokens_of(answer))
    echo = answer.joined()[sum(answer.head["lengths"]) :].decode()
    return replace(_from_json(answer.head["body"]), prompts=prompts, echo=echo)


def _to_json(body: ParsedRequest) -> dict[str, Any]:
    """All but prompts and echo. Numbers come back as they were: JSON writes floats exactly."""
    return asdict(replace(body, prompts=(), echo=""))


def _from_json(values: Mapping[str, Any]) -> ParsedRequest:
    params = dict(values["sampling"]["params"])
    params["stop"] = tuple(params["stop"])
    params["stop_token_ids"] = tuple(params["stop_token_ids"])
    params["grammar"] = _grammar_of(params["grammar"])
    params["rules"] = _rules_of(params["rules"])
    asked = values["sampling"]
    sampling = RequestedSampling(
        SamplingParams(**params), asked["is_open_ended"], tuple(asked["bad_words"])
    )
    tools, continued = ToolChoice(**values["answer"]["tools"]), values["answer"]["continued"]
    read = {"tools": tools, "continued": continued and ContinuedMessage(**continued)}
    parts = {
        "api": Api(values["api"]),
        "prompts": (),
        "sampling": sampling,
        "answer": AnswerOptions(**{**values["answer"], **read}),
        "ignored": tuple(IgnoredField(**ignored) for ignored in values["ignored"]),
    }
    return ParsedRequest(**{**values, **parts})


def _grammar_of(values: Mapping[str, str] | None) -> OutputGrammar | None:
    if values is None:
        return None
    return OutputGrammar(GrammarKind(values["kind"]), values["text"])


def _rules_of(values: Mapping[str, Any]) -> TokenRules:
    """Bad words come as texts, and become token ids later."""
    biases = tuple((token_id, bias) for token_id, bias in values["logit_bias"])
    return TokenRules(values["min_tokens"], biases, tuple(values["allowed_token_ids"]))


def serve(router: socket.socket, model: ServedModel) -> None:
    """Answers until the router closes the connection, or is gone."""
    while True:
        try:
            asked = receive_message(router)
            send_message(router, _answer(model, asked))
        except ConnectionError:
            return


def _answer(model: ServedModel, asked: ReaderMessage) -> ReaderMessage:
    try:
        if asked.head["kind"] in BODY_KINDS:
            return read_body(model, asked)
        most, kept = asked.head["max_tokens"], asked.head["kept"]
        return tokens_message([model.tokenized(prompt_of(asked), most, kept)])
    except Exception as error:  # what is no FerrymanError is a bug: it fails this body alone
        failure = failure_of(error)
        if failure.code == "INTERNAL":
            log.exception("a body could not be read")
        return failure_message(failure)


def main() -> None:
    os.nice(NICENESS)
    # Both may come to all processes of a service at once. They mean the router, which drains: what
    # is being read is still needed then.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    configure_logs()
    folder, name = sys.argv[1:]
    with exit_on_config_errors(), socket.socket(fileno=sys.stdin.fileno()) as router:
        serve(router, ServedModel.load(Path(folder), name, created_unix_seconds=0))


if __name__ == "__main__":
    main()
