"""A server of HTTPS counts the handshakes that fail, whichever end says so."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest
from tests.certificates import make_certificates

from ferryman.runtime.http_server import json_answer, listening, observed
from ferryman.security.tls_folder import DOOR, TlsFolder, server_context
from ferryman.settings.groups import ListenSettings

FAILSAFE_SECONDS = 120


def asked(url: str, trusted: Path) -> httpx.Response:
    """In a thread, since the client of an event loop hangs up where this one says why."""
    context = ssl.create_default_context(cafile=str(trusted / "ca.crt"))
    return httpx.get(url, verify=context, timeout=FAILSAFE_SECONDS)


async def test_handshakes_that_fail_are_counted(tmp_path: Path) -> None:
    ours, strangers = (make_certificates(tmp_path / name) for name in ("ours", "strangers"))
    refused: asyncio.Queue[None] = asyncio.Queue()
    tls = server_context(TlsFolder(ours, DOOR), lambda: refused.put_nowait(None))
    app = observed({"/health": lambda: json_answer("well")}, {}, lambda _path, _shown: None)
    async with asyncio.timeout(FAILSAFE_SECONDS), listening(app, ListenSettings(), tls=tls) as port:
        place = f"127.0.0.1:{port}/health"
        assert (await asyncio.to_thread(asked, f"https://{place}", ours)).json() == "well"
        assert refused.empty()
        for url, trusted in ((f"http://{place}", ours), (f"https://{place}", strangers)):
            with pytest.raises(httpx.TransportError):
                await asyncio.to_thread(asked, url, trusted)
            await refused.get()
        assert refused.empty(), "each was counted once"
