"""Asks a card all questions that this repository has for one, within the time that is given.

    bash tools/card/check.sh --wheels FOLDER --out RESULTS

Each part runs in a process of its own, and may take its own time and what earlier parts left of
theirs: one that hangs takes nothing from those after it. All share what Triton compiles. The output
of each is kept in the folder of results, with `check.json`; a table comes last. Exit status 1 if a
part failed or did not end.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tools.campaigns.published_sizes import forget_memory, saved_model
from tools.card.parts import ALL_SECONDS, DRY, MODEL_SECONDS, ON_CARD, CheckPart, parts_of

from ferryman_bench.hardware import machine_now
from ferryman_bench.random_model import write_tokenizer


@dataclass(frozen=True, slots=True)
class PartResult:
    """One part's end: its exit status, or None if its time was over first."""

    name: str
    status: int | None
    seconds: float
    figures: dict[str, str]
    heading: str = ""

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
            part.command_within(seconds),
            stdout=output,
            stderr=errors,
            # Unbuffered: what was written stays, however the part ends.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **part.environment},
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    took = round(time.monotonic() - began, 1)
    figures = dict(part.figures(path.read_text()))
    return PartResult(part.name, status, took, figures, part.heading)


def _end(process: subprocess.Popen[bytes]) -> None:
    """A part's processes end with it, also those that it left when it failed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def device_name(device: str) -> str:
    if device == "cpu":
        return str(machine_now())
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"


def show(title: str, results: Sequence[PartResult]) -> None:
    print(f"\n{title}")
    for result in results:
        heading = f" ({result.heading})" if result.heading else ""
        print(f"\n{result.name}: {result.ending}, {result.seconds} s{heading}")
        for name, value in result.figures.items():
            print(f"    {name:32} {value}")


def check(device: str, seconds: float, out: Path, names: Sequence[str]) -> Sequence[PartResult]:
    """All parts, or those of these names, within `seconds`."""
    size, scale = DRY if device == "cpu" else ON_CARD, seconds / ALL_SECONDS
    end = time.monotonic() + MODEL_SECONDS * scale
    results: list[PartResult] = []
    with saved_model(size.model, 0, device) as (folder, model), _shared_compiler_cache():
        write_tokenizer(folder)
        del model
        forget_memory()
        for part in parts_of(size, device, folder):
            if names and part.name not in names:
                continue
            end += part.seconds * scale
            left = max(end - time.monotonic(), 1.0)
            print(f"{part.name}: at most {left:.0f} s", flush=True)
            results.append(run_part(part, left, out))
            _keep(device, results, out)
    return results


@contextmanager
def _shared_compiler_cache() -> Iterator[None]:
    """A folder for what Triton compiles, if the environment names none: a kernel is compiled once
    for all parts, also on a machine without a home."""
    with tempfile.TemporaryDirectory(prefix="ferryman-triton-") as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        yield


def _keep(device: str, results: Sequence[PartResult], out: Path) -> None:
    """Written after each part: whoever ends the run has what there is."""
    kept = {"device": device_name(device), "parts": [asdict(result) for result in results]}
    (out / "check.json").write_text(json.dumps(kept, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="of all parts")
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
