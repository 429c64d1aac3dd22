"""Checks of Redis: that it answers, takes the login, and never evicts by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from ferryman.security.credentials import Login
from ferryman.security.shown_urls import without_logins
from ferryman.wire.redis.connections import redis_pool
from ferryman_cli.doctor.fault_report import DoctorFinding, warning

ANSWER_SECONDS = 5.0
POLICY = "noeviction"


@dataclass(frozen=True, slots=True)
class IndexLook:
    """The findings, and Redis' clock (seconds since 1970; 0 if it did not say)."""

    findings: tuple[DoctorFinding, ...]
    clock: float = 0.0


async def look_at_index(
    url: str, login: Login | None, authorities: Callable[[], bytes] | None = None
) -> IndexLook:
    """Asks Redis about itself, as a router would."""
    at = without_logins(url)
    pool = redis_pool(url, login, authorities, ANSWER_SECONDS)
    client = Redis(connection_pool=pool)
    try:
        answer = await client.info()
    except (AuthenticationError, ResponseError) as error:
        return IndexLook((_login_refused(url, login, error),))
    except (RedisError, OSError, TimeoutError):
        away = DoctorFinding(
            "redis-away",
            f"Redis at {at} does not answer: nodes find nothing that others have stored",
            "start it again, or kill -CONT it if it is stopped; redis-cli -u URL ping should say"
            " PONG",
        )
        return IndexLook((away,))
    finally:
        await client.aclose()
        await pool.disconnect()
    return IndexLook(tuple(_answer_findings(at, answer)), _clock(answer))


def _login_refused(url: str, login: Login | None, error: Exception) -> DoctorFinding:
    name = urlsplit(url).username or (login.user if login else "without a name")
    return DoctorFinding(
        "redis-login",
        f"Redis at {without_logins(url)} refuses the login {name}: {error}",
        "give Redis the redis.acl that ferryman credentials DIR --key CLUSTER.KEY writes:"
        " --aclfile DIR/redis.acl",
    )


def _answer_findings(at: str, answer: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    policy = answer.get("maxmemory_policy", POLICY)
    if policy != POLICY and answer.get("maxmemory", 0):
        yield DoctorFinding(
            "redis-policy",
            f"Redis at {at} may drop entries by itself (maxmemory-policy {policy}): state that is"
            " on disk would be forgotten",
            f"redis-cli -u URL config set maxmemory-policy {POLICY}",
        )
    used, most = answer.get("used_memory", 0), answer.get("maxmemory", 0)
    if most and used > 0.95 * most:
        yield warning(
            "redis-full",
            f"Redis at {at} has used {used} of {most} bytes: new entries will be refused",
            "redis-cli -u URL config set maxmemory TWICE_AS_MUCH",
        )


def _clock(answer: Mapping[str, Any]) -> float:
    return float(answer.get("server_time_usec", 0)) / 1e6
