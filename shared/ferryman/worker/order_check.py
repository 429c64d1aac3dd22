"""Checks every order that reaches a worker: refuses a request that does not match its order.

A worker that computes state also computes its keys. Page keys travel with an order, because router,
prefill and decode all use them; but a worker stores state under keys that it has computed itself
from its own manifest, the tenant's salt and the token ids. Different keys mean that the caller
expects other state than it will get: of another text, tenant or model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ferryman.cache.keys import page_keys, root_key
from ferryman.engine.engine import Engine
from ferryman.errors import InvalidRequest, ManifestMismatch
from ferryman.schedule.batch import Sampled
from ferryman.schedule.request import NO_ADAPTER, Adapter, Request
from ferryman.wire.values import PrefillOrder


class OrderCheck:
    """Checks orders against the model of one engine. Changes nothing."""

    def __init__(self, engine: Engine) -> None:
        self._manifest = engine.manifest
        self._scheduler = engine.scheduler
        self._vocab_size = engine.vocab_size
        self._adapters = {adapter.digest: adapter for adapter in engine.adapters.values()}

    def checked(self, request: Request, tenant_salt: bytes, adapter: str = "") -> Request:
        """The request as this worker may run it, with its tenant's salt and the adapter of the
        digest `adapter`, if it is not empty.

        Raises ManifestMismatch for an adapter that this worker does not have. Raises
        InvalidRequest, naming the field, for impossible lengths, for tokens beyond the vocabulary,
        and for page keys other than those of exactly these tokens.
        """
        self._scheduler.check(request)  # lengths first: they bound the work of the other checks
        self._check_vocabulary(int(request.token_ids.max()), "prompt")
        request.sampling.rules.check_vocabulary(self._vocab_size)
        used = self._adapter(adapter)
        root = root_key(self._manifest, tenant_salt, used.digest)
        keys = page_keys(root, request.token_ids, self._manifest.page_size)
        if keys != request.keys:
            raise InvalidRequest(_how_keys_differ(keys, request.keys), "page_keys")
        return replace(request, keys=keys, tenant_salt=tenant_salt, adapter=used)

    def checked_order(self, order: PrefillOrder) -> PrefillOrder:
        """The order to hand state off, with the request as `checked` returns it. Raises as that
        does, and ManifestMismatch for an order that is about another manifest's state."""
        digest = self._manifest.digest
        if order.manifest_digest != digest:
            raise ManifestMismatch((f"digest: {digest} here, {order.manifest_digest} there",))
        asked = order.context
        request = self.checked(order.request, asked.tenant_salt, asked.adapter)
        return replace(order, request=request)

    def _adapter(self, digest: str) -> Adapter:
        if not digest:
            return NO_ADAPTER
        if digest not in self._adapters:
            here = ", ".join(sorted(self._adapters)) or "none"
            raise ManifestMismatch((f"adapter: {here} here, {digest} there",))
        return self._adapters[digest]

    def check_drawn(self, sampled: Sampled) -> None:
        """Raises InvalidRequest for a token that this model cannot have drawn."""
        self._check_vocabulary(sampled.token_id, "first")

    def _check_vocabulary(self, largest: int, param: str) -> None:
        if largest >= self._vocab_size:
            raise InvalidRequest(
                f"token id {largest} is beyond the vocabulary of {self._vocab_size}", param
            )


def _how_keys_differ(computed: tuple[bytes, ...], sent: tuple[bytes, ...]) -> str:
    if len(computed) != len(sent):
        return f"{len(sent)} page keys came with a prompt of {len(computed)} full pages"
    page = _first_difference(zip(computed, sent, strict=True))
    return f"page key {page} is not that of these tokens, this tenant and this model"


def _first_difference(pairs: Iterable[tuple[bytes, bytes]]) -> int:
    return next(page for page, (mine, theirs) in enumerate(pairs) if mine != theirs)
