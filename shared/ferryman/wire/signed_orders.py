"""The orders of routers to workers, as routers sign them and workers check them.

A router signs each attempt: what is computed, who computes it, who goes on with it, and for how
long. The worker that computes shows that signature to the one that goes on, which takes nothing
about the attempt from the writer alone. So the credentials of a worker's role let nobody begin,
replace or end an attempt that no router has given to that very worker.

Where a cluster has no credentials, nothing is signed and all is believed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np

from ferryman.cache.keys import as_token_ids
from ferryman.errors import PermissionDenied
from ferryman.schedule.request import Request
from ferryman.security.order_signatures import OrderSigner, OrderVerifier, statement
from ferryman.tiers.values import WorkerLife
from ferryman.wire.codec.request import MAX_PIN_SECONDS
from ferryman.wire.codec.scalars import milliseconds, token_ids_to_bytes
from ferryman.wire.grpc.role_tokens import GrpcAccess, refuse_call
from ferryman.wire.values import (
    NOT_SIGNED,
    AttemptSignature,
    PrefillOrder,
    RequestContext,
    ReserveOrder,
    RouterAbort,
    WorkerAddress,
)

_TOKENS_BYTES = 32
_KEYS_BYTES = 32
PREFILL, MOVE, ABORT, DETACH, TOKENS = "prefill", "move", "abort", "detach", "tokens"
PROBE, UNITS = "probe", "units"
LOOKUP, FETCH, DEPOSIT = "look up", "fetch", "deposit"
ROLL = "update and restart the routers, too, if they are older than this worker"


# These values are signed. Any other is nobody's word: time left and passed, the trace, pages that
# other workers keep in another arithmetic. Page keys follow from tokens, salt and model.


def attempt_statement(
    order: PrefillOrder, writer: WorkerAddress, *, is_move: bool, serial: int, lifetime_ms: int
) -> bytes:
    """An attempt whose state `writer` hands off; of a request that moves, all but the last token
    are handed off."""
    return statement(
        MOVE if is_move else PREFILL,
        (serial, lifetime_ms),
        order.router_id,
        writer,
        order.decode,
        order.manifest_digest,
        *_of_context(order.context),
        *_of_request(order.request),
    )


def _of_context(context: RequestContext) -> tuple[object, ...]:
    who = context.request_id, context.attempt, context.taken_from
    return *who, context.tenant_salt, context.adapter


def _of_request(request: Request) -> tuple[object, ...]:
    token_ids = token_ids_to_bytes(request.token_ids)
    pins = tuple((pin.position, min(pin.seconds, MAX_PIN_SECONDS)) for pin in request.pins)
    return (
        hashlib.blake2b(token_ids, digest_size=_TOKENS_BYTES).digest(),
        request.num_generated,
        request.num_siblings,
        request.sampling,
        request.stop_token_ids,
        request.fork_points,
        pins,
    )


def abort_statement(order: RouterAbort, to: WorkerLife) -> bytes:
    """The end of an attempt and of all before it."""
    return statement(ABORT, to, order.router_id, order.request_id, order.attempt, order.cause)


def detach_statement(request_id: str, attempt: int, router_id: str, to: WorkerLife) -> bytes:
    """A request is to stand still, and goes on elsewhere."""
    return statement(DETACH, to, router_id, request_id, attempt)


def tokens_statement(router_id: str, to: WorkerLife) -> bytes:
    """A router reads its requests' tokens."""
    return statement(TOKENS, to, router_id)


def probe_statement(address: str, worker_id: str) -> bytes:
    """A worker moves some bytes to the peer at `address` and back. A repetition does no harm, so it
    may be of any life of the worker."""
    return statement(PROBE, address, worker_id)


def units_statement(call: str, page_keys: bytes, to: WorkerLife) -> bytes:
    """A router reads units of a chain from a host-cache, or gives it some: `call` says which."""
    digest = hashlib.blake2b(page_keys, digest_size=_KEYS_BYTES).digest()
    return statement(UNITS, to, call, digest)


class RouterSignatures:
    """A router's signatures of its orders; none in an open cluster."""

    def __init__(self, access: GrpcAccess) -> None:
        seed = access.credentials.signing_seed if access.credentials else ""
        self._signer = OrderSigner(seed) if seed else None
        self._serials = count(1)

    def attempt(self, order: PrefillOrder, writer: WorkerAddress, *, is_move: bool) -> PrefillOrder:
        """The order to `writer`, signed; with `is_move` to a worker that keeps the state."""
        if self._signer is None:
            return order
        serial, lifetime_ms = next(self._serials), milliseconds(order.context.deadline_seconds)
        signed = attempt_statement(
            order, writer, is_move=is_move, serial=serial, lifetime_ms=lifetime_ms
        )
        signature = AttemptSignature(serial, lifetime_ms, self._signer.sign(signed))
        return replace(order, signature=signature)

    def abort(self, order: RouterAbort, to: WorkerLife) -> RouterAbort:
        """The abort, signed for one worker."""
        return replace(order, signature=self._sign(abort_statement(order, to)))

    def detach(self, request_id: str, attempt: int, router_id: str, to: WorkerLife) -> bytes:
        return self._sign(detach_statement(request_id, attempt, router_id, to))

    def tokens(self, router_id: str, to: WorkerLife) -> bytes:
        return self._sign(tokens_statement(router_id, to))

    def probe(self, address: str, worker_id: str) -> bytes:
        return self._sign(probe_statement(address, worker_id))

    def units(self, call: str, page_keys: bytes, to: WorkerLife) -> bytes:
        return self._sign(units_statement(call, page_keys, to))

    def _sign(self, signed: bytes) -> bytes:
        return self._signer.sign(signed) if self._signer is not None else NOT_SIGNED.value


class SignatureCheck:
    """A worker's check of routers' orders, each of which raises PermissionDenied, and is counted as
    a refused call, unless a router of this cluster signed exactly this order for this worker in
    this life. In an open cluster all are believed."""

    def __init__(self, access: GrpcAccess, worker_id: str, epoch: int) -> None:
        keys = access.credentials.order_keys if access.credentials else None
        self._verifier = OrderVerifier(keys) if keys is not None else None
        self._me = WorkerLife(worker_id, epoch)

    def check_prefill(self, order: PrefillOrder, me: WorkerAddress) -> None:
        """The order to compute a prompt and hand it off; `me` is this worker as a writer."""
        self._check_attempt(order, me, is_move=False)

    def check_move(self, order: PrefillOrder, me: WorkerAddress) -> None:
        """The order to hand off a request that decodes here."""
        self._check_attempt(order, me, is_move=True)

    def check_reserve(self, order: ReserveOrder, address: str) -> None:
        """A writer's wish for slots: the router ordered that writer to hand off to this worker, at
        this address of its."""
        me = WorkerAddress(self._me.worker_id, address, self._me.epoch)
        is_move = order.drawn_token_id is not None
        self._check_attempt(_as_ordered(order, me), order.writer, is_move=is_move)

    def _check_attempt(self, order: PrefillOrder, writer: WorkerAddress, *, is_move: bool) -> None:
        """Also, the attempt has no longer to live than its router said."""
        if self._verifier is None:
            return
        signature = order.signature
        self._check(
            signature.value,
            lambda: attempt_statement(
                order,
                writer,
                is_move=is_move,
                serial=signature.serial,
                lifetime_ms=signature.lifetime_ms,
            ),
            f"attempt {order.context.attempt} of {order.context.request_id}",
        )
        left_ms, given_ms = milliseconds(order.context.deadline_seconds), signature.lifetime_ms
        if left_ms > given_ms:
            text = f"{left_ms} ms are said to be left; the router signed for {given_ms}"
            refuse_call(PermissionDenied(text))

    def check_abort(self, order: RouterAbort) -> None:
        self._check(
            order.signature, lambda: abort_statement(order, self._me), f"end {order.request_id}"
        )

    def check_detach(self, request_id: str, attempt: int, router_id: str, signature: bytes) -> None:
        self._check(
            signature,
            lambda: detach_statement(request_id, attempt, router_id, self._me),
            f"detach {request_id}",
        )

    def check_tokens(self, router_id: str, signature: bytes) -> None:
        self._check(
            signature, lambda: tokens_statement(router_id, self._me), f"tokens of {router_id}"
        )

    def check_probe(self, address: str, signature: bytes) -> None:
        self._check(
            signature, lambda: probe_statement(address, self._me.worker_id), f"probe of {address}"
        )

    def check_units(self, call: str, page_keys: bytes, signature: bytes) -> None:
        """At a host-cache: a router's call about units."""
        self._check(signature, lambda: units_statement(call, page_keys, self._me), f"{call} units")

    def _check(self, signature: bytes, signed: Callable[[], bytes], what: str) -> None:
        if self._verifier is None or self._verifier.verifies(signature, signed()):
            return
        refuse_call(
            PermissionDenied(
                f"{what}: no router of this cluster signed this for this worker; {ROLL}"
            )
        )


def _as_ordered(order: ReserveOrder, me: WorkerAddress) -> PrefillOrder:
    """The router's order to the writer, as far as it is signed."""
    request = order.request
    if order.drawn_token_id is not None:
        token_ids = np.append(request.token_ids, as_token_ids([order.drawn_token_id]))
        num_generated = request.num_generated + 1
        request = replace(request, token_ids=token_ids, num_generated=num_generated)
    return PrefillOrder(
        context=order.context,
        worker_epoch=order.writer.epoch,
        decode=me,
        router_id=order.router_id,
        request=request,
        manifest_digest=order.manifest_digest,
        signature=order.signature,
    )
