"""A campaign of faults over all eight processes of `ferryman up`, under streams that must be right.

    python -m tools.campaigns.faults --faults 300

Router, two prefill and two decode workers, host-cache, broker and index are stopped for 0.3 to 20
seconds (SIGSTOP, SIGCONT) and killed (SIGKILL; `up` starts them again), at random and several at
once, while eight callers compare each answer with what one undisturbed process says (float64,
greedy and seeded). It ends with status 1 if an answer with status 200 was cut or wrong, a call
hung, one failed although a worker of each role and the router were up (one that came back while the
broker was away counts from when that was back), or the trace of one that ran while the broker was
there is illegal. Takes about 3 s a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.cluster import one_process, save_served_model
from tools.campaigns.callers import CallerJob, CallOutcome, CampaignCallers, Verdict, tally
from tools.campaigns.injector import Injector, Plan, Target
from tools.campaigns.outages import Absences, Interval, outages
from tools.campaigns.traces import Traces, traces_of

from ferryman.client import SamplingParams
from ferryman_launcher.state_folder import NATS_URL

ROLES = {
    "router": ("router",),
    "prefill": ("prefill-1", "prefill-2"),
    "decode": ("decode-1", "decode-2"),
}
NAMES = (*(name for names in ROLES.values() for name in names), "hostcache", "nats", "redis")
NUM_CALLERS = 8
NUM_PROMPTS = 24
PAGE_SIZE = 16
# The router uses a worker that is back after its next heartbeat, which comes each second.
GRACE_SECONDS = 3.0
SETTINGS = {
    "--served-name": "tiny",
    "--dtype": "float64",
    "--page-size": str(PAGE_SIZE),
    "--chunk-tokens": "64",
    "--max-running": "16",
    "--memory-bytes": str(48 << 20),
    "--host-memory": "32M",
    "--storage-bytes": "64M",
    "--prefill": "2",
    "--decode": "2",
    "--threads": "1",
    "--http-port": "0",
    "--grpc-port": "0",
}
NEVER = (Verdict.CUT, Verdict.WRONG, Verdict.HUNG, Verdict.UNTYPED)


def jobs_for(model: Path, rng: random.Random) -> list[CallerJob]:
    """Prompts with shared beginnings, greedy and drawn, and the right answers to them."""
    asked = []
    for number in range(NUM_PROMPTS):
        family, length = rng.randrange(6), rng.randrange(8, 500)
        prompt = tuple((family * 7 + i * 3) % 120 + 3 for i in range(length))
        sampling = SamplingParams(
            max_tokens=rng.randrange(20, 400),
            temperature=0.8 if number % 2 else 0.0,
            seed=number,
            ignore_eos=True,
        )
        asked.append((prompt, sampling))
    with one_process(model) as llm:
        jobs = []
        for prompt, sampling in asked:
            (done,) = llm.generate([list(prompt)], sampling)
            jobs.append(CallerJob(prompt, sampling, done.token_ids, done.text))
    return jobs


@contextmanager
def running_up(model: Path, target: Target) -> Iterator[dict[str, Any]]:
    """Runs `ferryman up --json`; yields its ready line, and ends it after the block."""
    settings = [word for pair in SETTINGS.items() for word in pair]
    command = [sys.executable, "-m", "ferryman_cli", "up", "--json", "--model", str(model)]
    with target.log.open("w") as log:
        process = subprocess.Popen(
            [*command, "--state-dir", str(target.state_dir), *settings],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "ferryman up ended before it was ready"
        yield json.loads(line)
        assert process.poll() is None, "ferryman up gave up during the campaign"
    finally:
        process.terminate()
        process.wait(timeout=120)
        process.stdout.close()


async def campaign(said: dict[str, Any], injector: Injector, callers: CampaignCallers) -> None:
    """Calls until the last fault is over and each caller has had an answer since."""
    calling = asyncio.create_task(callers.run(NUM_CALLERS))
    telling = asyncio.create_task(_tell_progress(injector, callers))
    try:
        await injector.run()
        await asyncio.sleep(GRACE_SECONDS)
        num_before = len(callers.outcomes)
        async with asyncio.timeout(120):
            while len(callers.outcomes) < num_before + 2 * NUM_CALLERS:
                await asyncio.sleep(0.1)
        callers.stop()
        await calling
    finally:
        telling.cancel()
        calling.cancel()


async def _tell_progress(injector: Injector, callers: CampaignCallers) -> None:
    while True:
        await asyncio.sleep(30)
        print(f"{injector.num_done} faults", dict(tally(callers.outcomes)), flush=True)


def unexcused(outcomes: Sequence[CallOutcome], away: Sequence[Interval]) -> list[CallOutcome]:
    """Calls that failed at a moment when router and a worker of each role were there."""
    failed = [o for o in outcomes if o.verdict in (Verdict.TYPED, Verdict.CONNECTION)]
    return [o for o in failed if not any(one.contains(o.during.end) for one in away)]


def traced(outcomes: Sequence[CallOutcome], incomplete: Sequence[Interval]) -> set[str]:
    """The calls whose logs must be complete: a killed broker may lose events that it received."""
    return {
        one.request_id
        for one in outcomes
        if not any(one.during.overlaps(interval) for interval in incomplete)
    }


def report(
    injector: Injector,
    callers: CampaignCallers,
    away: Sequence[Interval],
    unheard: Sequence[Interval],
    traces: Traces,
    seconds: float,
) -> int:
    """Prints the figures; returns the number of events that must not happen.

    Failures in `away` are excused. Failures in `unheard`, when workers or the router were back but
    the broker was not, are excused too, and counted.
    """
    outcomes, violations = callers.outcomes, traces.violations
    num_unheard = len(unexcused(outcomes, away))
    outage_seconds = sum(one.end - one.start for one in away)
    away = [*away, *unheard]
    bad = [o for o in outcomes if o.verdict in NEVER]
    bad += unexcused(outcomes, away)
    details = Counter(o.detail.split(":")[0] for o in outcomes if o.verdict is not Verdict.WHOLE)
    slowest = max((o.during.end - o.during.start for o in outcomes), default=0.0)
    print(
        json.dumps(
            {
                "faults": dict(sorted(injector.faults.items())),
                "num_faults": injector.num_done,
                "num_calls": len(outcomes),
                "verdicts": {str(verdict): n for verdict, n in tally(outcomes).items()},
                "errors": dict(details),
                "outage_seconds": round(outage_seconds, 1),
                "slowest_call_seconds": round(slowest, 1),
                "failed_while_workers_were_back_unheard": num_unheard
                - len(unexcused(outcomes, away)),
                "traces": {"checked": traces.num_calls, "sent_again": traces.num_sent_again},
                "illegal_traces": dict(Counter(one.rule for one in violations)),
                "must_not_be": len(bad) + len(violations),
                "seconds": round(seconds, 1),
            },
            indent=1,
        )
    )
    for one in bad:
        took = f"{one.during.end - one.during.start:.1f} s"
        print(f"{one.verdict}: {one.way} {one.request_id} after {took}: {one.detail}")
    for violation in violations:
        print(f"illegal: {violation.request_id}: {violation.rule}: {violation.detail}")
    return len(bad) + len(violations)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--faults", type=int, default=300, choices=range(1, 2001), metavar="N")
    options.add_argument("--seconds-between", type=float, default=3.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--folder", type=Path, help="kept, with all logs; default: a new one")
    chosen = options.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="ferryman-faults-"))
    (folder / "model").mkdir(parents=True, exist_ok=True)
    rng = random.Random(chosen.seed)
    model = save_served_model(folder / "model", "granite_nope")
    jobs = jobs_for(model, rng)
    began = time.monotonic()
    target = Target(folder / "state", folder / "up.log")
    with running_up(model, target) as said:
        absences = Absences(NAMES)
        plan = Plan(chosen.faults, chosen.seconds_between)
        injector = Injector(target, absences, plan, rng)
        callers = CampaignCallers(said["http"], said["grpc"], jobs, rng)
        asyncio.run(campaign(said, injector, callers))
        now = time.monotonic()
        must_be_legal = traced(callers.outcomes, absences.of("nats", now))
        observed = (target.state_dir / NATS_URL).read_text().strip()
        traces = asyncio.run(traces_of(observed, must_be_legal))
    print(f"{traces.num_calls} of {len(must_be_legal)} calls beside the broker are in the log")
    away = outages(absences, ROLES, now, GRACE_SECONDS)
    unheard = outages(absences, ROLES, now, GRACE_SECONDS, absences.of("nats", now))
    return 1 if report(injector, callers, away, unheard, traces, now - began) else 0


if __name__ == "__main__":
    sys.exit(main())
