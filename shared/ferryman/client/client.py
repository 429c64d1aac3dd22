"""A client of the public InferenceService."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

from ferryman.client.answer import Answer, Order
from ferryman.client.calls import Deadline, Failures, told_apart
from ferryman.client.prompts import GivenPrompt, as_prompt
from ferryman.client.retries import Chance, ConnectionBroken, Retries
from ferryman.errors import Cancelled
from ferryman.ids import check_request_id
from ferryman.schedule.request import SamplingParams
from ferryman.wire.codec.inference import (
    explanation_from_wire,
    lifecycle_from_wire,
    model_from_wire,
    prompt_to_wire,
)
from ferryman.wire.codec.scalars import token_ids_from_bytes
from ferryman.wire.public import GenerateEvent, LifecycleEvent, ModelCard, RouteExplanation
from ferryman.wire.rpc import channel
from ferryman.wire.v1 import inference_pb2
from ferryman.wire.v1.inference_pb2_grpc import InferenceServiceStub

GENERATE_SECONDS = 300.0
ASK_SECONDS = 10.0


class Client:
    """Speaks to the router at `address` (host:port). Use it in `async with`, or call `close`.

    With an `api_key` every call says who it is from. `chance` spreads retries in time.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        retries: Retries | None = None,
        chance: Chance = random.random,
    ) -> None:
        self._channel = channel(address)
        self._stub = InferenceServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._retries, self._chance = retries or Retries(), chance
        self._is_closed = False

    async def close(self) -> None:
        """Ends the calls under way."""
        self._is_closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Streams an answer: GenerateStarted, TokenChunks, GenerateFinished.

        Every token comes once and in order; a broken connection is taken up behind the last one.
        To stop early close the generator (`contextlib.aclosing`): the router frees everything.
        """
        deadline = Deadline(deadline_seconds)
        order = Order(
            prompt_to_wire(as_prompt(prompt)),
            sampling or SamplingParams(),
            model,
            check_request_id(request_id) if request_id else "",
            deadline,
        )
        failures = Failures(self._retries, self._chance, deadline)
        return Answer(order, self._open_stream, failures).events()

    async def explain(
        self, request_id: str, *, deadline_seconds: float = ASK_SECONDS
    ) -> tuple[RouteExplanation, ...]:
        """Why a request was routed as it was, one entry per attempt."""
        request = inference_pb2.ExplainRequest(request_id=check_request_id(request_id))
        answer = await self._ask(self._stub.Explain, request, deadline_seconds)
        return tuple(explanation_from_wire(route) for route in answer.routes)

    async def trace(
        self, request_id: str, *, deadline_seconds: float = ASK_SECONDS
    ) -> tuple[LifecycleEvent, ...]:
        """What happened to a request, from the lifecycle log."""
        request = inference_pb2.TraceRequest(request_id=check_request_id(request_id))
        answer = await self._ask(self._stub.Trace, request, deadline_seconds)
        return tuple(lifecycle_from_wire(event) for event in answer.events)

    async def models(self, *, deadline_seconds: float = ASK_SECONDS) -> tuple[ModelCard, ...]:
        """What is served."""
        request = inference_pb2.ListModelsRequest()
        answer = await self._ask(self._stub.ListModels, request, deadline_seconds)
        return tuple(model_from_wire(model) for model in answer.models)

    async def tokenize(
        self, prompt: GivenPrompt, *, model: str = "", deadline_seconds: float = ASK_SECONDS
    ) -> tuple[int, ...]:
        """The token ids that `generate` would use."""
        given = prompt_to_wire(as_prompt(prompt))
        request = inference_pb2.TokenizeRequest(model=model, prompt=given)
        answer = await self._ask(self._stub.Tokenize, request, deadline_seconds)
        return tuple(token_ids_from_bytes(answer.token_ids).tolist())

    def _open_stream(self, request: inference_pb2.GenerateRequest, seconds: float) -> Any:
        self._check_open()
        return self._stub.Generate(request, timeout=seconds, metadata=self._metadata)

    async def _ask(self, method: Any, request: Any, seconds: float) -> Any:
        """One question, asked again while the connection breaks."""
        deadline = Deadline(seconds)
        failures = Failures(self._retries, self._chance, deadline)
        while True:
            self._check_open()
            try:
                with told_apart():
                    return await method(
                        request, timeout=deadline.seconds_left(), metadata=self._metadata
                    )
            except ConnectionBroken as error:
                await failures.wait(error)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Cancelled("this client is closed")
