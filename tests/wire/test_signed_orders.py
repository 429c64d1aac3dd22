"""The orders of routers: workers obey exactly what was signed, for them, in this life.

A table says for each field of an order whether it is signed; a field that it does not know fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from tests.cluster_keys import KEY, STRANGERS_KEY
from tests.wire import strategies

from ferryman.cache.keys import as_token_ids
from ferryman.errors import PermissionDenied
from ferryman.ids import NO_REQUEST
from ferryman.schedule.output_grammar import GrammarKind, OutputGrammar
from ferryman.schedule.request import Pin, Request, SamplingParams
from ferryman.schedule.token_rules import TokenRules
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.tiers.values import WorkerLife
from ferryman.wire.codec.handoff import reserve_order_from_wire, reserve_order_to_wire
from ferryman.wire.codec.prefill import prefill_order_from_wire, prefill_order_to_wire
from ferryman.wire.grpc.role_tokens import OPEN_TO_ALL, GrpcAccess
from ferryman.wire.signed_orders import RouterSignatures, SignatureCheck
from ferryman.wire.values import (
    AttemptSignature,
    PrefillOrder,
    RequestContext,
    ReserveOrder,
    RouterAbort,
    WorkerAddress,
)

SIGNING = GrpcAccess(credentials_of(KEY, ClusterRole.ROUTER))
DECODE = WorkerAddress("decode-0000000000000001", "host:1", 7)
PREFILL = WorkerAddress("prefill-0000000000000002", "host:2", 8)
LIFE = WorkerLife(DECODE.worker_id, DECODE.epoch)


def check_of(life: WorkerLife = LIFE) -> SignatureCheck:
    credentials = credentials_of(KEY, ClusterRole.DECODE)
    return SignatureCheck(GrpcAccess(credentials), life.worker_id, life.epoch)


def signatures() -> RouterSignatures:
    return RouterSignatures(SIGNING)


def order() -> PrefillOrder:
    grammar = OutputGrammar(GrammarKind.REGEX, "a+")
    sampling = SamplingParams(temperature=1, stop=("x",), stop_token_ids=(2,), grammar=grammar)
    rules = TokenRules(logit_bias=((3, 1.5),))
    request = Request(
        "r1",
        as_token_ids([5, 6, 7, 8]),
        (b"k" * 16,),
        replace(sampling, rules=rules),
        frozenset({2, 3}),
        num_generated=1,
        num_siblings=1,
        fork_points=(2,),
        pins=(Pin(1, 300),),
    )
    context = RequestContext("r1", 2, 30.0, 1.0, "trace", b"salt", "ab" * 16, "router-0")
    return PrefillOrder(context, PREFILL.epoch, DECODE, "router-1", request, "digest")


def as_writer(signed: PrefillOrder) -> ReserveOrder:
    """The wish of the worker that was ordered, for a prompt."""
    return ReserveOrder(
        context=signed.context,
        worker_epoch=signed.decode.epoch,
        writer=PREFILL,
        router_id=signed.router_id,
        request=signed.request,
        manifest_digest=signed.manifest_digest,
        manifest_json="",
        signature=signed.signature,
    )


def as_leaving(signed: PrefillOrder) -> ReserveOrder:
    """The wish of a decode worker that keeps the state: the last token is not consumed."""
    wish, tokens = as_writer(signed), signed.request.token_ids
    request = replace(
        signed.request, token_ids=tokens[:-1], num_generated=signed.request.num_generated - 1
    )
    return replace(wish, request=request, drawn_token_id=int(tokens[-1]))


def signed_wish() -> ReserveOrder:
    return as_writer(signatures().attempt(order(), PREFILL, is_move=False))


def refuses(wish: ReserveOrder, check: SignatureCheck | None = None) -> bool:
    try:
        (check or check_of()).check_reserve(wish, DECODE.address)
    except PermissionDenied:
        return True
    return False


# Each place of a signed wish, changed by as little as can be.
Change = Callable[[Any], Any]
UNSIGNED: Change = lambda value: value  # noqa: E731
APPENDED: Change = lambda value: (*value, value[-1]) if value else (1,)  # noqa: E731
NEXT: Change = lambda value: value + 1  # noqa: E731
LONGER: Change = lambda value: value + "x"  # noqa: E731


def a_bit_of(value: bytes) -> bytes:
    return bytes([value[0] ^ 1]) + value[1:]


SAMPLING: Mapping[str, Change] = {
    "max_tokens": NEXT,
    "temperature": lambda value: value + 1e-9,
    "top_p": lambda value: value - 1e-9,
    "top_k": NEXT,
    "min_p": lambda value: value + 1e-9,
    "repetition_penalty": lambda value: value + 1e-9,
    "presence_penalty": lambda value: value + 1e-9,
    "frequency_penalty": lambda value: value - 1e-9,
    "seed": NEXT,
    "stop": lambda value: (*value, "y"),
    "stop_token_ids": lambda value: (*value, 9),
    "logprobs": NEXT,
    "ignore_eos": lambda value: not value,
    "grammar": lambda value: replace(value, text=value.text + "b"),
    "rules": lambda value: replace(value, logit_bias=((3, 1.25),)),
    "prompt_logprobs": lambda _: 0,
}
REQUEST: Mapping[str, Change] = {
    # In the context of a wish, or computed from what is there.
    **dict.fromkeys(("request_id", "keys", "tenant_salt", "adapter"), UNSIGNED),
    "token_ids": lambda value: value ^ as_token_ids([0, 0, 0, 1]),
    "sampling": UNSIGNED,  # each of its own fields below
    "stop_token_ids": lambda value: value | {9},
    "num_generated": NEXT,
    "num_siblings": NEXT,
    "fork_points": APPENDED,
    "pins": lambda value: (value[0]._replace(seconds=299),),
}
CONTEXT: Mapping[str, Change] = {
    # Time left has a bound of its own; the others are for people.
    **dict.fromkeys(("deadline_seconds", "age_seconds", "traceparent"), UNSIGNED),
    "request_id": LONGER,
    "attempt": NEXT,
    "tenant_salt": a_bit_of,
    "adapter": lambda value: "b" + value[1:],
    "taken_from": LONGER,
}
WISH: Mapping[str, Change] = {
    # Each of their own fields is in a table of its own, or they are about the writer's planes.
    **dict.fromkeys(("context", "request", "manifest_json", "offer"), UNSIGNED),
    "worker_epoch": UNSIGNED,  # compared with the worker's own
    "writer": lambda value: replace(value, worker_id=value.worker_id[:-1] + "3"),
    "router_id": LONGER,
    "manifest_digest": LONGER,
    "signature": lambda value: replace(value, value=a_bit_of(value.value)),
    "drawn_token_id": lambda _: 8,
}
SIGNATURE: Mapping[str, Change] = {"serial": NEXT, "lifetime_ms": NEXT, "value": a_bit_of}
WRITER: Mapping[str, Change] = {"worker_id": LONGER, "address": LONGER, "epoch": NEXT}


@dataclass(frozen=True)
class WishPlace:
    """A field of a wish, or of a value within it."""

    table: Mapping[str, Change]
    within: tuple[str, ...] = ()

    def value(self, wish: ReserveOrder) -> Any:
        value: Any = wish
        for name in self.within:
            value = getattr(value, name)
        return value

    def changed(self, wish: ReserveOrder, name: str) -> ReserveOrder:
        value = self.value(wish)
        value = replace(value, **{name: self.table[name](getattr(value, name))})
        for depth in range(len(self.within) - 1, -1, -1):
            outer = WishPlace({}, self.within[:depth]).value(wish)
            value = replace(outer, **{self.within[depth]: value})
        assert isinstance(value, ReserveOrder)
        return value


PLACES = {
    "wish": WishPlace(WISH),
    "context": WishPlace(CONTEXT, ("context",)),
    "request": WishPlace(REQUEST, ("request",)),
    "sampling": WishPlace(SAMPLING, ("request", "sampling")),
    "signature": WishPlace(SIGNATURE, ("signature",)),
    "writer": WishPlace(WRITER, ("writer",)),
}
FIELDS = [
    pytest.param(place, name, id=f"{where}.{name}")
    for where, place in PLACES.items()
    for name in place.table
    if place.table[name] is not UNSIGNED
]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_each_field_is_said_to_be_signed_or_not(place: WishPlace) -> None:
    assert {each.name for each in fields(place.value(signed_wish()))} == set(place.table)


def test_what_was_signed_is_obeyed() -> None:
    check_of().check_reserve(signed_wish(), DECODE.address)


@pytest.mark.parametrize(("place", "name"), FIELDS)
def test_a_field_that_was_changed_on_the_way_is_refused(place: WishPlace, name: str) -> None:
    wish = signed_wish()
    if name == "ignore_eos":  # not with a grammar
        free = replace(order().request.sampling, grammar=None)
        changed_order = replace(order(), request=replace(order().request, sampling=free))
        wish = as_writer(signatures().attempt(changed_order, PREFILL, is_move=False))
    assert not refuses(wish)
    assert refuses(place.changed(wish, name))


@pytest.mark.parametrize(
    "life", [WorkerLife("decode-0000000000000009", 7), WorkerLife(DECODE.worker_id, 9)]
)
def test_it_is_of_no_use_at_another_worker_or_in_another_life(life: WorkerLife) -> None:
    assert refuses(signed_wish(), check_of(life))


@pytest.mark.parametrize("seconds", [29.0, 30.0])
def test_a_writer_says_how_much_of_the_time_is_left(seconds: float) -> None:
    wish = signed_wish()
    left = replace(wish.context, deadline_seconds=seconds)
    check_of().check_reserve(replace(wish, context=left), DECODE.address)


def test_a_writer_gives_no_longer_time_than_its_router() -> None:
    wish = signed_wish()
    longer = replace(wish.context, deadline_seconds=30.1)
    with pytest.raises(
        PermissionDenied, match="30100 ms are said to be left; the router signed for 30000"
    ):
        check_of().check_reserve(replace(wish, context=longer), DECODE.address)


def test_a_request_that_moves_has_the_last_token_that_was_signed() -> None:
    wish = as_leaving(signatures().attempt(order(), PREFILL, is_move=True))
    check_of().check_reserve(wish, DECODE.address)
    assert refuses(replace(wish, drawn_token_id=9))
    assert refuses(replace(wish, drawn_token_id=None))


def test_a_prompt_is_not_moved_and_a_request_that_moves_is_no_prompt() -> None:
    assert refuses(as_leaving(signatures().attempt(order(), PREFILL, is_move=False)))
    assert refuses(as_writer(signatures().attempt(order(), PREFILL, is_move=True)))


def test_writers_obey_what_was_signed_for_them_alone() -> None:
    signed = signatures().attempt(order(), PREFILL, is_move=False)
    check_of().check_prefill(signed, PREFILL)
    for other in (replace(PREFILL, epoch=9), replace(PREFILL, address="host:3")):
        with pytest.raises(PermissionDenied):
            check_of().check_prefill(signed, other)
    with pytest.raises(PermissionDenied):
        check_of().check_move(signed, PREFILL)
    check_of().check_move(signatures().attempt(order(), PREFILL, is_move=True), PREFILL)


def test_a_state_goes_to_the_address_that_was_signed() -> None:
    signed = signatures().attempt(order(), PREFILL, is_move=False)
    elsewhere = replace(signed, decode=replace(DECODE, address="host:3"))
    with pytest.raises(PermissionDenied):
        check_of().check_prefill(elsewhere, PREFILL)
    with pytest.raises(PermissionDenied):
        check_of().check_reserve(as_writer(signed), "host:3")


@pytest.mark.parametrize("is_move", [False, True])
def test_an_order_says_how_much_of_its_time_is_left(is_move: bool) -> None:
    signed = signatures().attempt(order(), PREFILL, is_move=is_move)
    longer = replace(signed, context=replace(signed.context, deadline_seconds=30.1))
    check = check_of().check_move if is_move else check_of().check_prefill
    with pytest.raises(PermissionDenied, match="the router signed for 30000"):
        check(longer, PREFILL)


@pytest.mark.parametrize(
    "access",
    [
        OPEN_TO_ALL,
        GrpcAccess(credentials_of(STRANGERS_KEY, ClusterRole.ROUTER)),
        *(GrpcAccess(credentials_of(KEY, role)) for role in ClusterRole if role != "router"),
    ],
)
def test_nobody_but_a_router_signs(access: GrpcAccess) -> None:
    by = RouterSignatures(access)
    assert refuses(as_writer(by.attempt(order(), PREFILL, is_move=False)))
    with pytest.raises(PermissionDenied):
        check_of().check_abort(by.abort(RouterAbort("r1", 1, "why", "router-1"), LIFE))
    with pytest.raises(PermissionDenied):
        check_of().check_detach("r1", 1, "router-1", by.detach("r1", 1, "router-1", LIFE))
    with pytest.raises(PermissionDenied):
        check_of().check_tokens("router-1", by.tokens("router-1", LIFE))


def test_an_open_cluster_believes_all() -> None:
    check = SignatureCheck(OPEN_TO_ALL, DECODE.worker_id, DECODE.epoch)
    check.check_reserve(as_writer(order()), DECODE.address)
    check.check_abort(RouterAbort("r1", 1, "why", "router-1"))
    check.check_detach("r1", 1, "router-1", b"")
    check.check_tokens("router-1", b"")


ABORT = RouterAbort("r1", 2, "client_gone", "router-1")
OTHER_ABORTS = [
    replace(ABORT, request_id="r2"),
    replace(ABORT, attempt=3),
    replace(ABORT, cause="taken_over"),
    replace(ABORT, router_id="router-2"),
]


def test_aborts_detaches_and_streams_are_what_was_signed_for_this_life() -> None:
    by, check = signatures(), check_of()
    abort = by.abort(ABORT, LIFE)
    check.check_abort(abort)
    for other in OTHER_ABORTS:
        with pytest.raises(PermissionDenied):
            check.check_abort(replace(other, signature=abort.signature))
    detach, tokens = by.detach("r1", 2, "router-1", LIFE), by.tokens("router-1", LIFE)
    check.check_detach("r1", 2, "router-1", detach)
    check.check_tokens("router-1", tokens)
    for named in (("r2", 2, "router-1"), ("r1", 3, "router-1"), ("r1", 2, "router-2")):
        with pytest.raises(PermissionDenied):
            check.check_detach(*named, detach)
    with pytest.raises(PermissionDenied):
        check.check_tokens("router-2", tokens)
    for life in (WorkerLife(DECODE.worker_id, 9), WorkerLife("decode-0000000000000009", 7)):
        elsewhere = check_of(life)
        with pytest.raises(PermissionDenied):
            elsewhere.check_abort(abort)
        with pytest.raises(PermissionDenied):
            elsewhere.check_detach("r1", 2, "router-1", detach)
        with pytest.raises(PermissionDenied):
            elsewhere.check_tokens("router-1", tokens)


def test_a_signature_for_one_thing_is_none_for_another() -> None:
    by, check = signatures(), check_of()
    with pytest.raises(PermissionDenied):
        check.check_detach("r1", 2, "router-1", by.abort(ABORT, LIFE).signature)
    with pytest.raises(PermissionDenied):
        check.check_tokens("router-1", by.detach(NO_REQUEST, 0, "router-1", LIFE))


def test_each_attempt_has_a_number_of_its_own() -> None:
    by = signatures()
    numbers = [by.attempt(order(), PREFILL, is_move=False).signature.serial for _ in range(3)]
    assert numbers == [1, 2, 3]


@given(asked=strategies.prefill_orders())
def test_every_order_is_the_same_after_its_way_over_two_workers(asked: PrefillOrder) -> None:
    signed = signatures().attempt(replace(asked, decode=DECODE), PREFILL, is_move=False)
    there = prefill_order_from_wire(prefill_order_to_wire(signed))
    check_of().check_prefill(there, PREFILL)
    wish = reserve_order_from_wire(reserve_order_to_wire(as_writer(there)))
    check_of().check_reserve(wish, DECODE.address)
    assert refuses(replace(wish, signature=AttemptSignature()))
    assert np.array_equal(wish.request.token_ids, asked.request.token_ids)
