"""The gRPC door: the public InferenceService. A broken stream may be taken up at its offset."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ferryman.errors import FerrymanError, InvalidRequest, NotFound
from ferryman.ids import check_correlation_id, check_request_id
from ferryman.schedule.request import SamplingParams
from ferryman.wire.codec.inference import (
    event_to_wire,
    explanation_to_wire,
    lifecycle_to_wire,
    loaded_state_to_wire,
    model_to_wire,
    prompt_from_wire,
    signed_state_from_wire,
    signed_state_to_wire,
)
from ferryman.wire.codec.request import sampling_from_wire
from ferryman.wire.codec.scalars import token_ids_from_bytes, token_ids_to_bytes
from ferryman.wire.grpc.rpc import Context, remaining_seconds
from ferryman.wire.grpc.status import OFFSET, RETRYABLE, STAGE
from ferryman.wire.nats.bus import RecordedMessage
from ferryman.wire.nats.subjects import LifeSubject, Subjects
from ferryman.wire.public import (
    ChatPrompt,
    GenerateEvent,
    GenerateStarted,
    LifecycleEvent,
    ModelCard,
)
from ferryman.wire.v1 import inference_pb2, inference_pb2_grpc
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.structured_outputs import note_formats
from ferryman_router.doors.auth import Authenticator
from ferryman_router.intake.body_intake import BodyMemory
from ferryman_router.intake.frontend import Frontend
from ferryman_router.request.request_history import past_routes, shown_route
from ferryman_router.request.request_log import RequestLog, decoded
from ferryman_router.request.request_runner import RequestRunner
from ferryman_router.request.response import OutputFailed
from ferryman_router.request.state_files import StateBytes, StateFiles
from ferryman_router.routing.generate_request import Caller, GenerateRequest, RequestedSampling

SERVICE = "ferryman.wire.v1.InferenceService"


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Turns messages into requests, and output logs into messages."""

    def __init__(
        self,
        frontend: Frontend,
        callers: Authenticator,
        memory: BodyMemory,
        subjects: Subjects,
        events: RequestLog,
        states: StateFiles,
    ) -> None:
        self._frontend, self._callers, self._memory = frontend, callers, memory
        self._subjects, self._log, self._states = subjects, events, states

    def register(self, server: Any) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        responses = self._frontend.ctx.metrics.responses
        try:
            caller = self._caller(request.request_id, context)
            caller = replace(caller, num_sent_before=request.num_sent_before)
            with self._memory.holding() as grow:  # until its text has become token ids
                grow(request.ByteSize())
                runner = await self._runner(request, caller)
            try:
                async for event in self._events(runner, request.resume_from_offset):
                    yield event_to_wire(event)
            finally:
                if isinstance(broken := runner.output_log.end, OutputFailed):
                    context.set_trailing_metadata(_broken_trailers(broken))
        except FerrymanError as error:
            responses.labels("grpc", error.code).inc()
            raise
        responses.labels("grpc", "OK").inc()

    async def Explain(
        self, request: inference_pb2.ExplainRequest, context: Context
    ) -> inference_pb2.ExplainResponse:
        tenant, name = self._reader(context).tenant, check_correlation_id(request.request_id)
        runner = self._frontend.requests.find_for(tenant, name)
        if runner is not None:
            routes = [shown_route(attempt.explanation) for attempt in runner.attempts]
        else:
            routes = past_routes(decoded(await self._log.of(tenant, name)))
        messages = [explanation_to_wire(explanation) for explanation in routes]
        return inference_pb2.ExplainResponse(request_id=request.request_id, routes=messages)

    async def Trace(
        self, request: inference_pb2.TraceRequest, context: Context
    ) -> inference_pb2.TraceResponse:
        tenant, name = self._reader(context).tenant, check_correlation_id(request.request_id)
        recorded = await self._log.of(tenant, name)
        events = [lifecycle_to_wire(self._event(message)) for message in recorded]
        return inference_pb2.TraceResponse(events=events)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        self._reader(context)
        names = self._frontend.ctx.model.names
        cards = [model_to_wire(self._card(name)) for name in names]
        return inference_pb2.ListModelsResponse(models=cards)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        caller = self._reader(context)
        self._frontend.ctx.model.check_name(request.model)
        prompt = prompt_from_wire(request.prompt)
        with self._memory.holding() as grow:
            grow(request.ByteSize())
            tokenized = await self._frontend.tokenize(prompt, within=caller.deadline_seconds)
        return inference_pb2.TokenizeResponse(token_ids=token_ids_to_bytes(tokenized.token_ids))

    async def SaveState(
        self, request: inference_pb2.SaveStateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.SaveStateResponse]:
        tenant, name = self._reader(context).tenant, check_correlation_id(request.request_id)
        async with aclosing(self._states.save(tenant, name)) as parts:
            async for part in parts:
                if isinstance(part, bytes):
                    yield inference_pb2.SaveStateResponse(data=part)
                else:
                    yield inference_pb2.SaveStateResponse(signed=signed_state_to_wire(part))

    async def LoadState(
        self, requests: AsyncIterator[inference_pb2.LoadStateRequest], context: Context
    ) -> AsyncIterator[inference_pb2.LoadStateResponse]:
        tenant = self._reader(context).tenant
        first = await anext(requests, inference_pb2.LoadStateRequest())
        if first.WhichOneof("part") != "signed":
            raise InvalidRequest("a state file begins with what is signed", "signed")
        signed = signed_state_from_wire(first.signed)
        statement = self._states.accepted(signed)
        yield inference_pb2.LoadStateResponse(accepted=inference_pb2.AcceptedState())
        content = StateBytes((part.data async for part in requests), statement.num_bytes)
        try:
            loaded = await self._states.load(tenant, signed, statement, content)
        except FerrymanError:
            await content.drain()
            raise
        yield inference_pb2.LoadStateResponse(arrival=loaded_state_to_wire(loaded))

    # From message to request.

    def _caller(self, request_id: str, context: Context) -> Caller:
        headers = {key: str(value) for key, value in context.invocation_metadata() or ()}
        if request_id:
            headers["x-request-id"] = check_request_id(request_id)
        caller = self._callers.authenticate(headers)
        return replace(caller, deadline_seconds=remaining_seconds(context, caller.deadline_seconds))

    def _reader(self, context: Context) -> Caller:
        """The caller of a method other than Generate; one that is refused is counted."""
        try:
            return self._caller("", context)
        except FerrymanError as error:
            self._frontend.ctx.metrics.responses.labels("grpc", error.code).inc()
            raise

    async def _runner(
        self, request: inference_pb2.GenerateRequest, caller: Caller
    ) -> RequestRunner:
        """The request that has this id already, if it asks for the same; or a new one."""
        requests, runner = self._frontend.requests, None
        if request.request_id:
            runner = requests.find_for(caller.tenant, request.request_id)
        if runner is not None and runner.was_abandoned:
            runner = None  # its client came back too late, and has to begin again
        sampling = _sampling(request, runner)
        arrived = self._frontend.ctx.clock()
        prompt, ignored = prompt_from_wire(request.prompt), _ignored(sampling.params)
        ask = GenerateRequest(
            caller,
            request.model,
            prompt,
            sampling,
            arrived,
            ignored=ignored,
            is_chat=isinstance(prompt, ChatPrompt),
        )
        if runner is None and not request.resume_from_offset:
            return await self._frontend.open(replace(ask, caller=requests.named(caller)))
        if runner is None:
            try:
                return await self._frontend.open(await self._taken_over(request, ask))
            except InvalidRequest:
                # Its caller may have sent it twice: then the other one was first by now.
                runner = requests.find_for(caller.tenant, request.request_id)
                if runner is None:
                    raise
        # The request does not end for lack of readers while this one is being checked.
        with self._frontend.listening(runner, asyncio.Event()):
            asked = await self._frontend.check(ask)
        if runner.asked.is_same_as(asked):
            return runner
        if not request.num_sent_before:
            message = f"request id {request.request_id} was used for something else"
            raise InvalidRequest(message, "request_id")
        # Another router had it first, and this one a request of the same id of another caller.
        if request.resume_from_offset:
            raise NotFound(f"{request.request_id} is another request here: begin it anew")
        return await self._frontend.open(replace(ask, caller=requests.named(caller)))

    async def _taken_over(
        self, request: inference_pb2.GenerateRequest, ask: GenerateRequest
    ) -> GenerateRequest:
        """The ask as that of a request which began at another router. Raises NotFound when it
        cannot go on here: its caller may begin it again."""
        held = tuple(token_ids_from_bytes(request.held_token_ids).tolist())
        if len(held) != request.resume_from_offset:
            raise NotFound(
                f"there is no request {request.request_id} to resume here: another router needs the"
                " tokens that the caller has"
            )
        request_id = check_request_id(request.started_request_id or request.request_id)
        tenant, fleet = ask.caller.tenant, self._frontend.ctx.fleet
        past = await self._log.past_life(tenant, request_id, held, fleet)
        return replace(ask, caller=replace(ask.caller, request_id=request_id), past=past)

    async def _events(self, runner: RequestRunner, offset: int) -> AsyncIterator[GenerateEvent]:
        """Raises the request's failure after what there is; leaving early is noticed."""
        changed = asyncio.Event()
        with self._frontend.listening(runner, changed) as output_log:
            index = output_log.chunk_index(offset)
            asked, has_scores = runner.asked, index > 0
            yield GenerateStarted(
                asked.request_id,
                asked.request.model,
                asked.prompt_len,
                asked.params.seed,
                asked.parting,
            )
            while True:
                # Before the first token, and not sooner: only then they are known to be whole.
                if not has_scores and output_log.chunks:
                    has_scores = True
                    for piece in output_log.scores:
                        yield piece
                while index < len(output_log.chunks):
                    yield output_log.chunks[index]
                    index += 1
                if isinstance(output_log.end, OutputFailed):
                    raise output_log.end.error
                if output_log.end is not None:
                    yield output_log.end
                    return
                await changed.wait()
                changed.clear()

    # From what is known to message.

    def _event(self, recorded: RecordedMessage) -> LifecycleEvent:
        subject = self._subjects.parse(recorded.subject)
        assert isinstance(subject, LifeSubject), "the log holds nothing else"
        text = recorded.payload.decode("utf-8", "replace")
        return LifecycleEvent(
            subject.role, subject.worker_id, subject.event, text, recorded.sequence
        )

    def _card(self, name: str) -> ModelCard:
        ctx = self._frontend.ctx
        state = ctx.fleet.state()
        return ModelCard(
            name,
            ctx.model.family,
            ctx.model.dtype,
            ctx.model.max_len,
            ctx.fleet.page_size(),
            state.digest if state is not None else "",
            ctx.model.created_unix_seconds,
            ctx.model.vocab,
            *ctx.fleet.promise(),
        )


def _ignored(params: SamplingParams) -> tuple[str, ...]:
    """The parts of a request that have no effect, for its trace."""
    place = BodyPlace.of_body()
    if params.grammar is not None:
        note_formats(params.grammar.unknown_formats, place.field("sampling").field("grammar"))
    return tuple(field.plain for field in place.ignored.listed)


def _sampling(
    request: inference_pb2.GenerateRequest, runner: RequestRunner | None
) -> RequestedSampling:
    """The sampling; without a seed it gets a new one, or that of the request that is known
    already."""
    seed = runner.asked.params.seed if runner is not None else secrets.randbits(63)
    params = sampling_from_wire(request.sampling, SamplingParams(seed=seed))
    return RequestedSampling(params, is_open_ended=not request.sampling.HasField("max_tokens"))


def _broken_trailers(broken: OutputFailed) -> tuple[tuple[str, str], ...]:
    return (
        (STAGE, broken.stage),
        (OFFSET, str(broken.offset)),
        (RETRYABLE, str(broken.is_retryable).lower()),
    )
