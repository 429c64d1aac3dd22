"""Measures the model alone against transformers on the same weights: decode and prefill.

    python tools/bench_model.py --dtype bfloat16 --threads 2 [--profile 8] [--skip-peer]

The shape is Granite 4 H with about 140 million parameters and random weights. No scheduler, no
sampling but argmax, on either side. Figures of one run compare with each other, not with another
run's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, PreTrainedModel

from ferryman.cache.manifest import Kind
from ferryman.engine.slabs import Slabs
from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.decoder import Model
from ferryman.model.registry import load_model
from ferryman.model.state import ModelState, state_views

PAGE_SIZE = 64
CONTEXT_LEN = 128
PREFILL_LEN = 2048
PREFILL_CHUNK = 512
DECODE_STEPS = 16
BATCHES = (1, 8, 32)
REPEATS = 3

SHAPE = GraniteMoeHybridConfig(
    vocab_size=16_384,
    hidden_size=768,
    num_hidden_layers=16,
    layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(16)],
    num_attention_heads=12,
    num_key_value_heads=4,
    num_local_experts=0,
    shared_intermediate_size=2048,
    mamba_n_heads=48,
    mamba_d_head=32,
    mamba_d_state=128,
    mamba_n_groups=1,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    embedding_multiplier=12.0,
    attention_multiplier=0.015625,
    residual_multiplier=0.246,
    logits_scaling=3.0,
)


@dataclass(frozen=True, slots=True)
class Bench:
    """A model with room for the largest batch; request i owns a fixed run of pages."""

    model: Model
    state: ModelState
    pages_each: int

    def page_tables(self, requests: int, end: int) -> dict[Kind, Tensor]:
        needed = -(-end // PAGE_SIZE)
        first = torch.arange(requests)[:, None] * self.pages_each
        return {Kind.FULL: first + torch.arange(needed)}

    def prefill(self, requests: int, start: int, end: int) -> Tensor:
        tokens = (end - start) * requests
        batch = PrefillBatch(
            token_ids=torch.randint(SHAPE.vocab_size, (tokens,)),
            positions=torch.arange(start, end).repeat(requests),
            rows=torch.arange(requests).repeat_interleave(end - start),
            spans=((start, end),) * requests,
            page_tables=self.page_tables(requests, end),
            working_slots=torch.arange(requests),
            snapshots=(),
            last_tokens=torch.arange(1, requests + 1) * (end - start) - 1,
        )
        return self.model.prefill(batch, self.state)

    def decode(self, token_ids: Tensor, position: int) -> Tensor:
        requests = len(token_ids)
        batch = DecodeBatch(
            token_ids=token_ids,
            positions=torch.full((requests,), position),
            page_tables=self.page_tables(requests, position + 1),
            working_slots=torch.arange(requests),
        )
        return self.model.decode(batch, self.state).argmax(-1)


def prepare(folder: Path, dtype: str) -> Bench:
    model = load_model(folder, dtype, page_size=PAGE_SIZE)
    pages_each = PREFILL_LEN // PAGE_SIZE
    slots = {Kind.FULL: max(BATCHES) * pages_each, Kind.RECURRENT: max(BATCHES)}
    slabs = Slabs.allocate(model.manifest, slots, "cpu")
    for slab in slabs.by_kind.values():
        slab.tensor.zero_()
    return Bench(model, state_views(model.manifest, slabs.tensors), pages_each)


def quickest(job: Callable[[], object]) -> float:
    """The least of several runs, in seconds: the machine is shared."""
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        job()
        found.append(time.perf_counter() - begin)
    return min(found)


def decode_speed(bench: Bench, requests: int) -> float:
    """Tokens per second behind a context of CONTEXT_LEN."""
    bench.prefill(requests, 0, CONTEXT_LEN)

    def run() -> None:
        token_ids = torch.zeros(requests, dtype=torch.int64)
        for step in range(DECODE_STEPS):
            token_ids = bench.decode(token_ids, CONTEXT_LEN + step)

    return requests * DECODE_STEPS / quickest(run)


def prefill_speed(bench: Bench) -> float:
    def run() -> None:
        for start in range(0, PREFILL_LEN, PREFILL_CHUNK):
            bench.prefill(1, start, start + PREFILL_CHUNK)

    return PREFILL_LEN / quickest(run)


def peer_decode_speed(peer: PreTrainedModel, requests: int) -> float:
    """transformers' cached decode, without the overhead of its `generate`."""
    prompt = torch.randint(SHAPE.vocab_size, (requests, CONTEXT_LEN))
    cache = peer(prompt, use_cache=True, logits_to_keep=1).past_key_values

    def run() -> None:
        token_ids = prompt[:, -1:]
        for _ in range(DECODE_STEPS):
            logits = peer(token_ids, past_key_values=cache, use_cache=True).logits
            token_ids = logits.argmax(-1)

    return requests * DECODE_STEPS / quickest(run)


def peer_prefill_speed(peer: PreTrainedModel) -> float:
    prompt = torch.randint(SHAPE.vocab_size, (1, PREFILL_LEN))
    seconds = quickest(lambda: peer(prompt, use_cache=True, logits_to_keep=1))
    return PREFILL_LEN / seconds


def show_profile(bench: Bench, requests: int) -> None:
    """Where a decode step of `requests` spends its time; 0 profiles the prefill."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        if requests:
            decode_speed(bench, requests)
        else:
            prefill_speed(bench)
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", type=int, metavar="REQUESTS", help="0 profiles the prefill")
    parser.add_argument("--skip-peer", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        peer = AutoModelForCausalLM.from_config(SHAPE, dtype=getattr(torch, options.dtype)).eval()
        peer.save_pretrained(folder)
        print(f"{peer.num_parameters() / 1e6:.1f} M parameters, {options.dtype}")
        bench = prepare(Path(folder), options.dtype)
        if options.profile is not None:
            show_profile(bench, options.profile)
            return
        for requests in BATCHES:
            ours = decode_speed(bench, requests)
            line = f"decode batch {requests:2}: {ours:8.1f} tok/s"
            if not options.skip_peer:
                theirs = peer_decode_speed(peer, requests)
                line += f"   transformers {theirs:8.1f}   ratio {ours / theirs:.2f}"
            print(line, flush=True)
        ours = prefill_speed(bench)
        line = f"prefill {PREFILL_LEN}:   {ours:8.1f} tok/s"
        if not options.skip_peer:
            theirs = peer_prefill_speed(peer)
            line += f"   transformers {theirs:8.1f}   ratio {ours / theirs:.2f}"
        print(line)


if __name__ == "__main__":
    main()
