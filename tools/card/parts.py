"""The parts of a card's check: what each runs, how long it may, and the figures of its output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.campaigns.published_sizes import NARROW
from tools.card.figures import Figures, bits_figures, json_figures, pytest_figures

TIME_LEFT = "TIME_LEFT"
"""Stands in a command for whole seconds, somewhat less than the part may take."""
MARGIN_SECONDS = 10
MODEL_SECONDS = 30.0
"""For a model's random weights, before the parts begin."""
ALL_SECONDS = 360.0
GPU_TESTS = (
    "tests/kernels/test_on_cuda.py",
    "tests/engine/test_cuda_stream.py",
    "tests/engine/test_cuda_graphs.py",
)
"""All files whose tests have the mark `gpu`: to collect all others takes longer than these run."""
CARD_BITS = (
    "--models", "wide_granite,wide_qwen3_next",
    "--ways", "again,chunks-32,hit-last,host,batch-6,turn-2",
)  # fmt: skip
"""A sample: all questions to kernels, 2 of 9 models, 6 of 12 ways. The whole takes 480 s."""
DRY_BITS = ("--kernels", "latents", "--models", "bamba", "--ways", "again,hit-last")
"""Equal without compiled loops, too, which a bare machine does not have."""
EQUIVALENCE, EXACTNESS = "tests/engine/test_equivalence.py", "tests/system/test_exactness.py"


@dataclass(frozen=True, slots=True)
class CheckPart:
    """A command, the seconds that it may take, and how its figures stand in its output. A part
    whose command fails, or does not end, has its figures all the same. `heading` says how to read
    them."""

    name: str
    seconds: float
    command: tuple[str, ...]
    figures: Callable[[str], Figures]
    environment: Mapping[str, str] = field(default_factory=dict)
    heading: str = ""

    def command_within(self, seconds: float) -> tuple[str, ...]:
        """The command, which ends by itself in time if it looks at a clock."""
        left = str(max(1, int(seconds - MARGIN_SECONDS)))
        return tuple(left if word == TIME_LEFT else word for word in self.command)


@dataclass(frozen=True, slots=True)
class CheckSize:
    """The model, the loads and the tests of a check, for a card or for a dry run."""

    model: str
    concurrent: str
    prompt_len: int
    max_tokens: int
    long_prompt_len: int
    memory: str
    batches: tuple[str, ...]
    bits: tuple[str, ...]
    kernel_tests: tuple[str, ...]
    engine_tests: tuple[str, ...]
    system_tests: tuple[str, ...]
    launches: str


ON_CARD = CheckSize(
    model="granite-4.0-h-micro",
    concurrent="1,8,32,64",
    prompt_len=512,
    max_tokens=128,
    long_prompt_len=8192,
    memory="20G",
    batches=("1", "32", "128"),
    bits=CARD_BITS,
    kernel_tests=("-m", "gpu", *GPU_TESTS),
    engine_tests=(EQUIVALENCE, "-k", "granite_moe or bamba"),
    system_tests=(EXACTNESS, "-k", "Bamba"),
    launches="before / now",
)
DRY = CheckSize(
    model=NARROW,
    concurrent="1,2",
    prompt_len=48,
    max_tokens=32,
    long_prompt_len=256,
    memory="256M",
    batches=("1", "2"),
    bits=DRY_BITS,
    kernel_tests=("-k", "small_numbers", "tests/kernels/test_rms_norm.py"),
    engine_tests=(EQUIVALENCE, "-k", "bamba and cold_then_hit"),
    system_tests=(EXACTNESS, "-k", "Bamba and cold_then_hit"),
    launches="before / now: both are torch's operations here, so it shows only that the part runs",
)


def parts_of(size: CheckSize, device: str, model: Path) -> tuple[CheckPart, ...]:
    """All parts, in their order; `model` is the model's folder.

    The first one compiles the model's kernels, alone, into the cache that all parts share. Parts
    whose answers are wanted most follow; tests in float64, which compile their own, come last.
    """
    python, pytest = (sys.executable, "-m"), (sys.executable, "-m", "pytest", "-q")
    of_model = (str(model), "--device", device)
    on_device = {"FERRYMAN_TEST_DEVICE": device} if device != "cpu" else {}
    memory = ("--memory-bytes", size.memory)
    return (
        CheckPart(
            "decode",
            55,
            (
                *python, "tools.card.decode", *of_model, *memory, "--batches", *size.batches,
                "--max-tokens", str(size.max_tokens),
                "--long-prompt-len", str(size.long_prompt_len),
            ),
            json_figures,
        ),
        CheckPart(
            "cluster",
            80,
            (
                *python, "tools.card.cluster", *of_model, *memory, "--concurrent", size.concurrent,
                "--prompt-len", str(size.prompt_len), "--max-tokens", str(size.max_tokens),
            ),
            json_figures,
        ),
        CheckPart(
            "hits",
            45,
            (
                *python, "tools.card.hits", *of_model, *memory,
                "--prompt-len", str(size.long_prompt_len),
            ),
            json_figures,
        ),
        CheckPart("kernels", 35, (*pytest, *size.kernel_tests), pytest_figures),
        CheckPart(
            "launches",
            15,
            (*python, "tools.card.launches", "--device", device),
            json_figures,
            heading=size.launches,
        ),
        CheckPart(
            "bits",
            50,
            (
                *python, "tools.campaigns.card_bits", "--device", device, *size.bits,
                "--no-price", "--seconds", TIME_LEFT,
            ),
            bits_figures,
        ),
        CheckPart(
            "engines in float64", 25, (*pytest, *size.engine_tests), pytest_figures, on_device
        ),
        CheckPart(
            "systems in float64", 25, (*pytest, *size.system_tests), pytest_figures, on_device
        ),
    )  # fmt: skip
