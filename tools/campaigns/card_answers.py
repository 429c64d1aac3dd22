"""Whole models of published sizes on a card, with random weights: are their answers right?

Run by hand where there is a card, with transformers installed; `--device cpu` runs it without one:

    python -m tools.campaigns.card_answers granite-4.0-h-micro

It compares log probabilities with those of transformers for the same tokens, then each way in which
state is reused with the cold run: found in the prefix tree, brought by a hand-off over each plane.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tests.engine.host_fed import PAGE_SIZE
from tests.harness.pair import WorkerPair, pair_with, request_of, worker_options
from tests.oracle import Float64Mode
from tools.campaigns.published_sizes import (
    Prompt,
    forget_memory,
    prompts_of,
    saved_model,
    size_parser,
)

from ferryman.llm import LLM, Completion
from ferryman.schedule.request import SamplingParams
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.plane_values import PlaneChoice

PROMPT_LENS = (701, 333, 65)
CHUNK_TOKENS = 512
"""The longest prompt takes two steps."""

NEW_TOKENS = 16
SAMPLING = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, logprobs=5, ignore_eos=True)
DTYPES = ("float64", "bfloat16")


def check_answers(name: str, num_layers: int, device: str) -> None:
    with saved_model(name, num_layers, device) as (folder, model):
        print(f"{name}: {model.num_parameters() / 1e9:.2f} G parameters", flush=True)
        # The other implementations have no float64.
        model.config._attn_implementation = model.config._experts_implementation = "eager"
        prompts = prompts_of(PROMPT_LENS, model.config.vocab_size)
        for dtype in DTYPES:
            found = reused_answers(folder, dtype, device, prompts)
            model = model.to(getattr(torch, dtype))
            worst = max(map(distance_to(model), found))
            print(f"{dtype}: log probabilities within {worst:.2e} of transformers", flush=True)
        del model
        forget_memory()
        for dtype in DTYPES:
            asyncio.run(check_handed_off(folder, dtype, device, prompts))


def reused_answers(
    folder: Path, dtype: str, device: str, prompts: list[Prompt]
) -> list[Completion]:
    """Answers of a cold run, which those on state found in the prefix tree are compared with."""
    with LLM(
        folder,
        dtype=dtype,
        device=device,
        page_size=PAGE_SIZE,
        chunk_tokens=CHUNK_TOKENS,
        memory_bytes=4 << 30,
    ) as llm:
        cold, hits = (llm.generate(prompts, SAMPLING) for _ in range(2))
    forget_memory()
    reused = [sum(hit.cached_tokens.values()) for hit in hits]
    assert all(n >= len(p) - PAGE_SIZE for n, p in zip(reused, prompts, strict=True)), reused
    pairs = list(zip(hits, cold, strict=True))
    num_same = sum(hit.token_ids == right.token_ids for hit, right in pairs)
    assert dtype != "float64" or num_same == len(pairs)
    worst = max(_distance(hit, right) for hit, right in pairs)
    print(
        f"{dtype}: on {sum(reused)} tokens of the prefix tree {num_same} of {len(pairs)} answers "
        f"have the same tokens; log probabilities within {worst:.2e}",
        flush=True,
    )
    return cold


def _distance(one: Completion, other: Completion) -> float:
    """The largest difference of log probabilities up to the first token that differs."""
    worst = 0.0
    rows = zip(one.logprobs, other.logprobs, one.token_ids, other.token_ids, strict=True)
    for found, expected, token, right in rows:
        common = found.keys() & expected.keys()
        worst = max([worst, *(abs(found[name] - expected[name]) for name in common)])
        if token != right:
            break
    return worst


def distance_to(model: Any) -> Callable[[Completion], float]:
    """A function of an answer: the largest difference of a log probability from the model's."""

    @torch.inference_mode()
    def distance(answer: Completion) -> float:
        told = [*answer.prompt_token_ids, *answer.token_ids]
        ids = torch.tensor([told], device=model.device)
        with Float64Mode() if model.dtype == torch.float64 else nullcontext():
            logits = model(ids, use_cache=False, logits_to_keep=NEW_TOKENS + 1).logits[0, :-1]
        expected = logits.double().log_softmax(-1).cpu()
        pairs = zip(answer.logprobs, expected, strict=True)
        return max(
            abs(logprob - float(row[token]))
            for found, row in pairs
            for token, logprob in found.items()
        )

    return distance


async def check_handed_off(folder: Path, dtype: str, device: str, prompts: list[Prompt]) -> None:
    """Prefilled by one worker, decoded by the other: the tokens of an engine that does both."""
    both: dict[str, Any] = {"dtype": dtype, "device": device, "memory_bytes": 4 << 30}
    steps = {"page_size": PAGE_SIZE, "chunk_tokens": CHUNK_TOKENS}
    with LLM(folder, prefix_cache=False, **steps, **both) as llm:
        expected = [list(one.token_ids) for one in llm.generate(prompts, SAMPLING)]
    forget_memory()
    prefills, decodes = (
        worker_options(folder, CHUNK_TOKENS, decodes=decodes).model_copy(update=both)
        for decodes in (False, True)
    )
    planes: tuple[PlaneChoice, ...] = ("nixl-unlocked", "grpc") if has_nixl() else ("grpc",)
    for plane in planes:
        async with pair_with(prefills, decodes, plane) as pair:
            found, seconds = await handed_off(pair, prompts)
        forget_memory()
        assert dtype != "float64" or found == expected, (plane, found, expected)
        num_same = sum(one == other for one, other in zip(found, expected, strict=True))
        shown = ", ".join(f"{each * 1e3:.0f}" for each in seconds)
        print(
            f"{dtype}, {plane}: {num_same} of {len(prompts)} handed off with the same tokens; "
            f"prefill and hand-off {shown} ms",
            flush=True,
        )


async def handed_off(
    pair: WorkerPair, prompts: list[Prompt]
) -> tuple[list[list[int]], list[float]]:
    """The tokens of each, and the seconds until decode had it."""
    found, seconds = [], []
    for number, prompt in enumerate(prompts):
        asked = request_of(pair, f"r{number}", prompt, SAMPLING)
        began = time.perf_counter()
        progress = await pair.run_prefill(pair.order(asked, deadline=600.0))
        seconds.append(time.perf_counter() - began)
        assert progress[-1].HasField("handed_off")
        tokens, _ = await pair.read_tokens(asked.request_id)
        found.append(tokens)
    return found, seconds


if __name__ == "__main__":
    chosen = size_parser(__doc__).parse_args()
    check_answers(chosen.name, chosen.layers, chosen.device)
