"""Launches that took the place of several: the choice of experts, a draw, and chains of a layer.

    python -m tools.card.launches --device cuda

Each is timed twice: as the host launches it, and on the card alone, as a replayed graph. Prints
JSON of microseconds, "before / now". Choices and tokens must be the same, and numbers of a layer
within a rounding. Without a card both sides are operations of the processor: that shows that the
script runs, and no more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from time import perf_counter

import torch
from tools.card.layer_pairs import TwoWays, layer_pairs
from tools.card_timer import seconds_on_card
from torch import Tensor

from ferryman.model.sampling.inverse_cdf import Filters, _choose, _ranked, _total
from ferryman.model.sampling.sampler import sample
from ferryman_kernels.elementwise.expert_choice import (
    NO_NUMBERS,
    ExpertGroups,
    ExpertNumbers,
    ExpertRule,
    Measure,
    ShareSum,
    choose_experts,
    choose_experts_reference,
)

CALLS = 30
CARD_SIZES, DRY_SIZES = ((1, 32, 2048), (100_352, 151_936)), ((1, 3), (300,))
"""Tokens whose experts are chosen; vocabularies that 1 and 32 rows are drawn from."""
RULES = {
    "512 experts, softmax of 10": (512, ExpertRule(10, Measure.SOFTMAX_OF_CHOSEN)),
    "256 experts, 8 of 4 groups": (
        256,
        ExpertRule(8, Measure.SIGMOID, ExpertGroups(8, 4, 2), ShareSum(added=1e-20), 2.5),
    ),
}


def choices(device: torch.device, tokens: tuple[int, ...]) -> Iterator[TwoWays]:
    for name, (experts, rule) in RULES.items():
        numbers = NO_NUMBERS
        if rule.groups.count > 1:
            numbers = ExpertNumbers(bias=torch.rand(experts, device=device) / 10)
        for count in tokens:
            scores = torch.randn(count, experts, device=device)
            given = scores, rule, numbers, torch.bfloat16
            before = partial(_chosen, choose_experts_reference, *given)
            yield TwoWays(
                f"{name}, {count} tokens", before, partial(_chosen, choose_experts, *given)
            )


def _chosen(choose: Callable[..., tuple[Tensor, Tensor]], *given: object) -> Tensor:
    return choose(*given)[1]


def draws(device: torch.device, vocabularies: tuple[int, ...]) -> Iterator[TwoWays]:
    for vocab in vocabularies:
        for rows in (1, 32):
            logits = (3 * torch.randn(rows, vocab, device=device)).bfloat16()
            filters = _filters(rows, device)
            yield TwoWays(
                f"draw, {rows} rows of {vocab}",
                partial(_drawn_by_torch, logits, filters),
                partial(sample, logits, filters),
            )


def _filters(rows: int, device: torch.device) -> Filters:
    real = torch.ones(rows, dtype=torch.float64, device=device)
    uniforms = torch.rand(rows, dtype=torch.float64, device=device)
    top_k = torch.full((rows,), 50, device=device)
    indices = torch.arange(rows, device=device)
    return Filters(indices, uniforms, 0.8 * real, top_k, 0.95 * real, 0.01 * real)


def _drawn_by_torch(logits: Tensor, filters: Filters) -> Tensor:
    """The draw before, but for its two running sums, which a kernel made."""
    tokens, rows = logits.argmax(dim=-1), logits[filters.indices].float()
    chosen, _ = _choose(_ranked(rows), _total(rows, filters), filters, rows.shape[1])
    tokens[filters.indices] = chosen
    return tokens


def launched_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The mean of calls that wait for the card at the end alone."""
    run()
    _wait(device)
    began = perf_counter()
    for _ in range(CALLS):
        run()
    _wait(device)
    return (perf_counter() - began) / CALLS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(ways: TwoWays, device: torch.device) -> dict[str, str]:
    timers: dict[str, Callable[[Callable[[], object]], float]] = {
        "launched": partial(launched_seconds, device=device)
    }
    if device.type == "cuda":
        timers["on the card"] = seconds_on_card
    return {
        f"{ways.name}, {name}": f"{timer(ways.before) * 1e6:.1f} / {timer(ways.now) * 1e6:.1f} µs"
        for name, timer in timers.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    tokens, vocabularies = CARD_SIZES if device.type == "cuda" else DRY_SIZES
    torch.manual_seed(7)
    figures, differing = dict[str, str](), list[str]()
    with torch.inference_mode():
        parts = choices(device, tokens), draws(device, vocabularies), layer_pairs(device, tokens)
        for ways in chain.from_iterable(parts):
            if not ways.agree():
                differing.append(ways.name)
            figures |= timed(ways, device)
    figures["other choices, tokens or numbers"] = ", ".join(differing) or "none"
    print(json.dumps(figures, ensure_ascii=False))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
