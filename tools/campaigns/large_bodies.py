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
import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

import httpx
from tests.system.cluster import Cluster, ClusterShape, running_cluster

from ferryman.client import Client, SamplingParams, TokenChunk
from ferryman_launcher.options import demo_model

NUM_STREAMS, NUM_BODIES = 4, 20
LARGEST = 8 << 20
MAX_GAP_SECONDS = 0.3
SEND_SECONDS = 500.0  # the sender and the router's readers are niced
STREAM = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)


def _filled(head: str, piece: str, tail: str) -> bytes:
    """As many pieces as fit a body of the largest size."""
    return (head + piece * ((LARGEST - len(head) - len(tail)) // len(piece)) + tail).encode()


# Each would hold up a loop that reads it: to decode, to parse, to check, to render, to tokenize.
BODIES = {
    "one text": (_filled('{"prompt":"', "the ferry carries, ", '"}'), 400),
    "escapes": (_filled('{"prompt":"', "\\n\\u00e9", '"}'), 400),
    "control tokens": (_filled('{"messages":[{"role":"user","content":"', "<|user|>", '"}]}'), 400),
    "messages": (
        _filled('{"messages":[', '{"role":"user","content":"a"},', '{"role":"user"}]}'),
        413,
    ),
    "token ids": (_filled('{"prompt":[', "1,", "1]}"), 413),
    "many texts": (_filled('{"prompt":[', '"a",', '"a"]}'), 413),
    "stop token ids": (_filled('{"prompt":"a","stop_token_ids":[', "1234567890123,", "1]}"), 413),
    "keys": (b'{"k":1' + b"".join(b',"k%d":1' % i for i in range(600_000)) + b"}", 413),
    "no JSON": (_filled("[", "[],", "]"), 413),
    "close to the limit": (json.dumps({"prompt": "a question " * 11_000}).encode(), 400),
}


async def refused(http: httpx.AsyncClient, body: bytes, status: int) -> None:
    """Sends a body that has to be refused with this status and a typed error."""
    path = "/v1/chat/completions" if b'"messages"' in body[:20] else "/v1/completions"
    answer = await http.post(path, content=body)
    assert (answer.status_code, "error" in answer.json()) == (status, True), answer.text


async def largest_gap(cluster: Cluster, *, with_bodies: bool) -> float:
    """Of all streams, until the other process has had all its answers."""
    over = asyncio.Event()
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.campaigns.large_bodies", "--send-to", cluster.http),
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


async def _send_all(http: str) -> int:
    """Sends all bodies at once; how many that were."""
    kinds = list(BODIES.values())
    async with (
        httpx.AsyncClient(base_url=http, timeout=SEND_SECONDS) as client,
        asyncio.TaskGroup() as group,
    ):
        for index in range(NUM_BODIES):
            group.create_task(refused(client, *kinds[index % len(kinds)]))
    return NUM_BODIES


def _send_when_told(http: str) -> None:
    """The other process: waits for a line; an empty one means that it sends nothing."""
    os.nice(10)
    print("ready", flush=True)
    is_wanted = bool(sys.stdin.readline().strip())
    print(asyncio.run(_send_all(http)) if is_wanted else 0)


async def measure(cluster: Cluster, num_rounds: int) -> None:
    await largest_gap(cluster, with_bodies=False)  # workers compile what they have not run yet
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
    options.add_argument("--send-to", default="", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.send_to:
        _send_when_told(chosen.send_to)
        return
    folder = Path(tempfile.mkdtemp(prefix="ferryman-bodies-"))
    with running_cluster(demo_model(), folder, ClusterShape(dtype="float32")) as cluster:
        asyncio.run(measure(cluster, chosen.rounds))


if __name__ == "__main__":
    main()
