"""The holdings of workers, host-cache and routers once no request is under way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import httpx
from tools.campaigns.faults.processes import ROLES, WORKERS, Target, ports

from ferryman_launcher.state_folder import METRICS_TOKEN

QUIET_SECONDS = 90.0
_HELD = re.compile(r"^ferryman_router_(queue_requests|in_flight_requests) (\S+)$", re.MULTILINE)


async def held(target: Target) -> dict[str, Any]:
    """By process what it still holds after `QUIET_SECONDS`; empty if all ledgers balance."""
    names = (*WORKERS, "hostcache", *ROLES["router"])
    holding: dict[str, Any] = dict.fromkeys(names, "no answer")
    try:
        async with asyncio.timeout(QUIET_SECONDS):
            while holding:
                await asyncio.sleep(0.5)
                holding = {n: rest for n in names if (rest := await _held_by(target, n))}
    except TimeoutError:
        return holding
    return {}


async def _held_by(target: Target, name: str) -> Any:
    token = (target.state_dir / METRICS_TOKEN).read_text().strip()
    is_router = name in ROLES["router"]
    async with httpx.AsyncClient(timeout=5, headers={"authorization": f"Bearer {token}"}) as http:
        for port in ports(target.pids[name]):
            path = "metrics" if is_router else "debug/ledger"
            try:
                answer = await http.get(f"http://127.0.0.1:{port}/{path}")
            except httpx.HTTPError:
                continue  # its gRPC port
            if is_router:
                return held_by_router(answer.text)
            return held_by_cache(answer.json()) if name == "hostcache" else held_in(answer.json())
    return "no answer"


def held_in(ledgers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The pools of a worker that do not balance, or of which others than the prefix tree hold
    slots."""
    return {
        kind: dict(one)
        for kind, one in ledgers.items()
        if not one["balances"] or set(one["by_role"]) - {"tree"}
    }


def held_by_cache(ledger: Mapping[str, Any]) -> dict[str, Any]:
    """The pools of a host-cache with slots that are reserved, leased, or leaving."""
    pools = {
        kind: dict(pool)
        for kind, pool in ledger["pools"].items()
        if pool["reserved"] or pool["leased"] or pool["leaving"]
    }
    return pools if ledger["balances"] else {**pools, "balances": False}


def held_by_router(metrics: str) -> dict[str, float]:
    """The requests of a router that wait or are under way."""
    return {name: float(value) for name, value in _HELD.findall(metrics) if float(value)}
