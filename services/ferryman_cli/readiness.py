"""Asks a router whether it can serve."""

from __future__ import annotations

import asyncio
import http.client

ASK_SECONDS = 2.0
PAUSE_SECONDS = 0.1


async def serving(address: str) -> None:
    """Waits until `/ready` at host:port says yes; no answer is a no. The caller says how long."""
    while True:
        if await asyncio.to_thread(_asked, address):
            return
        await asyncio.sleep(PAUSE_SECONDS)


def _asked(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=ASK_SECONDS)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
