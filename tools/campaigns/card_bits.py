"""Does a card keep bits under `--exactness bits`, and what does it cost?

Run by hand where there is a card; `--device cpu` runs it without one, by the processor's loops:

    python -m tools.campaigns.card_bits --seconds 480

First each kernel is asked for the same rows alone, among others and in other parts: a kernel that
fails here explains the tables behind it. Then the table of bits of some tiny models and of wide
ones, then the speed of a wide model under `values` and under `bits`, in turn. Nothing begins when
so many seconds are over; what was not reached is said. Exit status 1 if anything differed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from tools.bits.models import saved_model
from tools.bits.step_record import recorded_steps
from tools.bits.table import BitsCell, as_text, measured_cells
from tools.bits.ways import WAYS
from tools.campaigns.asked_rows import ROW_QUESTIONS, differing_rows
from tools.campaigns.card_speed import seconds_of
from tools.campaigns.published_sizes import Prompt, forget_memory, prompts_of

from ferryman.llm import LLM

MODELS = "wide_llama,llama,wide_granite,bamba,wide_qwen3_next,qwen3_next,gpt_oss,deepseek_v3,gemma3"
SOME_WAYS = (
    "again,chunks-32,chunks-48,hit-last,host,batch-6,batch-24,drafts-model,retracted,turn-2,"
    "replay,overlap"
)
PRICED = ("wide_llama", "wide_granite", "wide_qwen3_next")
VOCAB = 2_048
"""Of the wide models."""
BATCHES = (1, 8, 32)
PROMPT_LEN, NEW_TOKENS, LAPS = 512, 32, 3


class GivenTime:
    """The end of the time, and what was not begun before it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.missed: list[str] = []

    def reached(self, what: str) -> bool:
        if time.monotonic() < self._end:
            return False
        self.missed.append(what)
        return True


def ask_kernels(device: str, deadline: GivenTime, names: Sequence[str]) -> bool:
    """Whether no row differs. A question that a kernel refuses is told, and counts as a failure."""
    is_exact = True
    for name, question in ROW_QUESTIONS.items():
        if not any(name.startswith(chosen) for chosen in names):
            continue
        if deadline.reached(name):
            continue
        try:
            found = differing_rows(question, torch.device(device))
        except Exception as error:  # the other kernels are asked all the same
            found = f"{type(error).__name__}: {error}".splitlines()[0]
        is_exact = is_exact and not found
        print(f"{name}: {found or 'equal'}", flush=True)
    return is_exact


def ask_models(
    device: str, models: Sequence[str], ways: Sequence[str], deadline: GivenTime
) -> list[BitsCell]:
    cells: list[BitsCell] = []
    with recorded_steps() as record:
        for name in models:
            if deadline.reached(f"table of {name}"):
                continue
            for cell in measured_cells(
                [name],
                ["bfloat16"],
                [WAYS[way] for way in ways],
                record,
                num_prompts=1,
                num_tokens=16,
                device=device,
            ):
                cells.append(cell)
                print(f"{cell.model} {cell.way}: {cell_text(cell)}", flush=True)
                if deadline.reached(f"ways of {name} behind {cell.way}"):
                    break
            forget_memory()
    return cells


def cell_text(cell: BitsCell) -> str:
    if not cell.tried:
        return "not tried"
    return "equal" if cell.is_exact else f"tokens and bits equal, of tried: {cell.text}"


def show_prices(device: str, deadline: GivenTime) -> None:
    for name in PRICED:
        if deadline.reached(f"price of {name}"):
            continue
        with saved_model(name, 1) as model:
            rates = {level: dict(_rates(model.folder, device, level)) for level in LEVELS}
        for what, fastest in rates["values"].items():
            exact = rates["bits"][what]
            ratio = exact / fastest
            line = f"{name} {what}: values {fastest:.0f}, bits {exact:.0f} tokens/s ({ratio:.2f})"
            print(line, flush=True)


LEVELS = ("values", "bits")


def _rates(folder: Path, device: str, exactness: str) -> Iterator[tuple[str, float]]:
    """Tokens a second, the best of some laps: of a prefill, and of decode behind it."""
    with LLM(
        folder,
        dtype="bfloat16",
        device=device,
        exactness=exactness,
        max_running=max(BATCHES),
        memory_bytes=1 << 30,
        prefix_cache=False,
    ) as llm:
        one = prompts_of([PROMPT_LEN], VOCAB)
        yield f"prefill {PROMPT_LEN}", PROMPT_LEN / _best(llm, one, 1)
        for batch in BATCHES:
            prompts = prompts_of([16] * batch, VOCAB)
            more = _best(llm, prompts, 1 + NEW_TOKENS) - _best(llm, prompts, 1)
            yield f"decode {batch}", batch * NEW_TOKENS / max(1e-9, more)
    forget_memory()


def _best(llm: LLM, prompts: Sequence[Prompt], num_tokens: int) -> float:
    return min(seconds_of(llm, list(prompts), num_tokens) for _ in range(LAPS))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default=MODELS, help="names as of tools.bits, with commas")
    parser.add_argument("--ways", default=SOME_WAYS)
    parser.add_argument("--kernels", default="", help="how their questions begin, with commas")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--no-price", action="store_true")
    chosen = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    deadline = GivenTime(chosen.seconds)
    is_exact = ask_kernels(chosen.device, deadline, chosen.kernels.split(","))
    cells = ask_models(chosen.device, chosen.models.split(","), chosen.ways.split(","), deadline)
    print(as_text(cells), flush=True)
    if not chosen.no_price:
        show_prices(chosen.device, deadline)
    if deadline.missed:
        print("not reached:", ", ".join(deadline.missed))
    return int(not (is_exact and all(cell.is_exact for cell in cells)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
