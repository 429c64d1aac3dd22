"""Processor time that the locks cost, for a request and for a hand-off: by hand, some minutes.

    python -m tests.campaigns.locks_cost --rounds 9

Two clusters of `ferryman up`, one with its defaults and one `--insecure`, take turns. A round is so
many requests one after the other; its figure is the processor time of all processes of the cluster,
broker and index too, for each. `hand-off` asks for one token of a prompt that nobody asked before,
so each request is one hand-off and nothing else; `request` asks for 64 tokens besides.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx
from tests.system.test_up import Up, up

TOKEN_IDS = range(20, 700)
FAILSAFE_SECONDS = 120
TICKS = os.sysconf("SC_CLK_TCK")
# Tokens of the prompt, and of the answer.
LENGTHS = {"hand-off": (40, 1), "long hand-off": (1024, 1), "request": (40, 64)}


class MeasuredCluster:
    """A cluster, and the processor time that its processes have used."""

    def __init__(self, cluster: Up) -> None:
        self._pids = tuple(cluster.pids.values())
        self._web = httpx.Client(base_url=cluster.said["http"], timeout=FAILSAFE_SECONDS)

    def milliseconds(self, prompt_len: int, max_tokens: int, number: int, seed: int) -> float:
        """Of processor time for each of `number` requests."""
        rng, before = random.Random(seed), self._ticks()
        for _ in range(number):
            prompt = rng.choices(TOKEN_IDS, k=prompt_len)
            body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
            answer = self._web.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        return 1000 * (self._ticks() - before) / TICKS / number

    def _ticks(self) -> int:
        """User and system time of all processes: fields 14 and 15 of proc(5)."""
        lines = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in self._pids]
        return sum(int(ticks) for line in lines for ticks in line.split()[11:13])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=40)
    chosen = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        locked, insecure = (
            MeasuredCluster(stack.enter_context(up(folder / name, *flags)))
            for name, flags in (("locked", ()), ("insecure", ("--insecure",)))
        )
        for name, lengths in LENGTHS.items():
            pairs = []
            for number in range(chosen.rounds + 1):
                order = (locked, insecure) if number % 2 else (insecure, locked)
                figure = {
                    each: each.milliseconds(*lengths, chosen.requests, seed=number)
                    for each in order
                }
                pairs.append((figure[locked], figure[insecure]))
            _show(name, pairs[1:])  # the first round warms


def _show(name: str, pairs: list[tuple[float, float]]) -> None:
    ratios = sorted(a / b for a, b in pairs)
    medians = [statistics.median(each) for each in zip(*pairs, strict=True)]
    print(
        f"{name}: locked {medians[0]:.2f} ms, insecure {medians[1]:.2f} ms; ratio"
        f" {statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f});"
        f" load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
