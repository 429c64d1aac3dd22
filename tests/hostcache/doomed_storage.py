"""Processes that store and drop without end until they are killed; one for each line on stdin.

python -m tests.hostcache.doomed_storage FOLDER_OR_URL

A line is a number: the seed. The process that reads them forks, so each life begins at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
from pathlib import Path

from tests.hostcache.stored import Bucket, Place, opened, prompt_with
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind

HYBRID = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
CAPACITY_BYTES = 1 << 20
MAX_LIFE_SECONDS = 0.06


async def store_for_ever(place: Place, rng: random.Random) -> None:
    """Prompts of three tenants' turns, more than there is room for; now and then one is dropped."""
    async with opened(place, capacity_bytes=CAPACITY_BYTES) as storage:
        storage.attach(HYBRID)
        most = MAX_LIFE_SECONDS * (5 if isinstance(place, Bucket) else 1)
        killer = threading.Thread(target=kill_this, args=(rng.random() * most,))
        killer.start()
        while True:
            pages = [rng.randint(1, 4) for _ in range(rng.randint(1, 40))]
            prompt = prompt_with(HYBRID, chain(*pages), snapshots=[len(pages) - 1])
            await storage.store(prompt.keys, prompt.offers())
            if rng.random() < 0.2:
                storage.drop(Kind.FULL, prompt.keys[rng.randrange(len(pages))])


def kill_this(seconds: float) -> None:
    threading.Event().wait(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def main(place: Place) -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            asyncio.run(store_for_ever(place, random.Random(int(line))))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.WTERMSIG(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    name = sys.argv[1]
    main(Bucket(name) if name.startswith("s3:") else Path(name))
