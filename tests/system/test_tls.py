"""`ferryman up --tls-dir` with the demo model: every door by TLS, and certificates that change
while an answer is under way."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from urllib.parse import unquote, urlsplit

import grpc
import httpx
import pytest
import redis.asyncio as aioredis
from redis.exceptions import RedisError
from tests.certificates import make_certificates
from tests.harness.cluster import Up, up
from tests.sockets import addresses_of
from tests.system.tls_callers import (
    FAILSAFE_SECONDS,
    addresses,
    health,
    logged_in,
    read_to_end,
    trusting,
    ways_to_call,
)
from tests.waiting import wait_until

from ferryman.client import Client, ConnectionBroken, DoorTls, SamplingParams
from ferryman.errors import DeadlineExceeded
from ferryman.security.credentials import ClusterRole
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman_cli.app import run

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROMPT = "The red box is in the"
REFUSED = "TLS handshake error"
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates for the same names, of an authority that nobody here trusts."""
    return make_certificates(tmp_path_factory.mktemp("strangers"))


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("up"), "--tls-dir", str(folder)) as running:
        yield running


def asked_over(context: ssl.SSLContext, cluster: Up) -> httpx.Response:
    turns = [{"role": "user", "content": PROMPT}]
    body = {"messages": turns, "max_tokens": 6, "temperature": 0}
    url = f"{cluster.said['http']}/v1/chat/completions"
    return httpx.post(url, json=body, verify=context, timeout=120)


def shown_by(context: ssl.SSLContext, cluster: Up) -> bytes:
    """The certificate that the HTTPS door shows to a new connection."""
    with httpx.Client(verify=context, timeout=120) as client:
        with client.stream("GET", f"{cluster.said['http']}/health") as answer:
            connection = answer.extensions["network_stream"].get_extra_info("ssl_object")
            shown: bytes = connection.getpeercert(True)
    return shown


def test_every_door_is_tls_and_people_keep_their_tools(
    cluster: Up, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, state = cluster.said, ["--state-dir", str(cluster.state_dir)]
    assert said["http"].startswith("https://")
    assert said["nats"].startswith("tls://")
    answer = asked_over(trusting(folder), cluster)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] > 0
    request_id = answer.headers["x-request-id"]
    assert run(["trace", request_id, "--check", *state]) == 0
    assert run(["explain", request_id, *state]) == 0
    assert run(["top", "--once", *state]) == 0
    assert "legal" in capsys.readouterr().out
    away = ["--nats", (cluster.state_dir / "nats.url").read_text().strip()]
    assert run(["trace", request_id, *away, "--ca", str(folder / "ca.crt")]) == 0


def refused_handshakes(cluster: Up, folder: Path) -> float:
    url = f"{cluster.said['http']}/metrics"
    shown = cluster.as_observer
    text = httpx.get(url, verify=trusting(folder), headers=shown, timeout=120).text
    (number,) = re.findall(r"^ferryman_router_refused_handshakes_total (\S+)", text, re.MULTILINE)
    return float(number)


def test_https_wants_trust_and_http_gets_nothing(
    cluster: Up, folder: Path, strangers: Path
) -> None:
    before = refused_handshakes(cluster, folder)
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        asked_over(trusting(strangers), cluster)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{cluster.said['http'].replace('https', 'http')}/health", timeout=120)
    wait_until(
        lambda: refused_handshakes(cluster, folder) == before + 2, "both to be counted", seconds=120
    )


async def test_the_grpc_door_wants_trust_and_tls(cluster: Up, strangers: Path) -> None:
    for tls in (None, DoorTls.of_file(strangers / "ca.crt")):
        async with Client(cluster.said["grpc"], tls=tls) as client:
            with pytest.raises((ConnectionBroken, DeadlineExceeded)):
                await client.models(deadline_seconds=1.0)


async def test_workers_take_no_call_without_a_certificate_of_ours(
    cluster: Up, folder: Path, strangers: Path
) -> None:
    ways = ways_to_call(folder, strangers)
    expected = dict.fromkeys(ways, grpc.StatusCode.UNAVAILABLE) | {"ours": grpc.StatusCode.OK}
    async with asyncio.timeout(FAILSAFE_SECONDS):
        for address in (await addresses(cluster, folder)).values():
            assert {name: await health(address, way) for name, way in ways.items()} == expected


async def test_the_broker_takes_no_word_without_tls_and_no_trust_of_strangers(
    cluster: Up, folder: Path, strangers: Path
) -> None:
    """All callers have the router's own password."""
    login, url = cluster.credentials(ClusterRole.ROUTER).nats, cluster.said["nats"]
    log = cluster.state_dir / "logs" / "nats.log"
    shown = {"user": login.user, "pass": login.password, "verbose": False, "pedantic": False}
    async with asyncio.timeout(FAILSAFE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        assert json.loads((await reader.readline()).removeprefix(b"INFO "))["tls_required"]
        writer.write(f"CONNECT {json.dumps(shown)}\r\nPING\r\n".encode())
        assert b"PONG" not in await read_to_end(reader)
        writer.close()
        before = log.read_text().count(REFUSED)
        with pytest.raises(ssl.SSLCertVerificationError):
            await logged_in(url, login, strangers)
        client = await logged_in(url, login, folder)
        await client.close()
    wait_until(lambda: log.read_text().count(REFUSED) > before, "NATS to tell of it", seconds=120)


def test_the_index_has_no_port_but_a_socket_for_its_owner_alone(cluster: Up) -> None:
    assert addresses_of(cluster.pids["redis"]) == set()
    path = Path(unquote(urlsplit(cluster.said["redis"]).path))
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path)] == [0o700, 0o700]


async def test_the_socket_of_the_index_wants_a_password(cluster: Up) -> None:
    async with aioredis.Redis.from_url(cluster.said["redis"]) as stranger:
        with pytest.raises(RedisError, match="must be called with the client already authent"):
            await stranger.ping()
    url = (cluster.state_dir / "redis.url").read_text().strip()
    async with aioredis.Redis.from_url(url) as observer:
        assert await observer.smembers("fm:nodes"), "the host-cache has said that it lives"


async def test_certificates_change_under_an_answer_and_serve_the_next(
    cluster: Up, folder: Path
) -> None:
    pids = cluster.pids
    before = shown_by(trusting(folder), cluster)
    door = DoorTls.of_file(folder / "ca.crt")
    async with Client(cluster.said["grpc"], tls=door) as client:
        async with aclosing(client.generate(PROMPT, LONG)) as events:
            while not isinstance(await anext(events), TokenChunk):
                pass
            make_certificates(folder, new_ca=True)
            assert shown_by(trusting(folder), cluster) != before
            assert asked_over(trusting(folder), cluster).status_code == 200
            *_, last = [event async for event in events]
    assert isinstance(last, GenerateFinished)
    assert last.usage.completion_tokens == LONG.max_tokens
    async with Client(cluster.said["grpc"], tls=DoorTls.of_file(folder / "ca.crt")) as client:
        assert await client.models()
    log = cluster.state_dir / "logs" / "nats.log"
    wait_until(lambda: "Reloaded: tls" in log.read_text(), "NATS to take its certificate")
    assert cluster.pids == pids, "nothing was restarted"
