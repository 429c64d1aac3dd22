"""A campaign of faults over all nine processes of `ferryman up`, under calls that must be answered.

    python -m tools.campaigns.faults --faults 1000

Two routers, two prefill and two decode workers, host-cache, broker and index are killed, stopped
for 0.3 to 20 seconds, drained and cut off from each other, and the disk below the state folder is
full for a while; four faults of five strike the publisher of a lifecycle event as it begins a named
stage. Eight callers compare each answer with what one undisturbed process says (float64, greedy and
seeded). It ends with status 1 if an answer with status 200 was cut or wrong, a call hung, one
failed without a type, or at all although the fault left a replica of each role that could reach the
others; if a process died that nobody had killed; if a trace is illegal; or if something is still
held at the end. Needs root, for namespaces of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.harness.cluster import one_process, save_served_model
from tools.campaigns.faults.callers import CallerJob, CampaignCallers, Verdict, tally
from tools.campaigns.faults.conditions import GRACE_SECONDS, Conditions
from tools.campaigns.faults.events import EventWatch
from tools.campaigns.faults.injector import PUBLISHERS, Injector, Pace
from tools.campaigns.faults.isolation import ControlGroups, enter, mount_small_disk
from tools.campaigns.faults.ledgers import held
from tools.campaigns.faults.processes import NAMES, ROLES, Target
from tools.campaigns.faults.report import FinishedCampaign, report
from tools.campaigns.faults.traces import traces_of

from ferryman.client import SamplingParams
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman_launcher.state_folder import NATS_URL

NUM_CALLERS = 8
NUM_PROMPTS = 24
DISK_BYTES = 640 << 20
SETTINGS = {
    "--served-name": "tiny",
    "--dtype": "float64",
    "--page-size": "16",
    "--chunk-tokens": "64",
    "--max-running": "16",
    # So small that decode pushes requests back when it is alone.
    "--memory-bytes": str(8 << 20),
    "--host-memory": "32M",
    "--storage-bytes": "64M",
    "--routers": "2",
    "--prefill": "2",
    "--decode": "2",
    "--threads": "1",
    "--http-port": "18000",
    "--grpc-port": "18001",
}


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


def kept_jobs(model: Path, rng: random.Random, kept: Path | None) -> list[CallerJob]:
    """From a file of an earlier run, or made and written there."""
    if kept is not None and kept.exists():
        jobs: list[CallerJob] = pickle.loads(kept.read_bytes())  # of this program, and local
        return jobs
    jobs = jobs_for(model, rng)
    if kept is not None:
        kept.write_bytes(pickle.dumps(jobs))
    return jobs


@contextmanager
def running_up(
    model: Path, state_dir: Path, log_path: Path, planes: str
) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """Runs `ferryman up --json`; yields its ready line, and ends it after the block."""
    settings = [word for pair in SETTINGS.items() for word in pair]
    command = [sys.executable, "-m", "ferryman_cli", "up", "--json", "--model", str(model)]
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [
                "nice",
                "-n",
                "10",
                *command,
                "--state-dir",
                str(state_dir),
                "--planes",
                planes,
                *settings,
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "ferryman up ended before it was ready"
        yield json.loads(line), process
    finally:
        process.terminate()
        process.wait(timeout=180)
        process.stdout.close()


async def campaign(
    target: Target, injector: Injector, watch: EventWatch, callers: CampaignCallers, pace: Pace
) -> tuple[dict[str, Any], float]:
    """Calls until the last fault is over and each caller has had an answer since; returns what is
    held afterwards, and when the calls were over."""
    broker = (target.state_dir / NATS_URL).read_text().strip()
    async with nats_bus(NatsOptions(broker, client_name="campaign")) as bus:
        await bus.connected()
        watching = asyncio.create_task(watch.run(bus))
        watching.add_done_callback(lambda _: injector.end())
        async with asyncio.timeout(30):
            await watch.knows(len(PUBLISHERS))  # so the first event of the first call is heard
        calling = asyncio.create_task(callers.run(NUM_CALLERS))
        telling = asyncio.create_task(_tell_progress(watch, injector, callers))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, injector.end)
        try:
            await injector.run(pace)
            assert not watching.done(), watching.exception()
            await asyncio.sleep(GRACE_SECONDS)
            num_before = len(callers.outcomes)
            async with asyncio.timeout(240):
                while len(callers.outcomes) < num_before + 2 * NUM_CALLERS:
                    await asyncio.sleep(0.1)
            callers.stop()
            await calling
            over = time.monotonic()
            return await held(target), over
        finally:
            for task in (telling, calling, watching):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def _tell_progress(watch: EventWatch, injector: Injector, callers: CampaignCallers) -> None:
    num_told = 0
    while True:
        await asyncio.sleep(30)
        counts = {str(verdict): n for verdict, n in tally(callers.outcomes).items()}
        print(
            f"{len(injector.strikes)} faults",
            counts,
            dict(injector.spared),
            len(watch.events),
            watch.num_stale,
            flush=True,
        )
        for one in callers.outcomes[num_told:]:
            if one.verdict is not Verdict.WHOLE:
                print(f"  {one.during.end:.1f} {one.request_id} {one.verdict}: {one.detail}")
        num_told = len(callers.outcomes)


def parsed() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--faults", type=int, default=300, choices=range(1, 2001), metavar="N")
    options.add_argument("--seconds-between", type=float, default=2.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--planes", default="auto", help="the way of hand-offs: auto, grpc")
    options.add_argument("--folder", type=Path, help="kept, with all logs; default: a new one")
    options.add_argument("--answers", type=Path, help="a file that keeps the right answers")
    return options.parse_args()


def main() -> int:
    chosen = parsed()
    enter()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="ferryman-faults-"))
    (folder / "model").mkdir(parents=True, exist_ok=True)
    mount_small_disk(folder / "state", DISK_BYTES)
    model = save_served_model(folder / "model", "granite_nope")
    jobs = kept_jobs(model, random.Random(1), chosen.answers)
    rng, groups = random.Random(chosen.seed), ControlGroups(f"ferryman-{os.getpid()}")
    with running_up(model, folder / "state", folder / "up.log", chosen.planes) as (said, process):
        target = Target(folder / "state", folder / "up.log")
        for name in NAMES:
            groups.join(name, target.pids[name])
        with suppress(PermissionError):
            os.nice(-10)  # an observer that is late strikes after the stage
        watch, conditions = EventWatch(target), Conditions(ROLES)
        injector = Injector(target, watch, conditions, groups, rng)
        callers = CampaignCallers(said["http"].split(","), said["grpc"], jobs, rng)
        began = time.monotonic()
        pace = Pace(chosen.faults, chosen.seconds_between)
        try:
            holding, over = asyncio.run(campaign(target, injector, watch, callers, pace))
            is_up = process.poll() is None
            lost = [*conditions.of("nats"), *watch.deaf]
            names = {
                one.request_id
                for one in callers.outcomes
                if not any(one.during.overlaps(interval) for interval in lost)
            }
            observed = (target.state_dir / NATS_URL).read_text().strip()
            traces = asyncio.run(traces_of(observed, watch.events, names))
        finally:
            # The state folder ends with its mount.
            subprocess.run(["cp", "-a", str(folder / "state"), str(folder / "kept")], check=False)
            groups.remove()
        target.log.read()
        finished = FinishedCampaign(
            injector, callers, watch, traces, holding, target.log, over - began
        )
    num_bad = report(finished) + (not is_up)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
