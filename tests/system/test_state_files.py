"""A conversation saved at one cluster and loaded at another one: a native hybrid with full, window
and recurrent layers, exact in float64.

The other cluster asks for API keys, so that state which one tenant loads is looked for by another.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.cluster_keys import KEY, STRANGERS_KEY, token_of
from tests.harness.cluster import (
    Cluster,
    ClusterShape,
    Generated,
    assert_same,
    generate,
    one_process,
    running_cluster,
    save_words,
)
from tests.native import native_config, save_native
from tests.waiting import LOOK_SECONDS, wait_until

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.client import Client
from ferryman.errors import (
    Cancelled,
    CorruptState,
    FerrymanError,
    InvalidRequest,
    ManifestMismatch,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.state_signatures import StateSigner
from ferryman.tiers.values import WorkerLife
from ferryman.wire.codec.state_statement import statement_from_json, statement_to_json
from ferryman.wire.grpc.role_tokens import GrpcAccess
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.public import SignedState
from ferryman.wire.signed_orders import RouterSignatures
from ferryman.wire.v1.hostcache_pb2 import (
    DepositOrder,
    DepositRequest,
    FetchRequest,
    LookupRequest,
)
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub
from ferryman_cli.app import run
from ferryman_cli.state.state_file import opened_state_file

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=5, ignore_eos=True)
PROMPT = [(29 * i + 7) % 90 + 3 for i in range(90)]
TURN = [(31 * i + 5) % 90 + 3 for i in range(9)]
PAGES = len(PROMPT) // 16
MINE, THEIRS = "key-of-alpha", "key-of-beta"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_native(tmp_path_factory.mktemp("model"), native_config())
    save_words(folder, native_config()["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[LLM]:
    with one_process(model) as llm:
        yield llm


async def ask(cluster: Cluster, prompt: Sequence[int], name: str = "", key: str = "") -> Generated:
    async with Client(cluster.grpc, api_key=key) as client:
        return await generate(client, prompt, GREEDY, request_id=name)


@pytest.fixture(scope="module")
def kite(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a conversation; the cluster that computed it has ended."""
    path = tmp_path_factory.mktemp("files") / "kite.fst"
    shape = ClusterShape(has_storage=True)
    with running_cluster(model, tmp_path_factory.mktemp("first"), shape) as cluster:
        asyncio.run(ask(cluster, PROMPT, "kite"))
        asyncio.run(cluster.await_stored(PROMPT))
        asyncio.run(_await_savable(cluster))
        assert run(["state", "save", "kite", str(path), "--grpc", cluster.grpc]) == 0
        # The name is taken now; another one does not know the request; fifteen tokens are no page.
        assert run(["state", "save", "kite", str(path), "--grpc", cluster.grpc]) == 2
        asyncio.run(_saves_nothing_else(cluster))
        asyncio.run(_leaves_the_arena(cluster))
        stored = path.with_name("stored.fst")
        assert run(["state", "save", "kite", str(stored), "--grpc", cluster.grpc]) == 0
        cluster.assert_ledgers_balance()
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["kite.fst", "stored.fst"]
    return path


async def _await_savable(cluster: Cluster) -> None:
    """Until the router has heard of the host-cache."""
    async with Client(cluster.grpc) as client, asyncio.timeout(120):
        while True:
            try:
                async for _ in client.save_state("kite"):
                    pass
                return
            except Unavailable:
                await asyncio.sleep(LOOK_SECONDS)


async def _leaves_the_arena(cluster: Cluster) -> None:
    """From now on the state is in storage alone."""
    await cluster.await_stored(PROMPT, tier=Tier.STORAGE)
    await cluster.flush_host(PROMPT)


async def _saves_nothing_else(cluster: Cluster) -> None:
    await ask(cluster, PROMPT[:3], "short")
    async with Client(cluster.grpc) as client:
        for name in ("short", "unknown"):
            with pytest.raises(NotFound):
                await anext(client.save_state(name))


@pytest.fixture(scope="module")
def other(kite: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that has computed nothing."""
    shape = ClusterShape(settings={"router": {"api_keys": f"{MINE},{THEIRS}"}})
    with running_cluster(model, tmp_path_factory.mktemp("other"), shape) as cluster:
        cluster.await_attached()
        yield cluster


def load(cluster: Cluster, path: Path, key: str = MINE) -> int:
    return run(["state", "load", str(path), "--grpc", cluster.grpc, "--api-key", key])


def held_by(path: Path) -> tuple[SignedState, list[bytes]]:
    with opened_state_file(path) as file:
        return file.signed, list(file.pieces())


def signed_anew(signed: SignedState, key: Any = KEY, **changed: Any) -> SignedState:
    """Another statement about the same bytes, signed by the holder of a cluster's key."""
    signer = StateSigner(key)
    statement = replace(statement_from_json(signed.statement), signer=signer.public_key, **changed)
    text = statement_to_json(statement)
    return SignedState(text, signer.sign(text), signed.unit_digests)


async def sent(cluster: Cluster, signed: SignedState, content: list[bytes]) -> None:
    async with Client(cluster.grpc, api_key=MINE) as client:
        await client.load_state(signed, content)


async def refusal(cluster: Cluster, signed: SignedState, content: list[bytes]) -> FerrymanError:
    """The error of a load, of which the host-cache keeps nothing."""
    before = await cluster.hostcache_stats()
    error = await _refused(cluster, signed, content)
    async with asyncio.timeout(120):
        while isinstance(error, Unavailable):  # the router has not heard of the host-cache yet
            await asyncio.sleep(LOOK_SECONDS)
            error = await _refused(cluster, signed, content)
    # The router answers when it ends its call; the host-cache hears of that a moment later.
    async with asyncio.timeout(120):
        while (after := await cluster.hostcache_stats()).reservations:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
    assert after.stored == before.stored
    return error


async def _refused(cluster: Cluster, signed: SignedState, content: list[bytes]) -> FerrymanError:
    with pytest.raises(FerrymanError) as caught:
        await sent(cluster, signed, content)
    return caught.value


# The order matters: these come before the state is loaded.


def test_what_is_not_signed_by_a_believed_cluster_is_refused(other: Cluster, kite: Path) -> None:
    signed, content = held_by(kite)
    foreign = signed_anew(signed, STRANGERS_KEY)
    error = asyncio.run(refusal(other, foreign, content))
    assert isinstance(error, PermissionDenied)
    assert "STATE_SIGNERS" in str(error)
    edited = replace(signed, statement=signed.statement.replace('"tiny"', '"tidy"'))
    assert isinstance(asyncio.run(refusal(other, edited, content)), PermissionDenied)


@pytest.mark.parametrize("field", ["fingerprint", "arithmetic", "digest"])
def test_state_of_another_model_or_arithmetic_is_refused_by_name(
    other: Cluster, kite: Path, field: str
) -> None:
    signed, content = held_by(kite)
    error = asyncio.run(refusal(other, signed_anew(signed, **{field: "another"}), content))
    assert isinstance(error, ManifestMismatch)
    assert "another in the file" in str(error)
    assert (field if field != "digest" else "layout") in str(error)


def test_an_adapter_that_is_not_served_is_refused(other: Cluster, kite: Path) -> None:
    signed, content = held_by(kite)
    error = asyncio.run(refusal(other, signed_anew(signed, adapter="ab" * 16), content))
    assert isinstance(error, ManifestMismatch)
    assert "adapter" in str(error)


def test_another_version_is_refused(other: Cluster, kite: Path) -> None:
    signed, content = held_by(kite)
    later = signed.statement.replace('"version":1', '"version":2')
    error = asyncio.run(refusal(other, replace(signed, statement=later), content))
    assert isinstance(error, InvalidRequest)
    assert "version 2" in str(error)


def test_one_other_bit_is_found_wherever_it_is(other: Cluster, kite: Path) -> None:
    signed, content = held_by(kite)
    whole = bytearray(b"".join(content))
    for place in (5, 4 * statement_from_json(signed.statement).num_tokens + 9, len(whole) - 1):
        whole[place] ^= 1
        assert isinstance(asyncio.run(refusal(other, signed, [bytes(whole)])), CorruptState)
        whole[place] ^= 1
    digests = replace(signed, unit_digests=bytes(len(signed.unit_digests)))
    assert isinstance(asyncio.run(refusal(other, digests, content)), CorruptState)


def test_a_stream_that_ends_early_leaves_nothing(other: Cluster, kite: Path) -> None:
    signed, content = held_by(kite)
    whole = b"".join(content)
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        error = asyncio.run(refusal(other, signed, [whole[:size]] if size else []))
        assert isinstance(error, InvalidRequest)
        assert "cut" in str(error)


def test_a_caller_that_dies_in_the_middle_leaves_nothing(other: Cluster, kite: Path) -> None:
    async def dies() -> None:
        signed, content = held_by(kite)
        whole = b"".join(content)
        before = await other.hostcache_stats()

        def half() -> Iterator[bytes]:
            yield whole[: len(whole) // 2]
            raise Cancelled("killed")

        with pytest.raises(Cancelled):
            async with Client(other.grpc, api_key=MINE) as client:
                await client.load_state(signed, half())

        async def is_free() -> bool:
            now = await other.hostcache_stats()
            return (now.reservations, now.stored) == (0, before.stored)

        async with asyncio.timeout(120):
            while not await is_free():  # noqa: ASYNC110  # another process notices
                await asyncio.sleep(LOOK_SECONDS)

    asyncio.run(dies())


def test_a_routers_token_alone_reads_and_gives_no_state(other: Cluster) -> None:
    """Each worker that a router calls sees its token."""

    async def asked() -> None:
        ready = other.hostcache().ready
        epoch, keys = int(ready["epoch"]), b"".join(other.keys_of(PROMPT))
        me = WorkerLife(str(ready["worker_id"]), epoch)
        signatures = RouterSignatures(GrpcAccess(credentials_of(KEY, ClusterRole.ROUTER)))
        wrong = (b"", signatures.units("fetch", keys, me), signatures.units("look up", b"", me))
        async with channel(str(ready["address"]), token_of(ClusterRole.ROUTER)) as way:
            stub = HostCacheServiceStub(way)
            for signature in wrong:
                request = LookupRequest(epoch=epoch, page_keys=keys, signature=signature)
                with pytest.raises(PermissionDenied), typed_errors():
                    await stub.Lookup(request)
                with pytest.raises(PermissionDenied), typed_errors():
                    async for _ in stub.Fetch(FetchRequest(epoch=epoch, page_keys=keys)):
                        pass
                order = DepositOrder(epoch=epoch, page_keys=keys, signature=signature)
                with pytest.raises(PermissionDenied), typed_errors():
                    async for _ in stub.Deposit(iter([DepositRequest(order=order)])):
                        pass
            right = signatures.units("look up", keys, me)
            await stub.Lookup(LookupRequest(epoch=epoch, page_keys=keys, signature=right))

    asyncio.run(asked())


# Now it is loaded.


def test_what_was_loaded_is_reused_and_answers_are_those_of_a_cold_run(
    other: Cluster, kite: Path, cold: LLM
) -> None:
    assert load(other, kite) == 0
    (first,) = cold.generate([PROMPT], GREEDY)
    answer = asyncio.run(ask(other, PROMPT, key=MINE))
    assert answer.usage is not None
    assert answer.usage.cached.host == PAGES * 16
    assert_same(answer, first)
    turn = [*PROMPT, *first.token_ids, *TURN]
    (second,) = cold.generate([turn], GREEDY)
    answer = asyncio.run(ask(other, turn, key=MINE))
    assert answer.usage is not None
    assert answer.usage.cached.total >= PAGES * 16
    assert_same(answer, second)
    other.assert_ledgers_balance()


def test_a_second_load_stores_nothing(
    other: Cluster, kite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert load(other, kite) == 0
    assert "it was there before" in capsys.readouterr().out


def test_no_other_tenant_finds_what_was_loaded(other: Cluster, kite: Path, cold: LLM) -> None:
    answer = asyncio.run(ask(other, PROMPT, key=THEIRS))
    assert answer.usage is not None
    assert answer.usage.cached.total == 0
    assert_same(answer, cold.generate([PROMPT], GREEDY)[0])


def test_a_stranger_neither_saves_nor_loads(other: Cluster, kite: Path) -> None:
    async def asked() -> None:
        signed, content = held_by(kite)
        for key in ("", "key-of-nobody"):
            async with Client(other.grpc, api_key=key) as client:
                with pytest.raises(Unauthenticated):
                    await client.load_state(signed, content)
                with pytest.raises(Unauthenticated):
                    await anext(client.save_state("kite"))

    asyncio.run(asked())


def test_no_other_tenant_saves_a_request(other: Cluster, tmp_path: Path) -> None:
    asyncio.run(ask(other, PROMPT, "mine", MINE))
    command = ["state", "save", "mine", str(tmp_path / "a.fst"), "--grpc", other.grpc, "--api-key"]
    assert run([*command, THEIRS]) == 1
    assert not any(tmp_path.iterdir())
    assert run([*command, MINE]) == 0


def test_a_host_cache_that_dies_in_the_middle_is_an_error_and_the_next_one_takes_the_file(
    other: Cluster, kite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signed, content = held_by(kite)
    whole = b"".join(content)

    def half_and_half() -> Iterator[bytes]:
        yield whole[: len(whole) // 2]
        other.hostcache().kill()
        yield whole[len(whole) // 2 :]

    async def send() -> None:
        async with Client(other.grpc, api_key=MINE) as client:
            await client.load_state(signed, half_and_half())

    with pytest.raises(FerrymanError):
        asyncio.run(send())
    other.start("hostcache").await_ready()
    other.await_attached()
    capsys.readouterr()
    wait_until(lambda: load(other, kite) == 0, "the router to hear of the new host-cache")
    assert "it was there before" not in capsys.readouterr().out


# The file itself.


def test_safetensors_reads_the_file(kite: Path, cold: LLM) -> None:
    tensors = safetensors.numpy.load_file(kite)
    assert sorted(tensors) == ["digests", "full", "recurrent", "tokens", "window"]
    with opened_state_file(kite) as file:
        statement = file.statement
    assert statement.num_tokens >= PAGES * 16
    (first,) = cold.generate([PROMPT], GREEDY)
    conversation = [*PROMPT, *first.token_ids]
    assert tensors["tokens"].tolist() == conversation[: statement.num_tokens]
    assert tensors["full"].shape == (statement.num_pages, statement.unit_bytes[Kind.FULL])
    assert len(tensors["digests"]) == sum(len(tensors[kind]) for kind in statement.pages)
    assert np.any(tensors["recurrent"])


def test_a_file_from_storage_holds_what_one_from_the_arena_does(kite: Path) -> None:
    arena = safetensors.numpy.load_file(kite)
    storage = safetensors.numpy.load_file(kite.with_name("stored.fst"))
    assert len(storage["full"]) >= PAGES
    shorter = min(len(arena["full"]), len(storage["full"]))
    for name, length in (("tokens", 16 * shorter), ("full", shorter)):
        assert np.array_equal(arena[name][:length], storage[name][:length])


def test_show_says_what_is_in_a_file(kite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["state", "show", str(kite), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] == "tiny"
    assert shown["bytes"] == kite.stat().st_size
    assert run(["state", "show", str(kite)]) == 0
    assert StateSigner(KEY).public_key in capsys.readouterr().out
