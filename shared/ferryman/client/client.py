"""A client of the public InferenceService."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import grpc.aio

from ferryman.cache.keys import TokenIds, as_token_ids
from ferryman.client.generate_call import GenerateCall, GenerateOrder
from ferryman.client.retries import (
    Chance,
    ConnectionBroken,
    Deadline,
    Failures,
    Retries,
    typed_client_errors,
)
from ferryman.client.routers import RouterDoor, RouterDoors, addresses_of
from ferryman.errors import Cancelled, InvalidRequest, Stopping
from ferryman.ids import check_correlation_id, check_request_id
from ferryman.schedule.request import SamplingParams
from ferryman.security.tls import PLAINTEXT, DoorTls
from ferryman.wire.codec.inference import (
    explanation_from_wire,
    lifecycle_from_wire,
    loaded_state_from_wire,
    model_from_wire,
    prompt_to_wire,
    signed_state_from_wire,
    signed_state_to_wire,
)
from ferryman.wire.codec.scalars import token_ids_from_bytes
from ferryman.wire.grpc.rpc import ending, next_message
from ferryman.wire.grpc.status import is_unexplained
from ferryman.wire.public import (
    ChatPrompt,
    ChatTurn,
    GenerateEvent,
    LifecycleEvent,
    LoadedState,
    ModelCard,
    Prompt,
    RouteExplanation,
    SignedState,
    TextPrompt,
    TokenPrompt,
)
from ferryman.wire.v1 import inference_pb2

Turns = Sequence[ChatTurn] | Sequence[Mapping[str, str]]
GivenPrompt = str | Sequence[int] | Turns | Prompt


def as_prompt(given: GivenPrompt) -> Prompt:
    """A prompt from text, token ids, or turns of a chat (as values or as OpenAI's messages)."""
    if isinstance(given, TextPrompt | ChatPrompt | TokenPrompt):
        return given
    if isinstance(given, str):
        return TextPrompt(given)
    items: list[Any] = list(given)
    if items and all(isinstance(item, ChatTurn | Mapping) for item in items):
        return ChatPrompt(tuple(_turn(item) for item in items))
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return TokenPrompt(_token_ids(items))
    raise InvalidRequest("a prompt is text, token ids, or a list of chat turns", "prompt")


def _turn(given: ChatTurn | Mapping[str, object]) -> ChatTurn:
    if isinstance(given, ChatTurn):
        return given
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not isinstance(content, str) or len(given) != 2:
        raise InvalidRequest("a chat turn has a role and a content, both text", "prompt")
    return ChatTurn(role, content)


def _token_ids(items: list[int]) -> TokenIds:
    if any(not 0 <= token_id < 2**31 for token_id in items):
        raise InvalidRequest("token ids are whole numbers from 0", "prompt")
    return as_token_ids(items)


GENERATE_SECONDS = 300.0
ASK_SECONDS = 10.0
STATE_SECONDS = 600.0
MAX_LOST_REFUSALS = 3


class Client:
    """A client of the router at `address` (host:port), or of several with commas between. Use it in
    `async with`, or call `close`.

    With several routers, or a name that stands for several, calls go on at another one when theirs
    dies or ends. With an `api_key` every call names its sender. `tls` is for routers with TLS.
    `chance` chooses the first router, and spreads retries in time.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: DoorTls | None = None,
        retries: Retries | None = None,
        chance: Chance = random.random,
    ) -> None:
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._retries, self._chance = retries or Retries(), chance
        self._doors = RouterDoors(addresses_of(address), chance, tls or PLAINTEXT)
        self._is_closed = False

    async def close(self) -> None:
        """Ends all calls in progress."""
        self._is_closed = True
        await self._doors.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def generate(
        self,
        prompt: GivenPrompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        model: str = "",
        deadline_seconds: float = GENERATE_SECONDS,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Streams an answer: GenerateStarted, TokenChunks, GenerateFinished. With
        `prompt_logprobs` the PromptScores of the whole prompt come before the first tokens.

        Every token comes once and in order; a broken stream is resumed after the last token
        received. A router that restarted does not know the answer. Then the client sends the
        request again with the same seed and continues if the same tokens come; if not, NotResumable
        gives the number of tokens delivered. To stop early close the generator
        (`contextlib.aclosing`): the router frees everything.
        """
        deadline = Deadline(deadline_seconds)
        order = GenerateOrder(
            prompt_to_wire(as_prompt(prompt)),
            sampling or SamplingParams(),
            model,
            check_request_id(request_id) if request_id else "",
            deadline,
        )
        failures = Failures(self._retries, self._chance, deadline)
        return GenerateCall(order, self._doors, self._open_stream, failures).events()

    async def explain(
        self, request_id: str, *, deadline_seconds: float = ASK_SECONDS
    ) -> tuple[RouteExplanation, ...]:
        """The reasons for the routing of a request, one entry per attempt."""
        request = inference_pb2.ExplainRequest(request_id=check_correlation_id(request_id))
        answer = await self._call("Explain", request, deadline_seconds)
        return tuple(explanation_from_wire(route) for route in answer.routes)

    async def trace(
        self, request_id: str, *, deadline_seconds: float = ASK_SECONDS
    ) -> tuple[LifecycleEvent, ...]:
        """The events of a request, from the lifecycle log."""
        request = inference_pb2.TraceRequest(request_id=check_correlation_id(request_id))
        answer = await self._call("Trace", request, deadline_seconds)
        return tuple(lifecycle_from_wire(event) for event in answer.events)

    async def models(self, *, deadline_seconds: float = ASK_SECONDS) -> tuple[ModelCard, ...]:
        """The served models."""
        request = inference_pb2.ListModelsRequest()
        answer = await self._call("ListModels", request, deadline_seconds)
        return tuple(model_from_wire(model) for model in answer.models)

    async def tokenize(
        self, prompt: GivenPrompt, *, model: str = "", deadline_seconds: float = ASK_SECONDS
    ) -> tuple[int, ...]:
        """The token ids that `generate` would use."""
        given = prompt_to_wire(as_prompt(prompt))
        request = inference_pb2.TokenizeRequest(model=model, prompt=given)
        answer = await self._call("Tokenize", request, deadline_seconds)
        return tuple(token_ids_from_bytes(answer.token_ids).tolist())

    async def save_state(
        self, request_id: str, *, deadline_seconds: float = STATE_SECONDS
    ) -> AsyncGenerator[bytes | SignedState]:
        """The state of a late request, in pieces: the bytes for a state file, then what is signed
        about them (docs/state-files.md)."""
        self._check_open()
        request = inference_pb2.SaveStateRequest(request_id=check_correlation_id(request_id))
        async with self._doors.asked() as door:
            call = door.stub.SaveState(request, timeout=deadline_seconds, metadata=self._metadata)
            with typed_client_errors(), ending(call) as parts:
                async for part in parts:
                    is_data = part.WhichOneof("part") == "data"
                    yield part.data if is_data else signed_state_from_wire(part.signed)

    async def load_state(
        self,
        signed: SignedState,
        content: Iterable[bytes],
        *,
        deadline_seconds: float = STATE_SECONDS,
    ) -> LoadedState:
        """Gives the cluster the state of a file, whose bytes come in pieces of at most 1 MiB. It is
        this caller's alone, and is there as a whole or not at all."""
        self._check_open()
        async with self._doors.asked() as door:
            with typed_client_errors():
                call = await self._accepted_load(door, signed, deadline_seconds)
                with ending(call):
                    with suppress(asyncio.InvalidStateError):  # the router is gone
                        for piece in content:
                            await call.write(inference_pb2.LoadStateRequest(data=piece))
                        await call.done_writing()
                    return loaded_state_from_wire((await next_message(call)).arrival)

    async def _accepted_load(self, door: RouterDoor, signed: SignedState, seconds: float) -> Any:
        """The call of a load whose statement was accepted, so that its bytes are wanted."""
        head = inference_pb2.LoadStateRequest(signed=signed_state_to_wire(signed))
        num_lost = 0
        while True:
            call = door.stub.LoadState(timeout=seconds, metadata=self._metadata)
            try:
                await call.write(head)
                await next_message(call)
            except grpc.aio.AioRpcError as error:
                call.cancel()
                # gRPC loses the status of a refusal that meets the first message on its way.
                num_lost += 1
                if num_lost == MAX_LOST_REFUSALS or not is_unexplained(error):
                    raise
            except BaseException:
                call.cancel()
                raise
            else:
                return call

    def _open_stream(
        self, door: RouterDoor, request: inference_pb2.GenerateRequest, seconds: float
    ) -> Any:
        self._check_open()
        return door.stub.Generate(request, timeout=seconds, metadata=self._metadata)

    async def _call(self, method: str, request: Any, seconds: float) -> Any:
        """Makes one call, and makes it again while the connection breaks."""
        deadline = Deadline(seconds)
        failures = Failures(self._retries, self._chance, deadline)
        while True:
            self._check_open()
            try:
                return await self._call_once(method, request, deadline)
            except (ConnectionBroken, Stopping) as error:
                await failures.wait(error)

    async def _call_once(self, method: str, request: Any, deadline: Deadline) -> Any:
        async with self._doors.asked() as door:
            call = getattr(door.stub, method)
            try:
                with typed_client_errors():
                    return await call(
                        request, timeout=deadline.seconds_left(), metadata=self._metadata
                    )
            except (ConnectionBroken, Stopping) as error:
                self._doors.failed(door, error)
                raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise Cancelled("this client is closed")
