"""Whether the time of an answer tells of another tenant's cache: by hand, some minutes.

    python -m tools.campaigns.cache_timing --probes 2000 --own 200

One `ferryman up` with two tenants. Before each probe the first tenant has a prompt computed: by a
coin it is the very prompt that the second tenant then asks, or another one as long. The area under
the curve (AUC) is how often a probe of a computed prompt was faster than one of another, 0.5 if
time tells nothing. `--own` probes by the same tenant show that time would tell.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.harness.cluster import Up, up

TENANTS = ("tenant-one", "tenant-two")
PROMPT_LEN = 256
TOKEN_IDS = range(20, 700)
FAILSAFE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Probe:
    """Seconds until an answer of one token, and whether its prompt had been computed."""

    seconds: float
    was_computed: bool


def auc(probes: Sequence[Probe]) -> float:
    """The share of pairs (computed, other) with a faster computed one; ties count half."""
    computed = [each.seconds for each in probes if each.was_computed]
    others = [each.seconds for each in probes if not each.was_computed]
    assert computed, "the coin fell both ways"
    assert others, "the coin fell both ways"
    won = sum((a < b) + (a == b) / 2 for a in computed for b in others)
    return won / (len(computed) * len(others))


class Asker:
    """One tenant's connection."""

    def __init__(self, cluster: Up, key: str) -> None:
        self._web = httpx.Client(
            base_url=cluster.said["http"],
            headers={"authorization": f"Bearer {key}"},
            timeout=FAILSAFE_SECONDS,
        )

    def ask(self, prompt: Sequence[int]) -> float:
        """Seconds until the answer of one token."""
        body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        answer = self._web.post("/v1/completions", json=body)
        seconds = time.perf_counter() - began
        assert answer.status_code == 200, answer.text
        return seconds


def probed(victim: Asker, prober: Asker, number: int, rng: random.Random) -> list[Probe]:
    found = []
    for _ in range(number):
        prompt, other = (rng.choices(TOKEN_IDS, k=PROMPT_LEN) for _ in range(2))
        was_computed = rng.random() < 0.5
        victim.ask(prompt if was_computed else other)
        found.append(Probe(prober.ask(prompt), was_computed))
    return found


def shown(name: str, probes: Sequence[Probe]) -> str:
    half = [
        sorted(each.seconds for each in probes if each.was_computed is computed)
        for computed in (True, False)
    ]
    medians = " and ".join(f"{1000 * each[len(each) // 2]:.2f}" for each in half)
    return (
        f"{name}: AUC {auc(probes):.3f} over {len(probes)} probes; medians of computed and other"
        f" {medians} ms; load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probes", type=int, default=2000)
    parser.add_argument("--own", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    rng = random.Random(chosen.seed)
    keys = ",".join(TENANTS)
    with (
        tempfile.TemporaryDirectory() as folder,
        up(Path(folder), FERRYMAN_API_KEYS=keys) as cluster,
    ):
        one, two = (Asker(cluster, key) for key in TENANTS)
        probed(one, two, 20, rng)  # everything is warm
        print(shown("its own", probed(one, one, chosen.own, rng)), flush=True)
        print(shown("another tenant's", probed(one, two, chosen.probes, rng)), flush=True)


if __name__ == "__main__":
    main()
