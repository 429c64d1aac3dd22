"""Whole models of published sizes on a card, with random weights: how fast are they?

Run by hand where there is a card, with transformers installed; `--device cpu` runs it without one:

    python -m tools.campaigns.card_speed qwen3-next-80b-a3b --layers 4

It prints the tokens a second of the offline engine, with graphs and without, beside transformers'
own cached forward.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tools.campaigns.published_sizes import (
    Prompt,
    forget_memory,
    prompts_of,
    saved_model,
    size_parser,
)

from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams

PROMPT_LEN, NEW_TOKENS, REPEATS = 128, 128, 3
LONG_PROMPT_LEN = 8192
MEMORY_BYTES = 16 << 30


def measure(
    name: str, num_layers: int, device: str, batches: Sequence[int], *, with_peer: bool
) -> None:
    with saved_model(name, num_layers, device) as (folder, model):
        print(f"{name}: {model.num_parameters() / 1e9:.2f} G parameters", flush=True)
        for batch in batches if with_peer else ():
            rate = peer_rate(model, batch)
            print(f"transformers, batch {batch}: {rate:.0f} tokens/s", flush=True)
        del model
        forget_memory()
        for replays in (True, False):
            measure_ours(folder, device, batches, replays=replays)
            forget_memory()


def measure_ours(folder: Path, device: str, batches: Sequence[int], *, replays: bool) -> None:
    with LLM(
        folder,
        device=device,
        replay_steps=replays,
        max_running=max(batches),
        memory_bytes=MEMORY_BYTES,
        prefix_cache=False,
    ) as llm:
        how = "replayed" if replays else "launched"
        for batch in batches:
            print(f"{how}, batch {batch}: {decode_rate(llm, batch):.0f} tokens/s", flush=True)
        rate = prefill_rate(llm)
        print(f"{how}: prefill of {LONG_PROMPT_LEN} {rate:.0f} tokens/s", flush=True)


def decode_rate(llm: LLM, batch: int) -> float:
    """Tokens a second behind the first one, of requests that run together."""
    prompts = prompts_of([PROMPT_LEN] * batch)
    short, long = (
        median(seconds_of(llm, prompts, num_tokens) for _ in range(REPEATS))
        for num_tokens in (1, 1 + NEW_TOKENS)
    )
    return batch * NEW_TOKENS / (long - short)


def prefill_rate(llm: LLM) -> float:
    prompts = prompts_of([LONG_PROMPT_LEN])
    return LONG_PROMPT_LEN / median(seconds_of(llm, prompts, 1) for _ in range(REPEATS))


def seconds_of(llm: LLM, prompts: list[Prompt], num_tokens: int) -> float:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, sampling)
    return time.perf_counter() - began


@torch.inference_mode()
def peer_rate(model: Any, batch: int, steps: int = 32) -> float:
    """Tokens a second of its cached forward, without the extra work of `generate`."""
    prompt = torch.tensor(prompts_of([PROMPT_LEN] * batch), device=model.device)
    found = model(prompt, use_cache=True, logits_to_keep=1)
    began = 0.0
    for step in range(steps + 2):
        if step == 2:
            _wait_for(model)
            began = time.perf_counter()
        token_ids = found.logits.argmax(-1)
        found = model(token_ids, past_key_values=found.past_key_values, use_cache=True)
    _wait_for(model)
    return batch * steps / (time.perf_counter() - began)


def _wait_for(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = size_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--no-peer", action="store_true", help="without transformers' speed")
    chosen = parser.parse_args()
    sizes = chosen.name, chosen.layers, chosen.device, chosen.batches
    measure(*sizes, with_peer=not chosen.no_peer)


if __name__ == "__main__":
    main()
