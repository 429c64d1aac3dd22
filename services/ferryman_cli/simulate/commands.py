"""The flags of `ferryman simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from ferryman.errors import ConfigError
from ferryman.tiers.prefetch_values import PrefetchPolicy, PrefetchWish
from ferryman_cli.simulate.choices import (
    CacheChoices,
    Choices,
    StateChoices,
    WorkerChoices,
    parse_slots,
)
from ferryman_cli.simulate.costs import CostModel
from ferryman_cli.simulate.generator import Habits
from ferryman_cli.simulate.mooncake import BLOCK_TOKENS
from ferryman_cli.simulate.reading import Format
from ferryman_cli.sizes import parse_size
from ferryman_cli.where import AsJson

_STATE, _WORKERS, _CACHES = StateChoices(), WorkerChoices(), CacheChoices()
_HABITS = Habits()

Trace = Annotated[Path | None, typer.Option(metavar="FILE", help="Requests, one a line.")]
Generate = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a made-up trace there, and end.")
]
Blocks = Annotated[int, typer.Option(min=1, help="Tokens that one id of a Mooncake trace names.")]
Size = Annotated[str, typer.Option(metavar="BYTES", help="Such as 512M or 2GiB.")]
Pools = Annotated[
    str, typer.Option(metavar="KIND=N,…", help="Its pools outright, as a ledger shows them.")
]


def simulate(
    trace: Trace = None,
    generate: Generate = None,
    format: Annotated[Format, typer.Option(help="What the trace is written in.")] = Format.AUTO,
    block_tokens: Blocks = BLOCK_TOKENS,
    concurrency: Annotated[
        int, typer.Option(min=0, help="Run so many at once; 0 goes by the trace's times.")
    ] = 0,
    model: Annotated[
        str, typer.Option(metavar="DIR", help="Whose state it is; by default the demo model's.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = _STATE.dtype,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page.")] = _STATE.page_size,
    page_bytes: Annotated[
        int, typer.Option(min=0, help="Of a page of all full layers, in place of a model.")
    ] = 0,
    snapshot_bytes: Annotated[
        int, typer.Option(min=0, help="Of a recurrent state, in place of a model.")
    ] = 0,
    window_len: Annotated[int, typer.Option(min=0, help="Tokens that a window sees.")] = 0,
    window_page_bytes: Annotated[
        int, typer.Option(min=0, help="Of a page of all window layers.")
    ] = 0,
    memory_bytes: Size = "512M",
    max_running: Annotated[
        int, typer.Option(min=1, help="Requests that a worker runs at once.")
    ] = _WORKERS.max_running,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that one prefill step takes.")
    ] = _WORKERS.chunk_tokens,
    slots: Annotated[
        int, typer.Option(min=0, help="Recurrent slots of each worker; 0 takes a share.")
    ] = 0,
    prefill_slots: Pools = "",
    decode_slots: Pools = "",
    host_memory: Size = "256M",
    storage_bytes: Size = "0",
    snapshot_share: Annotated[
        float, typer.Option(help="Of the host's memory, for snapshots.")
    ] = _CACHES.snapshot_share,
    snapshot_grid: Annotated[
        int, typer.Option(min=0, help="Tokens between coarse snapshots; 0 for none.")
    ] = 0,
    junctions: Annotated[
        bool, typer.Option("--junctions/--no-junctions", help="A snapshot where paths part.")
    ] = True,
    write_policy: Annotated[
        str, typer.Option(help="write_through, write_through_selective or write_back.")
    ] = _CACHES.write_policy,
    prefetch_policy: Annotated[
        PrefetchPolicy, typer.Option(help="How long a prompt waits for storage.")
    ] = _CACHES.wish.policy,
    prefetch_threshold: Annotated[
        int, typer.Option(min=0, help="Tokens below which nothing is prefetched.")
    ] = _CACHES.wish.threshold_tokens,
    cost: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SECONDS", help="What something takes; may be repeated."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A,B,…",
            help="Vary slots, grid, junctions, host-memory or storage-bytes; may be repeated.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a PNG there.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="With --generate.")] = _HABITS.seed,
    num_requests: Annotated[
        int, typer.Option(min=1, help="With --generate.")
    ] = _HABITS.num_requests,
    num_prefixes: Annotated[
        int, typer.Option(min=1, help="With --generate: system prompts.")
    ] = _HABITS.num_prefixes,
    zipf: Annotated[
        float, typer.Option(min=0, help="With --generate: how few prompts are popular.")
    ] = _HABITS.zipf,
    prefix_tokens: Annotated[
        int, typer.Option(min=0, help="With --generate: of a system prompt.")
    ] = _HABITS.prefix_tokens,
    turns: Annotated[
        float, typer.Option(min=1, help="With --generate: mean of a conversation.")
    ] = _HABITS.turns,
    user_tokens: Annotated[
        int, typer.Option(min=1, help="With --generate: mean of a turn.")
    ] = _HABITS.user_tokens,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="With --generate: mean of an answer.")
    ] = _HABITS.output_tokens,
    think_seconds: Annotated[
        float, typer.Option(min=0, help="With --generate: mean between turns.")
    ] = _HABITS.think_seconds,
    conversations_per_second: Annotated[
        float, typer.Option(help="With --generate.")
    ] = _HABITS.conversations_per_second,
    json: AsJson = False,
) -> int:
    """Run a trace through the scheduler, the planner and the tiers without a model.

    Prints where prompt tokens would come from, why the others would be computed, and a predicted
    time to the first token. `--generate` makes a trace; docs/simulator.md says what is modelled.
    """
    from ferryman_cli.choices import demo_model
    from ferryman_cli.simulate.run import run_generate, run_simulate

    if (trace is None) == (generate is None):
        raise ConfigError("give either --trace FILE or --generate FILE")
    if generate is not None:
        habits = Habits(
            num_requests=num_requests,
            num_prefixes=num_prefixes,
            zipf=zipf,
            prefix_tokens=prefix_tokens,
            turns=turns,
            user_tokens=user_tokens,
            output_tokens=output_tokens,
            think_seconds=think_seconds,
            conversations_per_second=conversations_per_second,
            seed=seed,
        )
        return run_generate(generate, habits, block_tokens, as_json=json)
    assert trace is not None, "one of the two was given"
    has_bytes = page_bytes or snapshot_bytes or window_page_bytes
    folder = Path(model) if model else None if has_bytes else demo_model()
    choices = Choices(
        state=StateChoices(
            folder, dtype, page_size, page_bytes, snapshot_bytes, window_len, window_page_bytes
        ),
        workers=WorkerChoices(
            memory_bytes=parse_size("--memory-bytes", memory_bytes),
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            slots=slots,
            prefill_slots=parse_slots("--prefill-slots", prefill_slots),
            decode_slots=parse_slots("--decode-slots", decode_slots),
        ),
        caches=CacheChoices(
            host_memory=parse_size("--host-memory", host_memory),
            snapshot_share=snapshot_share,
            storage_bytes=parse_size("--storage-bytes", storage_bytes),
            grid=snapshot_grid,
            junctions=junctions,
            write_policy=write_policy,
            wish=PrefetchWish(prefetch_policy, prefetch_threshold),
        ),
        concurrency=concurrency,
    )
    return run_simulate(
        trace,
        format,
        block_tokens,
        choices,
        costs=_costs(cost or ()),
        sweep=sweep or (),
        plot=plot,
        as_json=json,
    )


def _costs(given: Sequence[str]) -> dict[str, float]:
    """What was given in place of the cost model's guesses."""
    known = [each.name for each in fields(CostModel)]
    changed: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            changed[name] = float(value)
        except ValueError:
            raise ConfigError(f"--cost {text}: it should be NAME=SECONDS") from None
        if name not in known:
            raise ConfigError(f"--cost {name}: names are {', '.join(known)}")
    return changed
