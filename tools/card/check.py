"""Asks a card all questions that this repository has for one, within the time that is given.

    bash tools/card/check.sh --wheels FOLDER --out RESULTS

Each part runs in a process of its own, with a share of the time: one that hangs costs its share
alone. The output of each is kept in the folder of results, with `check.json`; a table comes last.
Exit status 1 if a part failed or did not end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tools.campaigns.published_sizes import forget_memory, saved_model
from tools.card.parts import DRY, ON_CARD, CheckPart, parts_of

from ferryman_bench.hardware import machine_now
from ferryman_bench.random_model import write_tokenizer

MODEL_SHARE = 0.15
"""The share of the time that a model's random weights may take before the others begin."""


@dataclass(frozen=True, slots=True)
class PartResult:
    """One part's end: its exit status, or None if its time was over first."""

    name: str
    status: int | None
    seconds: float
    figures: dict[str, str]

    @property
    def ending(self) -> str:
        if self.status is None:
            return "no end in its time"
        return "done" if self.status == 0 else f"failed ({self.status})"


def run_part(part: CheckPart, seconds: float, out: Path) -> PartResult:
    """Runs a part, with its output in `out`. Processes that it started end with it."""
    began = time.monotonic()
    path = out / f"{part.name}.txt"
    with path.open("w") as output, (out / f"{part.name}.err").open("w") as errors:
        process = subprocess.Popen(
            part.command,
            stdout=output,
            stderr=errors,
            env={**os.environ, **part.environment},
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    took = round(time.monotonic() - began, 1)
    return PartResult(part.name, status, took, dict(part.figures(path.read_text())))


def _end(process: subprocess.Popen[bytes]) -> None:
    """A cluster's processes end with the `bench` that started them."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def device_name(device: str) -> str:
    if device == "cpu":
        return str(machine_now())
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"


def show(title: str, results: Sequence[PartResult]) -> None:
    print(f"\n{title}")
    for result in results:
        print(f"\n{result.name}: {result.ending}, {result.seconds} s")
        for name, value in result.figures.items():
            print(f"    {name:32} {value}")


def check(device: str, seconds: float, out: Path, names: Sequence[str]) -> Sequence[PartResult]:
    """All parts, or those of these names."""
    size, end = DRY if device == "cpu" else ON_CARD, time.monotonic() + seconds
    results = []
    with saved_model(size.model, size.layers, device) as (folder, model):
        write_tokenizer(folder)
        del model
        forget_memory()
        for part in parts_of(size, device, folder):
            if names and part.name not in names:
                continue
            left = min(part.share / (1 - MODEL_SHARE) * seconds, end - time.monotonic())
            print(f"{part.name}: at most {left:.0f} s", flush=True)
            results.append(run_part(part, max(left, 1.0), out))
            _keep(device, results, out)
    return results


def _keep(device: str, results: Sequence[PartResult], out: Path) -> None:
    """Written after each part: whoever ends the run has what there is."""
    kept = {"device": device_name(device), "parts": [asdict(result) for result in results]}
    (out / "check.json").write_text(json.dumps(kept, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=360.0, help="of all parts together")
    parser.add_argument("--out", type=Path, help="folder of the results; default: a new one")
    parser.add_argument("--only", default="", help="names of parts, with commas")
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="ferryman-card-"))
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in given.only.split(",") if name]
    results = check(given.device, given.seconds, out, names)
    show(f"{device_name(given.device)}; all output in {out}", results)
    return 0 if all(result.status == 0 for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
