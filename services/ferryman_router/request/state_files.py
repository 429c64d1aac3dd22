"""Saves the state of conversations for files, and loads such files: the router's part.

    save    request → its tokens → the host-cache that holds most → verified units → signature
    load    signature → model, arithmetic → tokens → keys under the caller's tenant → host-cache

A file names no tenant and no page key. The tenant who loads it gets the state under its own salt,
so no other one finds that state, and no other one's is replaced.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import numpy as np

from ferryman.cache.keys import TokenIds, as_token_ids, page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.errors import (
    CorruptState,
    InvalidRequest,
    ManifestMismatch,
    NotFound,
    OutOfSlots,
    QueueFull,
    TooLarge,
    Unavailable,
)
from ferryman.security.state_signatures import StateSigner
from ferryman.wire.codec.state_statement import (
    DIGEST_BYTES,
    MAX_STATE_UNITS,
    PIECE_BYTES,
    StateStatement,
    content_digest,
    spans_of,
    statement_from_json,
    statement_to_json,
    tokens_digest,
)
from ferryman.wire.nats.heartbeat import PREFILL, Heartbeat, ServedState
from ferryman.wire.public import LoadedState, SignedState
from ferryman_router.request.context import RouterContext
from ferryman_router.request.request_table import RequestTable
from ferryman_router.request.state_nodes import HeldState, StateNodes, StatePiece, UnitHash
from ferryman_router.routing.generate_request import Tenant
from ferryman_router.routing.recent_prompts import RecentPrompts

MAX_TRANSFERS = 2


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """Token ids, and what else their page keys follow from."""

    salt: bytes
    adapter: str
    token_ids: TokenIds


class StateBytes:
    """The bytes of a file as they come, cut anew."""

    def __init__(self, chunks: AsyncIterator[bytes], num_bytes: int) -> None:
        self._chunks, self._rest, self._left = chunks, b"", num_bytes

    async def pieces(self, num_bytes: int) -> AsyncIterator[bytes]:
        """The next bytes, at most PIECE_BYTES at once. Raises InvalidRequest if there are fewer."""
        while num_bytes:
            while not self._rest:
                self._rest = await self._next()
            size = min(num_bytes, PIECE_BYTES)
            piece, self._rest = self._rest[:size], self._rest[size:]
            num_bytes -= len(piece)
            yield piece

    async def _next(self) -> bytes:
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            text = f"state file: it was cut; {self._left} bytes are missing"
            raise InvalidRequest(text, "data") from None
        self._left -= len(chunk)
        return chunk

    async def drain(self) -> None:
        """Passes over the rest, as far as a file may be long: gRPC loses a status that meets a
        write on its way."""
        while self._left > 0:
            try:
                await self._next()
            except InvalidRequest:
                return


class StateFiles:
    """At most MAX_TRANSFERS files are saved or loaded at once."""

    def __init__(
        self,
        ctx: RouterContext,
        requests: RequestTable,
        recent: RecentPrompts,
        nodes: StateNodes,
        signer: StateSigner,
    ) -> None:
        self._ctx, self._requests, self._recent = ctx, requests, recent
        self._nodes, self._signer = nodes, signer
        self._num_running = 0

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._num_running >= MAX_TRANSFERS:
            raise QueueFull(f"{self._num_running} state files are under way", 1.0)
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    # Saving.

    async def save(self, tenant: Tenant, name: str) -> AsyncGenerator[bytes | SignedState]:
        """The bytes of the state of a request, token ids first, then what is signed about them.

        Raises NotFound, QueueFull, TooLarge, and as `StateNodes.fetch`.
        """
        talk = self._conversation(tenant, name)
        with self._turn():
            held = await self._nodes.deepest(talk.token_ids, talk.salt, talk.adapter)
            if held is None:
                raise NotFound(
                    f"no host-cache holds state that {name} could be resumed from: it takes a whole"
                    " page of tokens, and is stored there a moment after it was computed"
                )
            if len(held.names) > MAX_STATE_UNITS:
                raise TooLarge(f"a file has at most {MAX_STATE_UNITS} units", "request_id")
            raw = talk.token_ids[: held.num_tokens].tobytes()
            for begin in range(0, len(raw), PIECE_BYTES):
                yield raw[begin : begin + PIECE_BYTES]
            digests, unit_bytes = bytearray(), dict[Kind, int]()
            async with aclosing(self._nodes.fetch(held)) as pieces:
                async for piece in pieces:
                    digests += piece.digest
                    unit_bytes[piece.kind] = piece.num_bytes
                    yield piece.data
            yield self._signed(talk, held, unit_bytes, bytes(digests))

    def _conversation(self, tenant: Tenant, name: str) -> SavedPrompt:
        """A request's tokens, with those of the answer if it ended lately, or is under way."""
        runner = self._requests.find_for(tenant, name)
        if runner is not None:
            asked, drawn = runner.asked, as_token_ids(runner.drawn_token_ids)
            token_ids = np.concatenate([asked.token_ids, drawn])
            return SavedPrompt(asked.key_salt, asked.adapter, as_token_ids(token_ids))
        kept = self._recent.of(tenant.name, self._requests.id_of(tenant, name))
        if kept is not None:
            return SavedPrompt(kept.salt, kept.adapter, kept.prompt.token_ids)
        raise NotFound(f"no late request of yours is {name}: send it again, then save it")

    def _signed(
        self,
        talk: SavedPrompt,
        held: HeldState,
        unit_bytes: Mapping[Kind, int],
        digests: bytes,
    ) -> SignedState:
        state, model = held.cache.state, self._ctx.model
        text = statement_to_json(
            StateStatement(
                model=model.name_of(talk.adapter),
                family=model.family,
                dtype=model.dtype,
                fingerprint=state.fingerprint,
                page_size=state.page_size,
                window_len=state.window_len,
                digest=state.digest,
                arithmetic=state.arithmetic,
                adapter=talk.adapter,
                num_tokens=held.num_tokens,
                pages=spans_of(held.names, state.kinds),
                unit_bytes=dict(sorted(unit_bytes.items())),
                tokens_digest=tokens_digest(talk.token_ids[: held.num_tokens]),
                units_digest=content_digest(digests).hex(),
                signer=self._signer.public_key,
            )
        )
        return SignedState(text, self._signer.sign(text), digests)

    # Loading.

    def accepted(self, signed: SignedState) -> StateStatement:
        """The statement of a file that can be loaded here.

        Raises InvalidRequest, PermissionDenied, CorruptState, ManifestMismatch, and Unavailable
        without a worker or a host-cache.
        """
        statement = statement_from_json(signed.statement)
        self._signer.check(statement.signer, signed.signature, signed.statement)
        if content_digest(signed.unit_digests).hex() != statement.units_digest or (
            len(signed.unit_digests) != DIGEST_BYTES * statement.num_units
        ):
            raise CorruptState("state file: the digests of its units are not those signed")
        state = self._ctx.fleet.state()
        if state is None:
            raise Unavailable("no worker is known yet, so nobody knows which state is served")
        check_loads(statement, state)
        if statement.adapter and statement.adapter not in self._ctx.model.adapters.values():
            raise ManifestMismatch((f"adapter: {statement.adapter} is not served here",))
        self._taker(state)
        return statement

    async def load(
        self, tenant: Tenant, signed: SignedState, statement: StateStatement, content: StateBytes
    ) -> LoadedState:
        """Gives the state of an accepted file to a host-cache, under the tenant's salt.

        Raises InvalidRequest for a file that is cut, CorruptState, QueueFull, OutOfSlots, and what
        the host-cache raises. Nothing is there then.
        """
        with self._turn():
            state = self._ctx.fleet.state()
            cache = self._taker(state) if state is not None else None
            if cache is None:
                raise Unavailable("the last worker left while the file came")
            raw = b"".join([piece async for piece in content.pieces(4 * statement.num_tokens)])
            token_ids = as_token_ids(np.frombuffer(raw, "<u4"))
            if tokens_digest(token_ids) != statement.tokens_digest:
                raise CorruptState("state file: its token ids are not those signed")
            root = root_key(cache.state, tenant.salt, statement.adapter)
            keys = page_keys(root, token_ids, statement.page_size)
            names = tuple(statement.names)
            async with aclosing(_verified(signed, statement, content)) as pieces:
                answer = await self._nodes.deposit(cache, keys, names, pieces)
            if not answer.usable_pages:
                raise OutOfSlots(
                    f"the host-cache of {cache.node} has no room for {statement.num_bytes} bytes;"
                    " give it more by FERRYMAN_HOST_MEMORY"
                )
            usable_tokens = answer.usable_pages * statement.page_size
            return LoadedState(cache.node, statement.num_tokens, usable_tokens, answer.stored_units)

    def _taker(self, state: ServedState) -> Heartbeat:
        """The host-cache that gets the state: that of a prefill worker, or any other one."""
        caches = self._ctx.fleet.host_caches()
        near = [w.beat.node for w in self._ctx.fleet.usable(PREFILL, self._ctx.clock())]
        for node in (*near, *sorted(caches)):
            if node in caches and caches[node].state.digest == state.digest:
                return caches[node]
        raise Unavailable("no host-cache with this model's state is known")


def check_loads(statement: StateStatement, state: ServedState) -> None:
    """Raises ManifestMismatch, with a line for each difference, unless a worker that keeps `state`
    can resume from the file's."""
    ours = {
        "fingerprint of the weights": (state.fingerprint, statement.fingerprint),
        "page size": (state.page_size, statement.page_size),
        "window": (state.window_len, statement.window_len),
        "kinds of state": (" ".join(sorted(state.kinds)), " ".join(statement.pages)),
        "arithmetic": (state.arithmetic, statement.arithmetic),
    }
    lines = [f"{what}: {a} here, {b} in the file" for what, (a, b) in ours.items() if a != b]
    if not lines and state.digest != statement.digest:
        lines = [f"layout: {state.digest} here, {statement.digest} in the file"]
    if lines:
        raise ManifestMismatch(tuple(lines))


async def _verified(
    signed: SignedState, statement: StateStatement, content: StateBytes
) -> AsyncGenerator[StatePiece]:
    """The units of a file in order. The last piece of each comes after its digest was compared, so
    no unit that differs is ever whole elsewhere. Raises CorruptState."""
    for index, (kind, page) in enumerate(statement.names):
        unit = UnitHash(statement.unit_bytes[kind])
        wanted = signed.unit_digests[index * DIGEST_BYTES :][:DIGEST_BYTES]
        async for data in content.pieces(unit.num_bytes):
            piece = await unit.add(kind, data)
            if piece.digest and piece.digest != wanted:
                raise CorruptState(f"state file: {kind} unit of page {page} is not what was signed")
            yield piece
