"""Callers of a cluster that know the right answers, and judge each that they get.

Every way to call is used: streams and whole answers over HTTP, and the SDK. A judgement says what a
client without this knowledge would have taken the answer for. Callers over HTTP go to the other
router when one refuses the connection, as a load balancer would; the SDK has both addresses.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx
from tools.campaigns.faults.conditions import Interval

from ferryman.client import Client, SamplingParams, TokenChunk
from ferryman.errors import FerrymanError
from ferryman.ids import make_request_id
from ferryman.wire.public import GenerateFinished

DEADLINE_SECONDS = 120.0  # the machine is shared, and a stop takes up to 20 s
HUNG_SECONDS = DEADLINE_SECONDS + 15.0
WHOLE_REASONS = ("length", "stop")


@dataclass(frozen=True, slots=True)
class CallerJob:
    """A prompt, how to draw from it, and what one undisturbed process answers."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    token_ids: tuple[int, ...]
    text: str


class Verdict(StrEnum):
    """The result of a call. Only the first two may occur."""

    WHOLE = "whole"
    TYPED = "typed error"
    CONNECTION = "connection broke"  # by itself no error of the router's: it may be dead
    UNTYPED = "error without a type"
    CUT = "cut, with status 200"
    WRONG = "wrong tokens"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """One call: its time, its way and its result. `router` is the number of the one that had it; 0
    for the SDK, which may have gone to several, and if none took the connection."""

    request_id: str
    way: str
    router: int
    during: Interval
    verdict: Verdict
    detail: str = ""


@dataclass(slots=True)
class CampaignCallers:
    """`num_callers` of them, until `stop` is set. `http` and `grpc` are the routers' doors."""

    http: Sequence[str]
    grpc: str
    jobs: Sequence[CallerJob]
    rng: random.Random
    outcomes: list[CallOutcome] = field(default_factory=list)
    num_refused: int = 0
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """Calls under way go on to their end."""
        self._stopping.set()

    async def run(self, num_callers: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            Client(self.grpc) as sdk,
            httpx.AsyncClient(timeout=HUNG_SECONDS, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            for number in range(num_callers):
                group.create_task(self._keep_calling(number, sdk, http))

    async def _keep_calling(self, number: int, sdk: Client, http: httpx.AsyncClient) -> None:
        ways = (self._by_stream, self._by_stream, self._by_body, self._by_sdk)
        way = ways[number % len(ways)]
        while not self._stopping.is_set():
            job, request_id, start = self.rng.choice(self.jobs), make_request_id(), time.monotonic()
            router = 0
            try:
                async with asyncio.timeout(HUNG_SECONDS):
                    if way == self._by_sdk:
                        verdict, detail = await self._by_sdk(sdk, job, request_id)
                    else:
                        router, verdict, detail = await self._at_some(way, http, job, request_id)
            except TimeoutError:
                verdict, detail = Verdict.HUNG, f"no end after {HUNG_SECONDS} s"
            during = Interval(start, time.monotonic())
            name = way.__name__.removeprefix("_by_")
            self.outcomes.append(CallOutcome(request_id, name, router, during, verdict, detail))
            if verdict is not Verdict.WHOLE:
                await asyncio.sleep(1.0)  # a client that was refused comes back a little later

    async def _at_some(
        self, way: Any, http: httpx.AsyncClient, job: CallerJob, request_id: str
    ) -> tuple[int, Verdict, str]:
        """The number of the router that took the connection, and the verdict on its answer."""
        order = self.rng.sample(range(1, len(self.http) + 1), len(self.http))
        for router in order:
            try:
                return router, *await way(http, self.http[router - 1], job, request_id)
            except httpx.ConnectError:
                self.num_refused += 1
        return 0, Verdict.CONNECTION, "all routers refuse connections"

    # The ways to call.

    async def _by_stream(
        self, http: httpx.AsyncClient, door: str, job: CallerJob, request_id: str
    ) -> tuple[Verdict, str]:
        text, reason, body = "", None, _body(job) | {"stream": True}
        try:
            async with http.stream(
                "POST", f"{door}/v1/completions", json=body, headers=_headers(request_id)
            ) as answer:
                if answer.status_code != 200:
                    return _refused(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return judge(job, text, reason)
                    if not line:
                        continue
                    frame = json.loads(line.removeprefix("data: "))
                    if "error" in frame:
                        return _broken(job, text, frame["error"])
                    for choice in frame["choices"]:
                        text, reason = text + choice["text"], choice["finish_reason"] or reason
        except httpx.ConnectError:
            raise
        except httpx.HTTPError as error:
            return _connection(job, text, error)
        return Verdict.CUT, f"no [DONE] after {len(text)} characters"

    async def _by_body(
        self, http: httpx.AsyncClient, door: str, job: CallerJob, request_id: str
    ) -> tuple[Verdict, str]:
        try:
            answer = await http.post(
                f"{door}/v1/completions", json=_body(job), headers=_headers(request_id)
            )
        except httpx.ConnectError:
            raise
        except httpx.HTTPError as error:
            return _connection(job, "", error)
        if answer.status_code != 200:
            return _refused(answer.status_code, answer.content)
        (choice,) = answer.json()["choices"]
        return judge(job, choice["text"], choice["finish_reason"])

    async def _by_sdk(self, sdk: Client, job: CallerJob, request_id: str) -> tuple[Verdict, str]:
        token_ids: list[int] = []
        reason = None
        try:
            async for event in sdk.generate(
                list(job.prompt),
                job.sampling,
                request_id=request_id,
                deadline_seconds=DEADLINE_SECONDS,
            ):
                if isinstance(event, TokenChunk):
                    token_ids += event.token_ids
                elif isinstance(event, GenerateFinished):
                    reason = str(event.reason)
        except FerrymanError as error:
            if tuple(token_ids) != job.token_ids[: len(token_ids)]:
                return Verdict.WRONG, f"before {error.reason}"
            is_bug = error.code == "INTERNAL"
            return Verdict.UNTYPED if is_bug else Verdict.TYPED, f"{error.reason}: {error}"
        if tuple(token_ids) == job.token_ids and reason in WHOLE_REASONS:
            return Verdict.WHOLE, ""
        is_prefix = tuple(token_ids) == job.token_ids[: len(token_ids)]
        return Verdict.CUT if is_prefix else Verdict.WRONG, f"{len(token_ids)} tokens, {reason}"


# The verdict on an answer.


def judge(job: CallerJob, text: str, reason: str | None) -> tuple[Verdict, str]:
    """The verdict on an answer that claims to be complete."""
    if text == job.text and reason in WHOLE_REASONS:
        return Verdict.WHOLE, ""
    if job.text.startswith(text):
        return Verdict.CUT, f"{len(text)} of {len(job.text)} characters, finish_reason {reason}"
    return Verdict.WRONG, f"{text[-80:]!r}, finish_reason {reason}"


def tally(outcomes: Sequence[CallOutcome]) -> Counter[Verdict]:
    return Counter(outcome.verdict for outcome in outcomes)


def _broken(job: CallerJob, text: str, error: Any) -> tuple[Verdict, str]:
    if not job.text.startswith(text):
        return Verdict.WRONG, f"before {error}"
    return _typed(error)


def _typed(error: Any) -> tuple[Verdict, str]:
    code = error.get("code") if isinstance(error, dict) else None
    if not code or code == "ferryman_error":
        return Verdict.UNTYPED, str(error)[:200]
    return Verdict.TYPED, f"{code}: {error.get('message')}"


def _refused(status: int, body: bytes) -> tuple[Verdict, str]:
    try:
        verdict, detail = _typed(json.loads(body)["error"])
    except (ValueError, KeyError):
        return Verdict.UNTYPED, f"{status} {body[:200]!r}"
    return verdict, f"{status} {detail}"


def _connection(job: CallerJob, text: str, error: httpx.HTTPError) -> tuple[Verdict, str]:
    if not job.text.startswith(text):
        return Verdict.WRONG, f"before {error!r}"
    return Verdict.CONNECTION, repr(error)


def _body(job: CallerJob) -> dict[str, Any]:
    sampling = job.sampling
    return {
        "model": "tiny",
        "prompt": list(job.prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
    }


def _headers(request_id: str) -> dict[str, str]:
    return {
        "x-request-id": request_id,
        "x-ferryman-deadline-ms": str(int(DEADLINE_SECONDS * 1000)),
    }
