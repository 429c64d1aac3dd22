"""Processor time that locks or TLS cost, for a request and for a hand-off: by hand, some minutes.

    python -m tools.campaigns.locks_cost --rounds 9
    python -m tools.campaigns.locks_cost --rounds 9 --compare tls locked --planes grpc

Two clusters of `ferryman up`, one with its defaults and one `--insecure`, or one with certificates
and one with its defaults, take turns. Their connections are there before the first round, so no
handshake is in it. A round is so many requests one after the other; its figure is the processor
time of all processes of the cluster, broker and index too, for each. `hand-off` asks for one token
of a prompt that nobody asked before, so each request is one hand-off and nothing else; `request`
asks for 64 tokens besides.
"""

from __future__ import annotations

import argparse
import os
import random
import ssl
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx
from tests.certificates import make_certificates
from tests.harness.cluster import Up, up

TOKEN_IDS = range(20, 700)
FAILSAFE_SECONDS = 120
TICKS = os.sysconf("SC_CLK_TCK")
KINDS: dict[str, tuple[str, ...]] = {"locked": (), "insecure": ("--insecure",), "tls": ()}
# Tokens of the prompt, and of the answer.
LENGTHS = {"hand-off": (40, 1), "long hand-off": (1024, 1), "request": (40, 64)}


class MeasuredCluster:
    """A cluster, and the processor time that its processes have used."""

    def __init__(self, cluster: Up, trusted: ssl.SSLContext) -> None:
        self._pids = tuple(cluster.pids.values())
        place = cluster.said["http"]
        self._web = httpx.Client(base_url=place, verify=trusted, timeout=FAILSAFE_SECONDS)

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
    parser.add_argument("--compare", nargs=2, choices=KINDS, default=["locked", "insecure"])
    parser.add_argument("--planes", default="auto", help="NIXL has no lock and no TLS")
    chosen = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certificates = make_certificates(folder / "certificates")
        trusted = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        flags = {**KINDS, "tls": ("--tls-dir", str(certificates))}
        one, other = (
            MeasuredCluster(stack.enter_context(each), trusted)
            for each in (
                up(folder / name, *flags[name], FERRYMAN_PLANES=chosen.planes)
                for name in chosen.compare
            )
        )
        for name, lengths in LENGTHS.items():
            pairs = []
            for number in range(chosen.rounds + 1):
                order = (one, other) if number % 2 else (other, one)
                figure = {
                    each: each.milliseconds(*lengths, chosen.requests, seed=number)
                    for each in order
                }
                pairs.append((figure[one], figure[other]))
            _show(name, chosen.compare, pairs[1:])  # the first round warms


def _show(name: str, kinds: list[str], pairs: list[tuple[float, float]]) -> None:
    ratios = sorted(a / b for a, b in pairs)
    medians = [statistics.median(each) for each in zip(*pairs, strict=True)]
    print(
        f"{name}: {kinds[0]} {medians[0]:.2f} ms, {kinds[1]} {medians[1]:.2f} ms; ratio"
        f" {statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f});"
        f" load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
