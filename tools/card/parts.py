"""The parts of a card's check: what each runs, how long it may, and the figures of its output."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Figures = Mapping[str, str]
TOTALS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
RATE = re.compile(r"^(.+): (\d+) tokens/s$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CheckPart:
    """A command, its share of the time, and how its figures stand in its output. A part whose
    command fails has its figures all the same."""

    name: str
    share: float
    command: tuple[str, ...]
    figures: Callable[[str], Figures]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckSize:
    """The model and the loads of a check, for a card or for a dry run."""

    model: str
    layers: int
    concurrent: str
    prompt_len: int
    max_tokens: int
    long_prompt_len: int
    memory: str
    max_running: int
    batches: tuple[str, ...]


ON_CARD = CheckSize(
    "granite-4.0-h-micro", 0, "1,8,32,64", 512, 128, 8192, "40G", 64, ("1", "32", "128")
)
DRY = CheckSize("granite-4.0-h-tiny", 1, "1,2", 48, 8, 256, "256M", 4, ("1", "2"))


def parts_of(size: CheckSize, device: str, model: Path) -> tuple[CheckPart, ...]:
    """All parts, those first whose answers are wanted most; `model` is the model's folder."""
    python, pytest = (sys.executable, "-m"), (sys.executable, "-m", "pytest", "-q")
    on_device = {"FERRYMAN_TEST_DEVICE": device} if device != "cpu" else {}
    gpu = ("-m", "gpu") if device != "cpu" else ("-k", "small_numbers")
    return (
        CheckPart(
            "cluster",
            0.28,
            (
                *python, "ferryman_cli", "bench", "requests", "--model", str(model),
                "--device", device, "--worker", "apart,both", "--concurrent", size.concurrent,
                "--prompt-len", str(size.prompt_len), "--max-tokens", str(size.max_tokens),
                "--memory-bytes", size.memory, "--max-running", str(size.max_running),
                "--rounds", "1", "--json",
            ),
            request_figures,
        ),
        CheckPart(
            "hits",
            0.14,
            (
                *python, "tools.card.hits", str(model), "--device", device,
                "--prompt-len", str(size.long_prompt_len), "--memory-bytes", size.memory,
            ),
            json_figures,
        ),
        CheckPart(
            "kernels", 0.14, (*pytest, *gpu, "tests/kernels", "tests/engine"), pytest_figures
        ),
        CheckPart(
            "bits",
            0.16,
            (*python, "tools.campaigns.card_bits", "--device", device, "--seconds", "45"),
            last_lines,
        ),
        CheckPart(
            "launches",
            0.08,
            (*python, "tools.card.launches", "--device", device),
            json_figures,
        ),
        CheckPart(
            "speed",
            0.1,
            (
                *python, "tools.campaigns.card_speed", size.model, "--layers", str(size.layers),
                "--device", device, "--no-peer", "--batches", *size.batches,
            ),
            speed_figures,
        ),
        CheckPart(
            "float64",
            0.1,
            (*pytest, "-x", "tests/engine/test_equivalence.py", "-k", "granite_nope or bamba"),
            pytest_figures,
            on_device,
        ),
    )  # fmt: skip


def request_figures(output: str) -> Figures:
    """Tokens a second of each engine and number of streams."""
    rows = _json_of(output).get("rows", [])
    return {str(row["name"]): f"{row['median']:.0f} tok/s" for row in rows}


def json_figures(output: str) -> Figures:
    return {name: str(value) for name, value in _json_of(output).items()}


def pytest_figures(output: str) -> Figures:
    """The counts in pytest's last line."""
    return {what: count for count, what in TOTALS.findall(_last(output.splitlines()))}


def speed_figures(output: str) -> Figures:
    return {name: f"{rate} tok/s" for name, rate in RATE.findall(output)}


def last_lines(output: str) -> Figures:
    """The last lines, as they are."""
    return {str(number): line for number, line in enumerate(output.strip().splitlines()[-12:])}


def _last(lines: Iterable[str]) -> str:
    return next((line for line in reversed(list(lines)) if TOTALS.search(line)), "")


def _json_of(output: str) -> Mapping[str, Any]:
    """The object that the output ends with; an empty one if there is none."""
    begin = output.find("{")
    try:
        value = json.loads(output[begin:]) if begin >= 0 else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
