"""Whole models of published sizes on a card, with random weights: right answers, and speed.

Run by hand where there is a card, with transformers installed; `--device cpu` runs it without one:

    python -m tests.campaigns.card exact granite-4.0-h-micro
    python -m tests.campaigns.card speed qwen3-next-80b-a3b --layers 4

`exact` compares log probabilities with those of transformers for the same tokens, then each way in
which state is reused with the cold run: found in the prefix tree, brought by a hand-off over each
plane. `speed` prints tokens a second, with graphs and without, beside transformers' own
cached forward.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tests.campaigns.published_sizes import SIZES, Prompt, prompts_of, saved_model
from tests.engine.host_fed import PAGE_SIZE
from tests.oracle import Float64Mode
from tests.worker.model_pair import pair_with, request_of, worker_options
from tests.worker.pair import WorkerPair

from ferryman.llm import LLM, Completion
from ferryman.schedule.request import SamplingParams
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.handoff.planes import PlaneChoice

PROMPT_LENS = (701, 333, 65)
NEW_TOKENS = 16
TOP = 5
SPEED_PROMPT_LEN, SPEED_TOKENS, REPEATS = 128, 128, 3
LONG_PROMPT_LEN = 8192


def exact(name: str, num_layers: int, device: str) -> None:
    with saved_model(name, num_layers, device) as (folder, model):
        print(f"{name}: {model.num_parameters() / 1e9:.2f} G parameters", flush=True)
        # The others have no float64.
        model.config._attn_implementation = model.config._experts_implementation = "eager"
        prompts = prompts_of(PROMPT_LENS, model.config.vocab_size)
        sampling = SamplingParams(
            max_tokens=NEW_TOKENS, temperature=0.0, logprobs=TOP, ignore_eos=True
        )
        for dtype in ("float64", "bfloat16"):
            found = answers(folder, dtype, device, prompts, sampling)
            model = model.to(getattr(torch, dtype))
            worst = max(map(difference_from(model), found))
            print(f"{dtype}: log probabilities within {worst:.2e} of transformers", flush=True)
        del model
        _forget_memory()
        for dtype in ("float64", "bfloat16"):
            asyncio.run(check_handed_off(folder, dtype, device, prompts))


def answers(
    folder: Path, dtype: str, device: str, prompts: list[Prompt], sampling: SamplingParams
) -> list[Completion]:
    """Answers of a cold run, which those on state found in the prefix tree are compared with."""
    options = {"dtype": dtype, "device": device, "page_size": PAGE_SIZE, "memory_bytes": 4 << 30}
    with LLM(folder, **options) as llm:
        cold, hits = (llm.generate(prompts, sampling) for _ in range(2))
    _forget_memory()
    reused = [sum(hit.cached_tokens.values()) for hit in hits]
    assert all(n >= len(p) - PAGE_SIZE for n, p in zip(reused, prompts, strict=True)), reused
    pairs = list(zip(hits, cold, strict=True))
    num_same = sum(hit.token_ids == right.token_ids for hit, right in pairs)
    assert dtype != "float64" or num_same == len(pairs)
    worst = max(_difference(hit, right) for hit, right in pairs)
    print(
        f"{dtype}: on {sum(reused)} tokens of the prefix tree {num_same} of {len(pairs)} answers "
        f"have the same tokens; log probabilities within {worst:.2e}",
        flush=True,
    )
    return cold


def _difference(one: Completion, other: Completion) -> float:
    """The largest difference of log probabilities up to the first token that differs."""
    worst = 0.0
    rows = zip(one.logprobs, other.logprobs, one.token_ids, other.token_ids, strict=True)
    for found, expected, token, right in rows:
        common = found.keys() & expected.keys()
        worst = max([worst, *(abs(found[name] - expected[name]) for name in common)])
        if token != right:
            break
    return worst


def difference_from(model: Any) -> Any:
    """A function of an answer: the largest difference of a log probability from the model's."""

    @torch.inference_mode()
    def difference(answer: Completion) -> float:
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

    return difference


async def check_handed_off(folder: Path, dtype: str, device: str, prompts: list[Prompt]) -> None:
    """Prefilled by one worker, decoded by the other: the tokens of an engine that does both."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    both = {"dtype": dtype, "device": device, "memory_bytes": 4 << 30}
    with LLM(folder, page_size=PAGE_SIZE, prefix_cache=False, **both) as llm:
        expected = [list(one.token_ids) for one in llm.generate(prompts, sampling)]
    _forget_memory()
    prefills = worker_options(folder, chunk_tokens=512, decodes=False).model_copy(update=both)
    decodes = worker_options(folder, chunk_tokens=512).model_copy(update=both)
    planes: tuple[PlaneChoice, ...] = ("nixl", "grpc") if has_nixl() else ("grpc",)
    for plane in planes:
        async with pair_with(prefills, decodes, plane) as pair:
            found, seconds = await handed_off(pair, prompts, sampling)
        _forget_memory()
        assert dtype != "float64" or found == expected, (plane, found, expected)
        num_same = sum(one == other for one, other in zip(found, expected, strict=True))
        shown = ", ".join(f"{each * 1e3:.0f}" for each in seconds)
        print(
            f"{dtype}, {plane}: {num_same} of {len(prompts)} handed off with the same tokens; "
            f"prefill and hand-off {shown} ms",
            flush=True,
        )


async def handed_off(
    pair: WorkerPair, prompts: list[Prompt], sampling: SamplingParams
) -> tuple[list[list[int]], list[float]]:
    """The tokens of each, and the seconds until decode had it."""
    found, seconds = [], []
    for number, prompt in enumerate(prompts):
        asked = request_of(pair, f"r{number}", prompt, sampling)
        began = time.perf_counter()
        progress = await pair.run_prefill(pair.order(asked, deadline=600.0))
        seconds.append(time.perf_counter() - began)
        assert progress[-1].HasField("handed_off")
        tokens, _ = await pair.read_tokens(asked.request_id)
        found.append(tokens)
    return found, seconds


def speed(
    name: str, num_layers: int, device: str, batches: Sequence[int], *, with_peer: bool
) -> None:
    with saved_model(name, num_layers, device) as (folder, model):
        print(f"{name}: {model.num_parameters() / 1e9:.2f} G parameters", flush=True)
        vocab_size = model.config.vocab_size
        for batch in batches if with_peer else ():
            print(
                f"transformers, batch {batch}: {peer_rate(model, batch):.0f} tokens/s", flush=True
            )
        del model
        _forget_memory()
        for replays in (True, False):
            with LLM(
                folder,
                device=device,
                replay_steps=replays,
                max_running=max(batches),
                memory_bytes=8 << 30,
                prefix_cache=False,
            ) as llm:
                how = "graphs" if replays else "launches"
                for batch in batches:
                    rate = decode_rate(llm, batch, vocab_size)
                    print(f"{how}, batch {batch}: {rate:.0f} tokens/s", flush=True)
                rate = prefill_rate(llm, vocab_size)
                print(f"{how}: prefill of {LONG_PROMPT_LEN} {rate:.0f} tokens/s", flush=True)
            _forget_memory()


def decode_rate(llm: LLM, batch: int, vocab_size: int) -> float:
    """Tokens a second behind the first one, of requests that run together."""
    prompts = prompts_of([SPEED_PROMPT_LEN] * batch, vocab_size)
    short, long = (
        median(_seconds(llm, prompts, num_tokens) for _ in range(REPEATS))
        for num_tokens in (1, 1 + SPEED_TOKENS)
    )
    return batch * SPEED_TOKENS / (long - short)


def prefill_rate(llm: LLM, vocab_size: int) -> float:
    prompts = prompts_of([LONG_PROMPT_LEN], vocab_size)
    return LONG_PROMPT_LEN / median(_seconds(llm, prompts, 1) for _ in range(REPEATS))


def _seconds(llm: LLM, prompts: list[Prompt], num_tokens: int) -> float:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, sampling)
    return time.perf_counter() - began


@torch.inference_mode()
def peer_rate(model: Any, batch: int, steps: int = 32) -> float:
    """Tokens a second of its cached forward, without the extra work of `generate`."""
    prompt = torch.tensor(prompts_of([SPEED_PROMPT_LEN] * batch, 1000), device=model.device)
    found = model(prompt, use_cache=True, logits_to_keep=1)
    began = 0.0
    for step in range(steps + 2):
        if step == 2:
            _wait()
            began = time.perf_counter()
        token_ids = found.logits.argmax(-1)
        found = model(token_ids, past_key_values=found.past_key_values, use_cache=True)
    _wait()
    return batch * steps / (time.perf_counter() - began)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _forget_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("exact", "speed"))
    parser.add_argument("name", choices=sorted(SIZES))
    parser.add_argument("--layers", type=int, default=0, help="the first ones; 0: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--no-peer", action="store_true", help="without transformers' speed")
    chosen = parser.parse_args()
    if chosen.what == "exact":
        exact(chosen.name, chosen.layers, chosen.device)
    else:
        with_peer = not chosen.no_peer
        speed(chosen.name, chosen.layers, chosen.device, chosen.batches, with_peer=with_peer)


if __name__ == "__main__":
    main()
