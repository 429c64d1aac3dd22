"""Decode's half of a hand-off within one worker: the request stays on the slots of its prompt.

Nothing is reserved, sent or verified by digests. The request holds its slots, under its own lease,
from admission to its last token; only its phase changes, with the step that draws the first token.
To routers and in the lifecycle log the hand-off looks like any other: reserved, verified, and then
tokens. Late and repeated attempts are refused as at Reserve.
"""

from __future__ import annotations

from ferryman.grammar.compiler import CompiledGrammar
from ferryman.handoff.receiver import ReservationTable
from ferryman.schedule.events import Drawn, Event, SequenceAdmitted
from ferryman.wire.plane_values import LOCAL
from ferryman.wire.values import PrefillOrder, Usage
from ferryman.worker.summary import prompt_usage
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.decode_request import DecodeRequest, name_of
from ferryman_decode.requests import Requests


class LocalHandoffs:
    """Requests of this worker whose prompts it computes itself, until their first token."""

    def __init__(self, parts: WorkerContext, requests: Requests, table: ReservationTable) -> None:
        self._parts = parts
        self._requests = requests
        self._table = table
        self._usage: dict[str, Usage] = {}

    def begin(self, order: PrefillOrder, grammar: CompiledGrammar | None) -> None:
        """Takes a request before its prompt is scheduled. An earlier attempt ends: its tokens are
        not read any more. Raises Stale for an attempt that was ended, or is known already."""
        context = order.context
        self._requests.check_owner(context, order.router_id)
        self._table.check_new(context.request_id, context.attempt, self._parts.clock())
        self._requests.check_new(context)
        self._requests.supersede(context, order.router_id)
        self._usage[name_of(context.request_id, context.attempt)] = Usage(order.request.prompt_len)
        self._requests.reserved(DecodeRequest(order, grammar), {"path": LOCAL})

    def is_pending(self, name: str) -> bool:
        """Whether the request has no first token yet, so that its attempt must end it."""
        return name in self._usage

    def give_up(self, name: str, cause: str) -> None:
        """The prompt will not be computed."""
        if self._usage.pop(name, None) is not None:
            self._requests.withdrawn(name, cause)

    def on_event(self, event: Event) -> None:
        """Takes each event before the requests do: a request may end in the step that draws its
        first token, and then tells how much of its prompt was reused."""
        name = event.request_id
        if name not in self._usage:
            return
        match event:
            case SequenceAdmitted(plan=plan):
                # The last plan counts: a corrupt load causes a new one.
                self._usage[name] = prompt_usage(self._parts.engine.manifest, plan)
            case Drawn():
                self._requests.verified(name, self._usage.pop(name), units=0)
