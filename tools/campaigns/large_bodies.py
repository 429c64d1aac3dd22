"""Gaps between the tokens of running streams while others send the largest bodies there may be.

    python -m tools.campaigns.large_bodies

A demo cluster serves four streams that a client of its own measures; another process sends twenty
bodies of 8 MiB at once, each of a kind that would be costly to read. It stands for callers on other
machines, which take no CPU time from this one: it is niced. Prints the largest gaps with and
without the bodies, of several rounds in turn, and how long the router's loop was held.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.harness.cluster import Cluster, ClusterShape, running_cluster
from tools.campaigns.body_sender import NUM_BODIES

from ferryman.client import Client, SamplingParams, TokenChunk
from ferryman_launcher.options import demo_model

NUM_STREAMS = 4
MAX_GAP_SECONDS = 0.3
STREAM = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)


async def largest_gap(cluster: Cluster, *, with_bodies: bool) -> float:
    """Of all streams, until the other process has had all its answers."""
    over = asyncio.Event()
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.campaigns.body_sender", cluster.http),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert sender.stdout is not None
    await sender.stdout.readline()  # it has made its bodies: what follows is sending alone
    async with Client(cluster.grpc) as client, asyncio.TaskGroup() as group:
        streams = [group.create_task(_gaps(client, over)) for _ in range(NUM_STREAMS)]
        answered, _ = await sender.communicate(b"send\n" if with_bodies else b"\n")
        assert answered.split() == [b"%d" % (NUM_BODIES * with_bodies)], "each had its answer"
        over.set()
    return max(gap for stream in streams for gap in stream.result())


async def _gaps(client: Client, until: asyncio.Event) -> list[float]:
    """The waits between chunks of streams that follow one another, until all bodies are answered.

    The wait for a first token, which is prefill's, does not count.
    """
    found: list[float] = []
    clock = asyncio.get_running_loop().time
    while not (found and until.is_set()):
        times = [
            clock()
            async for event in client.generate("The red kite", STREAM)
            if isinstance(event, TokenChunk)
        ]
        found += [after - before for before, after in pairwise(times)]
    return found


async def num_long_holds(cluster: Cluster) -> int:
    """How often the router's own work held up its loop for longer than a quarter of a second."""
    (router,) = cluster.of_role("router")
    shown = await asyncio.to_thread(router.metrics)
    name = "ferryman_router_loop_held_seconds_bucket"
    below, whole = (re.search(f'{name}{{le="{le}"}} (.*)', shown) for le in ("0.25", r"\+Inf"))
    assert below is not None
    assert whole is not None
    assert float(whole[1]) > 0, "it is measured"
    return int(float(whole[1]) - float(below[1]))


async def warmed(cluster: Cluster) -> None:
    """Runs one stream: workers compile what they have not run yet."""
    over = asyncio.Event()
    over.set()
    async with Client(cluster.grpc) as client:
        await _gaps(client, over)


async def measure(cluster: Cluster, num_rounds: int) -> None:
    await warmed(cluster)
    without, beside, holds = [], [], []
    for _ in range(num_rounds):
        without.append(await largest_gap(cluster, with_bodies=False))
        before = await num_long_holds(cluster)
        beside.append(await largest_gap(cluster, with_bodies=True))
        holds.append(await num_long_holds(cluster) - before)
        print(f"largest gap without {without[-1]:.3f} s, beside bodies {beside[-1]:.3f} s", end="")
        print(f", holds above 0.25 s: {holds[-1]}", flush=True)
    print(f"medians {median(without):.3f} s and {median(beside):.3f} s, holds {sum(holds)}")
    num_kept = sum(gap <= MAX_GAP_SECONDS for gap in beside)
    print(f"no gap above {MAX_GAP_SECONDS} s in {num_kept} of {num_rounds} rounds")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--rounds", type=int, default=5)
    chosen = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ferryman-bodies-"))
    with running_cluster(demo_model(), folder, ClusterShape(dtype="float32")) as cluster:
        asyncio.run(measure(cluster, chosen.rounds))


if __name__ == "__main__":
    main()
