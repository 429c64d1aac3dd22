"""Decode's share of the limit: the time that a step's bytes take to be copied, by the step's time.

    python -m tools.card.decode MODEL --device cuda --batches 1 32 128

The copy is timed in the same run. A line of JSON comes after each batch. The prefill of one long
prompt comes last. `tools.campaigns.card_speed` times steps that are launched one by one, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tools.campaigns.card_speed import seconds_of
from tools.campaigns.published_sizes import prompts_of
from tools.card.step_bytes import StepBytes, device_copy_rate

from ferryman.llm import LLM
from ferryman.model.config import load_config
from ferryman.settings.declaration import size_of

REPEATS, WARM_TOKENS = 2, 4
PROMPT_LEN = 128


def shown_share(batch: int, step_seconds: float, step_bytes: int, rate: float) -> str:
    """Tokens a second, the step's time and bytes, and its share of the limit."""
    if step_seconds <= 0:
        return "the machine is too busy to time so few steps"
    share = step_bytes / rate / step_seconds
    return (
        f"{batch / step_seconds:.0f} tok/s, {step_seconds * 1e3:.2f} ms a step of "
        f"{step_bytes / 1e6:,.0f} MB: {share:.0%} of the limit"
    )


def step_seconds(llm: LLM, batch: int, new_tokens: int, vocab_size: int) -> float:
    """A decode step's time: answers of `new_tokens` more, without their prompts' time. A busy
    machine can hide it; then it is 0 or less."""
    prompts = prompts_of([PROMPT_LEN] * batch, vocab_size)
    seconds_of(llm, prompts, WARM_TOKENS)
    short, long = (
        min(seconds_of(llm, prompts, tokens) for _ in range(REPEATS))
        for tokens in (1, 1 + new_tokens)
    )
    return (long - short) / new_tokens


def _print(name: str, text: str) -> None:
    print(json.dumps({name: text}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--long-prompt-len", type=int, default=8192)
    parser.add_argument("--memory-bytes", default="16G", help="for state")
    given = parser.parse_args()
    rate = device_copy_rate(torch.device(given.device))
    _print("copy", f"{rate / 1e9:,.0f} GB/s, read and written")
    sizes, new_tokens = StepBytes.of(given.model), given.max_tokens
    vocab_size = load_config(given.model).trunk.vocab_size
    room = size_of("--memory-bytes", given.memory_bytes)
    options = {"max_running": max(given.batches), "memory_bytes": room, "prefix_cache": False}
    with LLM(given.model, device=given.device, **options) as llm:
        for batch in given.batches:
            seconds = step_seconds(llm, batch, new_tokens, vocab_size)
            context = PROMPT_LEN + new_tokens // 2  # of the step in the middle
            text = shown_share(batch, seconds, sizes.step(batch, context), rate)
            _print(f"decode, batch {batch}", text)
        prompt = prompts_of([given.long_prompt_len], vocab_size)
        seconds = min(seconds_of(llm, prompt, 1) for _ in range(REPEATS))
        _print(
            f"prefill of {given.long_prompt_len}", f"{given.long_prompt_len / seconds:.0f} tok/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
