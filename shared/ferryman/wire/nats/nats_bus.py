"""The bus over NATS.

The client library could buffer while the broker is away and deliver old messages late, so its
buffer is off. Messages wait in our outbox until the connection is up.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from ferryman.cancellation import cancels_kept, end_tasks
from ferryman.errors import DeadlineExceeded, InvalidRequest, Unavailable
from ferryman.wire.nats.bus import (
    DEADLINE_HEADER,
    Answer,
    BusMessage,
    BusStatistics,
    Discoverable,
    Messages,
    RecordedMessage,
    answer_from,
    answer_to,
    check_subject,
    checked_payload,
    matches,
)
from ferryman.wire.nats.connection import (
    CONNECT_SECONDS,
    BrokerConnection,
    Discovery,
    NatsOptions,
    ServiceListener,
)
from ferryman.wire.nats.lifecycle_log import (
    ALL_LIFE,
    LOOK_SECONDS,
    TRANSPORT_ERRORS,
    Acknowledgements,
    LogKeeper,
    LogState,
    log_state,
    read_log,
)
from ferryman.wire.nats.outbox import OutboundMessage, Outbox
from ferryman.wire.nats.sender_proof import answer_proof, is_proven, proof_for

log = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
# So long a refusal by the broker waits for a proven answer, which would show that it was forged.
REFUSAL_SECONDS = 0.2
# Before a message is tried again on a connection that was closed a moment ago.
CLOSED_SECONDS = 0.05
_STATUS, _NO_RESPONDERS = "Status", "503"  # of the server's own answer, which is empty


@asynccontextmanager
async def nats_bus(options: NatsOptions) -> AsyncIterator[NatsBus]:
    """A bus for the length of a block, which begins at once, with or without a broker.

    Leaving the block sends the waiting messages, within FLUSH_SECONDS.
    """
    bus = NatsBus(options)
    sending = asyncio.create_task(bus.run(), name="nats bus")
    sending.add_done_callback(_report)
    try:
        yield bus
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await bus.flush()
        # A connection being made loses a cancel.
        await end_tasks((sending,), CONNECT_SECONDS)
        await bus.close()


def _report(sending: asyncio.Task[None]) -> None:
    if not sending.cancelled() and (error := sending.exception()):
        log.error("the bus has stopped sending", exc_info=error)


class NatsBus:
    """A `Bus` over one NATS connection; `nats_bus` runs it."""

    def __init__(self, options: NatsOptions, outbox: Outbox | None = None) -> None:
        self._options = options
        self._connection = BrokerConnection(options, self._on_up)
        self._client = self._connection.client
        self._outbox = outbox or Outbox()
        self._acks = Acknowledgements(f"{self._connection.inbox}.{secrets.token_hex(11)}")
        limits = options.kept_log
        self._keeper = LogKeeper(self._client, limits, self._acks) if limits else None
        self._has_log = False
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._num_sent, self._num_unsendable = 0, 0
        self._num_missed, self._num_unproven = 0, 0

    # Calls of all users.

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    async def connected(self) -> None:
        """Waits until the broker is there; the caller sets the time limit."""
        await self._connection.up.wait()

    async def disconnected(self) -> None:
        """Waits until the broker is away."""
        await self._connection.down.wait()

    def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        checked_payload(payload, self._connection.max_payload)
        self._outbox.keep(self._outbound(subject, payload, headers))
        self._wake.set()

    def offer(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        checked_payload(payload, self._connection.max_payload)
        self._outbox.offer(self._outbound(subject, payload, headers))
        self._wake.set()

    @asynccontextmanager
    async def subscribed(self, pattern: str) -> AsyncIterator[Messages]:
        messages = Messages()

        async def arrive(message: Msg) -> None:
            self._num_missed += not messages.try_put(_received(message))

        async with self._connection.attached(ServiceListener(self._client, pattern, arrive)):
            yield messages

    @asynccontextmanager
    async def answering(self, pattern: str, answer: Answer) -> AsyncIterator[None]:
        async def arrive(message: Msg) -> None:
            payload, headers = await answer_to(_received(message), _checked(answer))
            if message.reply:
                proof = answer_proof(message.subject, self._options.life_secret)
                with suppress(nats.errors.Error, OSError):
                    await self._client.publish(
                        message.reply, payload, headers={**headers, **proof} or None
                    )

        async with self._connection.attached(ServiceListener(self._client, pattern, arrive)):
            yield

    async def request(self, subject: str, payload: bytes, *, timeout_seconds: float) -> bytes:
        checked_payload(payload, self._connection.max_payload)
        if not self.is_connected:
            raise Unavailable("the broker is away")
        ask = PendingAnswer(
            self._client, check_subject(subject), has_proof=bool(self._options.user)
        )
        try:
            with cancels_kept():
                message = await ask.answer(payload, timeout_seconds)
        except nats.errors.NoRespondersError:
            raise Unavailable(f"nobody answers on {subject}") from None
        except TimeoutError:
            if ask.num_unproven:
                raise Unavailable(f"only others have answered on {subject}") from None
            raise DeadlineExceeded(f"no answer on {subject} in time") from None
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"the broker is away: {error}") from error
        finally:
            self._num_unproven += ask.num_unproven
        return answer_from(message.data, message.headers or {})

    async def history(self, pattern: str, *, max_events: int) -> tuple[RecordedMessage, ...]:
        if not self.is_connected:
            raise Unavailable("the lifecycle log is away")
        return await read_log(self._client, pattern, max_events)

    async def log_state(self) -> LogState:
        """Whether the broker keeps the lifecycle log. Raises Unavailable without an answer."""
        return await log_state(self._client)

    @asynccontextmanager
    async def discoverable(self, process: Discoverable) -> AsyncIterator[None]:
        async with self._connection.attached(Discovery(self._client, process)):
            yield

    def statistics(self) -> BusStatistics:
        return BusStatistics(
            num_sent=self._num_sent,
            num_waiting=len(self._outbox),
            num_refused=self._outbox.num_refused,
            num_dropped=self._outbox.num_dropped + self._num_unsendable,
            num_recorded=self._acks.num_recorded,
            num_unrecorded=self._acks.num_unrecorded,
            num_missed=self._num_missed,
            num_forbidden=self._connection.refusals.number,
            num_unproven=self._num_unproven,
        )

    # The job that connects and sends.

    async def run(self) -> None:
        """Connects, then sends waiting messages, for ever."""
        await self._connection.connect()
        await self._client.subscribe(self._acks.pattern, cb=self._acks.on_answer)
        if self._keeper is None:
            await self._send_all()
            return
        keeping = asyncio.create_task(self._keep_log(self._keeper), name="keeper of the log")
        keeping.add_done_callback(_report)
        try:
            # In this task, not in one of a group: an answer that is awaited can lose a cancel, and
            # the next one has to reach it too.
            await self._send_all()
        finally:
            await end_tasks((keeping,), CONNECT_SECONDS)

    async def _send_all(self) -> None:
        while True:
            await self._connection.up.wait()
            if not self._has_log:
                await self._begin_log()
            await self._send_waiting()
            self._idle.set()
            await self._wake.wait()
            self._wake.clear()
            self._idle.clear()

    async def flush(self) -> None:
        """Waits until every message published so far was sent; for ever, while the broker is
        away."""
        while len(self._outbox) or not self._connection.up.is_set():
            await self._connection.up.wait()
            self._idle.clear()
            self._wake.set()
            await self._idle.wait()
        await self._client.flush()

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()

    def _outbound(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None
    ) -> OutboundMessage:
        proof = proof_for(check_subject(subject), self._options.life_secret)
        return OutboundMessage(subject, payload, {**(headers or {}), **proof})

    async def _begin_log(self) -> None:
        self._send_again()
        self._has_log = True
        if self._keeper is not None:
            await self._keeper.ensure()

    async def _keep_log(self, keeper: LogKeeper) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._connection.up.is_set() and await keeper.look():
                self._send_again()
                self._wake.set()

    def _send_again(self) -> None:
        """Gives back what was sent and not acknowledged."""
        for message in reversed(self._acks.take_outstanding()):
            self._outbox.give_back(message)

    async def _send_waiting(self) -> None:
        while self._connection.up.is_set():
            await self._acks.room()
            message = self._outbox.take()
            if message is None:
                return
            await self._send(message)

    async def _send(self, message: OutboundMessage) -> None:
        reply = ""
        if matches(ALL_LIFE, message.subject):
            reply, message = self._acks.enter(message)
        headers = dict(message.headers) or None
        try:
            await self._client.publish(message.subject, message.payload, reply, headers)
        except (nats.errors.OutboundBufferLimitError, nats.errors.ConnectionClosedError):
            self._acks.withdraw(reply)
            self._outbox.give_back(message)
            self._connection.up.clear()
        except TRANSPORT_ERRORS:
            # The library is about to notice that its connection is gone, and connects again. It may
            # send what it took; so the message may come twice.
            self._acks.withdraw(reply)
            self._outbox.give_back(message)
            await asyncio.sleep(CLOSED_SECONDS)
        except nats.errors.Error as error:
            self._acks.withdraw(reply)
            self._num_unsendable += 1
            log.warning("not sent subject=%s: %s", message.subject, error)
        else:
            self._num_sent += 1

    def _on_up(self) -> None:
        self._has_log = False
        self._wake.set()


class PendingAnswer:
    """One request on `subject`. With `has_proof` only an answer that has one counts; of others
    there were `num_unproven`.

    The broker's own answer, that nobody listens, has no proof, and anybody could write it. But it
    is the only one then: another answer shows that it was not the broker's.
    """

    def __init__(self, client: Client, subject: str, *, has_proof: bool) -> None:
        self._client, self._subject, self._has_proof = client, subject, has_proof
        self._is_refused = False
        self.num_unproven = 0

    async def answer(self, payload: bytes, timeout_seconds: float) -> Msg:
        """Asks and waits. Raises TimeoutError, NoRespondersError where nobody listens, and the
        library's errors."""
        answers: asyncio.Queue[Msg] = asyncio.Queue()
        inbox = self._client.new_inbox()
        headers = {DEADLINE_HEADER: str(round(timeout_seconds * 1000))}
        listening = await self._client.subscribe(inbox, cb=answers.put)
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                await self._client.publish(self._subject, payload, inbox, headers)
                return await self._proven(answers, limit)
        except TimeoutError:
            if self._is_refused and not self.num_unproven:
                raise nats.errors.NoRespondersError from None
            raise
        finally:
            with suppress(nats.errors.Error, OSError):
                await listening.unsubscribe()

    async def _proven(self, answers: asyncio.Queue[Msg], limit: asyncio.Timeout) -> Msg:
        while not self._counts(message := await answers.get()):
            end = asyncio.get_running_loop().time() + REFUSAL_SECONDS
            if self._is_refused and (limit.when() or end) >= end:
                limit.reschedule(end)
        if self._is_refused:
            self._note_unproven()
        return message

    def _counts(self, message: Msg) -> bool:
        headers = message.headers or {}
        is_refusal = not message.data and headers.get(_STATUS) == _NO_RESPONDERS
        if is_refusal and not self._has_proof:
            raise nats.errors.NoRespondersError
        if not self._has_proof or is_proven(self._subject, headers):
            return True
        if is_refusal and not (self._is_refused or self.num_unproven):
            self._is_refused = True
        else:
            self._note_unproven()
        return False

    def _note_unproven(self) -> None:
        if not self.num_unproven:  # once: somebody may send many
            log.warning("an answer on %s is not of the process that was asked", self._subject)
        self.num_unproven += 1


def _received(message: Msg) -> BusMessage:
    return BusMessage(message.subject, message.data, message.headers or {})


def _checked(answer: Answer) -> Answer:
    """Refuses what is no order of `request`.

    The broker checks who publishes, but not where its own answers go: the acknowledgement of an
    event can be sent to the subject of an order. It has no header of ours.
    """

    async def of_order(message: BusMessage) -> bytes:
        if DEADLINE_HEADER not in message.headers:
            raise InvalidRequest(f"an order carries the header {DEADLINE_HEADER}", "headers")
        return await answer(message)

    return of_order
