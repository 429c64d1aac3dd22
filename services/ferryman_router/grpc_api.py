"""The gRPC door: the public InferenceService. A broken stream may be taken up at its offset."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace

from ferryman.errors import FerrymanError, InvalidRequest, NotFound
from ferryman.ids import check_request_id
from ferryman.schedule.request import SamplingParams
from ferryman.wire.bus import Bus, Recorded
from ferryman.wire.codec.inference import (
    event_to_wire,
    explanation_to_wire,
    lifecycle_to_wire,
    model_to_wire,
    prompt_from_wire,
)
from ferryman.wire.codec.request import sampling_from_wire
from ferryman.wire.codec.scalars import token_ids_to_bytes
from ferryman.wire.public import (
    GenerateEvent,
    GenerateStarted,
    LifecycleEvent,
    ModelCard,
    RouteCandidate,
    RouteExplanation,
)
from ferryman.wire.rpc import Context, remaining_seconds
from ferryman.wire.subjects import LifeSubject, Subjects
from ferryman.wire.v1 import inference_pb2, inference_pb2_grpc
from ferryman_router.api.callers import Callers
from ferryman_router.asked import Ask, Caller, Sampling
from ferryman_router.desk import Desk
from ferryman_router.journey import Journey
from ferryman_router.policy import Candidate, Explanation
from ferryman_router.transcript import Broken

SERVICE = "ferryman.wire.v1.InferenceService"
MAX_TRACE_EVENTS = 4096


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Turns messages into asks, and transcripts into messages."""

    def __init__(self, desk: Desk, callers: Callers, bus: Bus, subjects: Subjects) -> None:
        self._desk, self._callers = desk, callers
        self._bus, self._subjects = bus, subjects

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        responses = self._desk.around.metrics.responses
        try:
            caller = self._caller(request.request_id, context)
            journey = await self._journey(request, caller)
            async for event in self._events(journey, request.resume_from_offset):
                yield event_to_wire(event)
        except FerrymanError as error:
            responses.labels("grpc", error.code).inc()
            raise
        responses.labels("grpc", "OK").inc()

    async def Explain(
        self, request: inference_pb2.ExplainRequest, context: Context
    ) -> inference_pb2.ExplainResponse:
        self._caller("", context)
        journey = self._desk.journeys.get(check_request_id(request.request_id))
        routes = [explanation_to_wire(_shown(one)) for one in journey.explanations]
        return inference_pb2.ExplainResponse(request_id=request.request_id, routes=routes)

    async def Trace(
        self, request: inference_pb2.TraceRequest, context: Context
    ) -> inference_pb2.TraceResponse:
        self._caller("", context)
        pattern = self._subjects.all_life_of(request.request_id)
        found = await self._bus.history(pattern, max_events=MAX_TRACE_EVENTS)
        if not found:
            raise NotFound(f"the lifecycle log has nothing of {request.request_id}")
        events = [lifecycle_to_wire(self._event(one)) for one in found]
        return inference_pb2.TraceResponse(events=events)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        self._caller("", context)
        return inference_pb2.ListModelsResponse(models=[model_to_wire(self._card())])

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        self._caller("", context)
        self._desk.around.model.check_name(request.model)
        token_ids = await self._desk.tokenize(prompt_from_wire(request.prompt))
        return inference_pb2.TokenizeResponse(token_ids=token_ids_to_bytes(token_ids))

    # From message to journey.

    def _caller(self, request_id: str, context: Context) -> Caller:
        headers = {key: str(value) for key, value in context.invocation_metadata() or ()}
        if request_id:
            headers["x-request-id"] = check_request_id(request_id)
        caller = self._callers.of(headers)
        return replace(caller, deadline_seconds=remaining_seconds(context, caller.deadline_seconds))

    async def _journey(self, request: inference_pb2.GenerateRequest, caller: Caller) -> Journey:
        """The one that this id has already, when it asks for the same; or a new one."""
        journeys, known = self._desk.journeys, None
        if request.request_id:
            known = journeys.find(request.request_id)
        if known is not None and known.was_abandoned:
            known = None  # its client came back too late, and has to begin anew
        sampling = _sampling(request, known)
        ask = Ask(caller, request.model, prompt_from_wire(request.prompt), sampling)
        if known is None:
            if request.resume_from_offset:
                raise NotFound(f"there is no request {caller.request_id} to resume")
            return await self._desk.open(ask)
        if not known.asked.is_same_as(await self._desk.check(ask)):
            message = f"request id {caller.request_id} was used for something else"
            raise InvalidRequest(message, "request_id")
        return known

    async def _events(self, journey: Journey, offset: int) -> AsyncIterator[GenerateEvent]:
        """Raises the request's failure after what there is; leaving early is noticed."""
        changed = asyncio.Event()
        with self._desk.listening(journey, changed) as transcript:
            index = transcript.chunk_index(offset)
            asked = journey.asked
            yield GenerateStarted(
                asked.request_id,
                self._desk.around.model.model_id,
                asked.prompt_len,
                asked.params.seed,
            )
            while True:
                while index < len(transcript.chunks):
                    yield transcript.chunks[index]
                    index += 1
                if isinstance(transcript.end, Broken):
                    raise transcript.end.error
                if transcript.end is not None:
                    yield transcript.end
                    return
                await changed.wait()
                changed.clear()

    # From what is known to message.

    def _event(self, recorded: Recorded) -> LifecycleEvent:
        subject = self._subjects.parse(recorded.subject)
        assert isinstance(subject, LifeSubject), "the log holds nothing else"
        text = recorded.payload.decode("utf-8", "replace")
        return LifecycleEvent(
            subject.role, subject.worker_id, subject.event, text, recorded.sequence
        )

    def _card(self) -> ModelCard:
        around = self._desk.around
        state = around.fleet.state()
        return ModelCard(
            around.model.model_id,
            around.model.family,
            around.model.dtype,
            around.model.max_len,
            around.fleet.page_size(),
            state.digest if state is not None else "",
            around.model.created_unix_seconds,
            around.model.vocab,
        )


def _sampling(request: inference_pb2.GenerateRequest, known: Journey | None) -> Sampling:
    """Without a seed, a new one; but of a request that is known already, the one it got."""
    seed = known.asked.params.seed if known is not None else secrets.randbits(63)
    params = sampling_from_wire(request.sampling, SamplingParams(seed=seed))
    return Sampling(params, is_open_ended=not request.sampling.HasField("max_tokens"))


def _shown(explanation: Explanation) -> RouteExplanation:
    others = tuple(_shown_candidate(other) for other in explanation.others)
    return RouteExplanation(explanation.attempt, _shown_candidate(explanation.chosen), others)


def _shown_candidate(candidate: Candidate) -> RouteCandidate:
    return RouteCandidate(
        candidate.prefill.worker_id,
        candidate.decode.worker_id,
        candidate.queue_seconds,
        candidate.arrival.load_seconds,
        candidate.prefill_seconds,
        candidate.handoff_seconds,
        candidate.total_seconds,
        candidate.usable_tokens,
        candidate.cached.host,
        fetch_seconds=candidate.arrival.fetch_seconds,
        row_seconds=candidate.row_seconds,
        recompute_seconds=candidate.arrival.recompute_seconds,
        device_tokens=candidate.cached.device,
        storage_tokens=candidate.cached.storage,
        peer_tokens=candidate.cached.peer,
        plane=candidate.plane,
    )
