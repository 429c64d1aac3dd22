"""`ferryman up --tls-dir` with the demo model: every door by TLS, and certificates that change
while an answer is under way."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
from tests.certificates import make_certificates
from tests.system.cluster import wait_until
from tests.system.test_up import Up, up

from ferryman.client import Client, ConnectionBroken, DoorTls, SamplingParams
from ferryman.errors import DeadlineExceeded
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman_cli.app import run

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROMPT = "The red box is in the"
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("up"), "--tls-dir", str(folder)) as running:
        yield running


def asked_over(context: ssl.SSLContext, cluster: Up) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    url = f"{cluster.said['http']}/v1/completions"
    return httpx.post(url, json=body, verify=context, timeout=120)


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=(folder / "ca.crt").read_text())


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


def test_https_wants_trust_and_http_gets_nothing(cluster: Up, tmp_path: Path) -> None:
    strangers = make_certificates(tmp_path / "strangers")
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        asked_over(trusting(strangers), cluster)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{cluster.said['http'].replace('https', 'http')}/health", timeout=120)


async def test_grpc_wants_trust_and_tls(cluster: Up, tmp_path: Path) -> None:
    strangers = make_certificates(tmp_path / "strangers")
    for tls in (None, DoorTls.of_file(strangers / "ca.crt")):
        async with Client(cluster.said["grpc"], tls=tls) as client:
            with pytest.raises((ConnectionBroken, DeadlineExceeded)):
                await client.models(deadline_seconds=1.0)


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
