"""`ferryman bench`: decode, prefill and a hand-off on random weights, against transformers.

Steps of both sides are timed in turn in one process. On a busy machine the best step is the fairest
figure: ratios use the best steps, and medians are shown beside them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ferryman_bench.handoff import BenchEngine, hand_offs
from ferryman_bench.ours import Ours, load_ours
from ferryman_bench.peer import Peer, make_peer
from ferryman_bench.report import ReportRow, comparison_row, show
from ferryman_bench.shape import shape_named
from ferryman_bench.timer import Job, Timing, time_in_turn

BATCHES = (1, 8, 32)
CONTEXT_LEN = 128
PEER = "transformers"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a measurement. `repeats` counts decode steps; prefill takes fewer."""

    shape: str = "granite-100m"
    dtype: str = "bfloat16"
    threads: int = 2
    repeats: int = 24
    prompt_len: int = 2048
    chunk_tokens: int = 512


def run_bench(choices: BenchOptions, *, as_json: bool) -> int:
    torch.set_num_threads(choices.threads)
    shape, length = shape_named(choices.shape), choices.prompt_len
    with tempfile.TemporaryDirectory(prefix="ferryman-bench-") as name, torch.inference_mode():
        folder = Path(name)
        peer = make_peer(shape, choices.dtype, folder)
        ours = load_ours(folder, choices.dtype, max(BATCHES), length)
        prefill = _prefill_timings(ours, peer, choices)
        rows = [
            *_decode_rows(ours, peer, choices.repeats),
            comparison_row(f"prefill {length}", "tok/s", length, PEER, prefill),
            _hand_off_row(folder, ours, choices, prefill["ours"]),
        ]
        millions = peer.parameters / 1e6
    title = (
        f"{choices.shape}, {millions:.1f} M parameters, {choices.dtype}, {choices.threads} threads"
    )
    show(f"ferryman bench: {title}", rows, as_json=as_json)
    return 0


def _decode_rows(ours: Ours, peer: Peer, repeats: int) -> Iterator[ReportRow]:
    for requests in BATCHES:
        jobs: dict[str, Job] = {
            "ours": ours.decoder(requests, CONTEXT_LEN),
            PEER: peer.decoder(requests, CONTEXT_LEN),
        }
        found = time_in_turn(jobs, repeats)
        yield comparison_row(f"decode, batch {requests}", "tok/s", requests, PEER, found)


def _prefill_timings(ours: Ours, peer: Peer, choices: BenchOptions) -> Mapping[str, Timing]:
    jobs: dict[str, Job] = {
        "ours": lambda: ours.prefill(choices.prompt_len, choices.chunk_tokens),
        PEER: lambda: peer.prefill(choices.prompt_len),
    }
    return time_in_turn(jobs, max(2, choices.repeats // 6))


def _hand_off_row(folder: Path, ours: Ours, choices: BenchOptions, prefill: Timing) -> ReportRow:
    """The time from Reserve to Commit beside that of a prefill alone, which it includes."""
    model = ours.model
    engine = BenchEngine(folder, choices.dtype, choices.threads, model.manifest, model.vocab_size)
    found = hand_offs(engine, choices.prompt_len)
    millis = [done.seconds * 1e3 for done in found]
    name = f"hand-off of {choices.prompt_len}, {found[0].num_bytes / 1e6:.0f} MB"
    alone = (prefill.median * 1e3, prefill.least * 1e3)
    ratio = alone[1] / min(millis)
    return ReportRow(name, "ms", median(millis), min(millis), "prefill alone", *alone, ratio)
