"""Whether an audit of a share of the requests finds faults of reuse: by hand, a quarter of an hour.

    python -m tools.campaigns.audit --share 0.01 --requests 2000 --sound 20000

Each of eight faults is planted in running engines with tiny models, alone, and requests come until
the audit finds it: hits on the device, loads from the host, retractions, drafts, hand-offs between
two workers. Then sound requests, as many as were asked for, pass through four engines. A line says
how many requests it took, how many were audited, how often the fault struck, and how many tokens
were computed for the audit, of all that were computed or reused.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest
from tests.engine.audit_faults import FAULTS, ReuseFault, Strikes
from tests.engine.audited_engine import VOCAB, AuditedEngine, MixedTraffic, audited
from tests.harness.pair import WorkerPair, hand_off, pair_with, worker_options
from tests.model.comparison import random_config
from tests.tiny_models import save_random, save_tiny_model

from ferryman.cache.manifest import Kind
from ferryman.handoff import receiver as reservations
from ferryman.handoff.commit_check import Verified
from ferryman.handoff.effects import WriteFence
from ferryman.schedule.events import AuditResult
from ferryman.schedule.request import SamplingParams
from ferryman.wire.codec.pieces import Piece
from ferryman_decode.handoff_receiver import HandoffReceiver

SEED = 11
SOUND = (("gemma3", ""), ("gemma3", "ngram"), ("lfm2", ""), ("lfm2", "ngram"))


@dataclass(frozen=True, slots=True)
class AuditTrial:
    """The requests that one engine, or one pair, answered, and the audits among them."""

    name: str
    requests: int
    audits: int
    differences: int
    strikes: int
    share: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name:<34} {self.requests:>6} requests  {self.audits:>4} audits  "
            f"{self.differences:>3} different  {self.strikes:>6} strikes  "
            f"{self.share:.2%} of tokens  {self.seconds:.0f} s"
        )


def models(folder: Path) -> dict[str, Path]:
    for name in ("gemma3", "lfm2"):
        (folder / name).mkdir()
    return {
        "gemma3": save_tiny_model(folder / "gemma3", "gemma3"),
        "lfm2": save_random(folder / "lfm2", random_config("lfm2", 0), seed=1),
    }


def tried(
    name: str, folder: Path, fault: ReuseFault | None, draft: str, share: float, most: int
) -> AuditTrial:
    """Requests until the audit finds something, at most `most`."""
    strikes, began = Strikes(), monotonic()
    with audited(folder, "bfloat16", share, draft=draft) as engine:
        if fault is not None:
            fault.plant(engine, strikes)
        traffic = MixedTraffic(engine, SEED)
        while not engine.audits.differences and traffic.num_requests < most:
            traffic.ask(1)
        engine.check_integrity()
        return trial(name, engine, traffic.num_requests, strikes, monotonic() - began)


def trial(
    name: str, engine: AuditedEngine, num_requests: int, strikes: Strikes, seconds: float
) -> AuditTrial:
    results, budget = engine.audits.results, engine._engine.scheduler.audits.budget
    num_audits = results[AuditResult.EQUAL] + results[AuditResult.DIFFERENT]
    share = budget.spent / max(1.0, budget.earned / budget.share)
    found = len(engine.audits.differences)
    return AuditTrial(name, num_requests, num_audits, found, strikes.number, share, seconds)


async def tried_hand_off(name: str, folder: Path, share: float, most: int) -> AuditTrial:
    """Hand-offs with a wrong byte in one page, to a decode worker that checks no digests."""
    strikes, began = Strikes(), monotonic()
    write = HandoffReceiver.write

    def spoilt(self: HandoffReceiver, fence: WriteFence, piece: Piece) -> None:
        write(self, fence, piece)
        if piece.unit.kind is Kind.FULL and piece.unit.index == 1 and piece.offset == 0:
            slot = self._slots[fence.reservation_id][piece.unit.name].slot
            self._engine.transfer.read(Kind.FULL, slot)[5] ^= 1
            strikes.number += 1

    prefills = worker_options(folder, decodes=False).model_copy(update={"dtype": "bfloat16"})
    changes = {"dtype": "bfloat16", "audit_share": share}
    decodes = worker_options(folder).model_copy(update=changes)
    rng, num_requests = random.Random(SEED), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HandoffReceiver, "write", spoilt)
        patch.setattr(reservations, "check_commit", lambda *_: Verified())
        async with pair_with(prefills, decodes) as pair:
            while not audits(pair, "different") and num_requests < most:
                num_requests += 1
                prompt = [rng.choice(VOCAB) for _ in range(rng.randint(36, 60))]
                sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
                await hand_off(pair, f"r{num_requests}", prompt, sampling)
                await pair.read_tokens(f"r{num_requests}")
            budget = pair.decode.engine.scheduler.audits.budget
            found = audits(pair, "different")
            num_audits = found + audits(pair, "equal")
            part = budget.spent / max(1.0, budget.earned / budget.share)
    seconds = monotonic() - began
    return AuditTrial(name, num_requests, num_audits, found, strikes.number, part, seconds)


def audits(pair: WorkerPair, result: str) -> int:
    registry = pair.decode.parts.metrics.registry
    labels = {"result": result}
    return int(registry.get_sample_value("ferryman_decode_audits_total", labels) or 0)


def planted(folders: dict[str, Path], share: float, most: int) -> Iterator[AuditTrial]:
    for name, fault in FAULTS.items():
        yield tried(name, folders[fault.model], fault, fault.draft, share, most)
    name = "a hand-off without digests"
    yield asyncio.run(tried_hand_off(name, folders["gemma3"], share, most))


def sound(folders: dict[str, Path], share: float, number: int) -> Iterator[AuditTrial]:
    for model, draft in SOUND:
        name = f"sound: {model} {draft}".rstrip()
        yield tried(name, folders[model], None, draft, share, number // len(SOUND))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--sound", type=int, default=20_000)
    chosen = parser.parse_args(argv)
    with ExitStack() as stack:
        folders = models(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        trials = []
        for one in planted(folders, chosen.share, chosen.requests):
            print(one, flush=True)
            trials.append(one.differences > 0)
        for one in sound(folders, chosen.share, chosen.sound):
            print(one, flush=True)
            trials.append(one.differences == 0)
    return 0 if all(trials) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
