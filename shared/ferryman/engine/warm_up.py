"""Runs a first step of each sort before the first request: compiles kernels and touches memory.

If steps have a few sizes, each sort runs as well, so that no request waits for a compiler: decode
steps of nothing but padding, and a prompt as long as each padded chunk. Triton compiles a kernel
anew when an integer becomes 1 or a multiple of 16, when a pointer is no longer aligned, and for
every constant. Of these only page tables and waves change from step to step; requests do not, but
their graphs are captured for the narrowest tables. All graphs of prompts are captured here.
A prefill step of as many tokens as there can be runs too, of two prompts: many rows are multiplied
by other kernels than few, and a library makes its plans when it is first asked. On a processor it
would take seconds; there a short prompt and a step run once more, by the loops of many tokens.

It runs before the scheduler has given any slot away. Its state in the slots is never read: they are
cleared, copied to or overwritten before their first real use, as every slot is. But its logits are
checked: a model whose logits are not finite even here is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.engine.ops import BEFORE_ALL
from ferryman.engine.stream import StepEngine
from ferryman.errors import ConfigError
from ferryman.schedule.batch import (
    NO_TOKEN,
    Chunk,
    DecodeStep,
    Ints,
    PrefillStep,
    SampleRequest,
    SlotCopy,
    SlotOps,
)
from ferryman.schedule.request import SamplingParams
from ferryman.schedule.step_sizes import PADDING, DecodeSize, StepSizes
from ferryman_kernels.cpu.launches import loops_for_many_tokens


@dataclass(frozen=True, slots=True)
class MostTokens:
    """The tokens of the largest step of each sort; 0 for one that need not run. `lone_steps` are
    the further steps of a request alone until its step is recorded; 0 where it is not."""

    decode: int = 1
    prefill: int = 0
    lone_steps: int = 0


WarmUp = Callable[[StepEngine, StateManifest, StepSizes | None, MostTokens], None]

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
ROUND_PAGES = 16
# Below every real step.
PREFILL_ID, DECODE_ID, COPY_ID = -3, -2, -1


def warm_up(
    engine: StepEngine,
    manifest: StateManifest,
    sizes: StepSizes | None = None,
    most: MostTokens = MostTokens(),
) -> None:
    """Prefills one page and a token, then decodes one token, on slot 0 of each pool, and both once
    more by the loops of many tokens; then a step of padding of each sort of `sizes`, or without
    them the largest decode step, and that of one token as often as `most` says. Before them run
    short prompts as they are and padded, and the largest prefill step.

    Raises ConfigError when the logits are not finite.
    """
    prompt_len = manifest.page_size + 1
    prompt = _prefill(manifest, (prompt_len,), 2)
    for step in (prompt, _decode(manifest, prompt_len)):
        (sampled,) = engine.launch(step).outcome().sampled
        if sampled.token_id == NO_TOKEN:
            raise ConfigError(
                "the model computes no finite logits: its weights are damaged, its config does not "
                "belong to them, or its dtype is too narrow for it"
            )
    for prompts in _short_prompts(manifest, sizes, most):
        engine.launch(prompts).outcome()
    if most.prefill:
        engine.launch(_full(manifest, most.prefill)).outcome()
    if sizes is None or not sizes.max_requests:
        # At decode too: a retracted request whose state nobody has kept is computed anew there.
        with loops_for_many_tokens():
            for plan in (prompt, _crowded(manifest, prompt_len, 1)):
                engine.launch(plan).outcome()
        # A loop has a version for several threads, which a step of one token may not take.
        engine.launch(_crowded(manifest, prompt_len, most.decode)).outcome()
        # A request alone has no other steps. Four launched ones and a recorded one would be the
        # longest gaps of its answer.
        alone = replace(_decode(manifest, prompt_len), step_id=BEFORE_ALL)
        for _ in range(most.lone_steps):
            engine.launch(alone).outcome()
    else:
        for size in _each_sort(sizes):
            engine.launch(idle_step(size, manifest)).outcome()
        engine.launch(_copying(idle_step(size, manifest), manifest)).outcome()


def warm_up_decode_first(
    engine: StepEngine,
    manifest: StateManifest,
    sizes: StepSizes | None = None,
    most: MostTokens = MostTokens(),
) -> None:
    """Does as `warm_up` after a decode step on empty slots, whose result is dropped.

    If no loop is compiled yet, a decode worker thus begins with other loops than the prefill worker
    that starts at the same time, and later finds the loops of that one in the cache.
    """
    engine.launch(idle_step(DecodeSize(1, 1, 1), manifest)).outcome()
    warm_up(engine, manifest, sizes, most)


def _short_prompts(
    manifest: StateManifest, sizes: StepSizes | None, most: MostTokens
) -> Iterator[PrefillStep]:
    """If one short prompt alone is padded: two, which are not, and one of each size."""
    tails = sizes.tails() if sizes else ()
    if tails:
        yield _prefill(manifest, (manifest.page_size + 1, 1), 2)
    for tail in tails:
        length = min(tail.rows, most.prefill or tail.rows)
        yield _prefill(manifest, (length,), -(-length // manifest.page_size))


def _each_sort(sizes: StepSizes) -> Iterator[DecodeSize]:
    """Every width of page tables with every number of waves, for the fewest requests; and all
    numbers of requests with the narrowest."""
    narrowest = sizes.widths()[0]
    seen = set()
    for size in sizes.each():
        if size.pages == narrowest or (size.pages, size.waves) not in seen:
            yield size
        seen.add((size.pages, size.waves))


def idle_step(size: DecodeSize, manifest: StateManifest) -> DecodeStep:
    """A step of padding alone: it reads and writes no state."""
    nothing = np.full(size.num_tokens, PADDING, np.int64)
    return DecodeStep(
        step_id=BEFORE_ALL,
        ops=SlotOps(),
        request_ids=(),
        rows=nothing,
        positions=nothing,
        read_slots=nothing,
        write_slots=nothing,
        verify_depths=(size.requests,) * size.waves,
        page_tables={
            kind: np.full((size.num_tokens, size.pages), PADDING, np.int64)
            for kind in manifest.kinds
            if kind is not Kind.RECURRENT
        },
        draws=(),
        drafts=(0,) * (size.num_tokens - size.requests),
    )


def _copying(step: DecodeStep, manifest: StateManifest) -> DecodeStep:
    """The step with a copy of slot 0 onto itself in each pool."""
    copies = tuple(SlotCopy(0, 0, kind) for kind in manifest.kinds)
    return replace(step, step_id=COPY_ID, ops=SlotOps(copies=copies))


def _prefill(manifest: StateManifest, prompt_lens: tuple[int, ...], num_pages: int) -> PrefillStep:
    """All prompts in one row and in the same slots."""
    working = _working_slot(manifest)
    chunks = tuple(
        Chunk(
            request_id=f"warm-up-{number}",
            row=0,
            start=0,
            end=prompt_len,
            token_ids=np.zeros(prompt_len, dtype="<u4"),
            working_slot=working,
            snapshots=(),
            draws=(SampleRequest(0, prompt_len, prompt_len, GREEDY),),
        )
        for number, prompt_len in enumerate(prompt_lens)
    )
    ops = SlotOps(clears=(working,) if working >= 0 else ())
    tables = _page_tables(manifest, num_pages)
    repeated = {kind: table.repeat(len(chunks), 0) for kind, table in tables.items()}
    return PrefillStep(PREFILL_ID, ops, chunks, repeated)


def _full(manifest: StateManifest, num_tokens: int) -> PrefillStep:
    """The largest step: a long prompt, and one of a single token, which a step of one has not."""
    num_pages = -(-num_tokens // manifest.page_size)
    # A width that Triton has not compiled for: a multiple of 16.
    width = -(-num_pages // ROUND_PAGES) * ROUND_PAGES
    return _prefill(manifest, (max(1, num_tokens - 1), 1), width)


def _decode(manifest: StateManifest, position: int) -> DecodeStep:
    working = _ints([_working_slot(manifest)])
    return DecodeStep(
        step_id=DECODE_ID,
        ops=SlotOps(),
        request_ids=("warm-up",),
        rows=_ints([0]),
        positions=_ints([position]),
        read_slots=working,
        write_slots=working,
        verify_depths=(1,),
        page_tables=_page_tables(manifest, position // manifest.page_size + 1),
        draws=(SampleRequest(0, position + 1, position, GREEDY),),
    )


def _crowded(manifest: StateManifest, position: int, num_tokens: int) -> DecodeStep:
    """The largest step: all tokens in the row and the pages of one, none with a recurrent state."""
    nowhere = np.full(num_tokens, PADDING, np.int64)
    tables = _page_tables(manifest, position // manifest.page_size + 1)
    return DecodeStep(
        step_id=BEFORE_ALL,
        ops=SlotOps(),
        request_ids=(),
        rows=np.zeros(num_tokens, np.int64),
        positions=np.full(num_tokens, position, np.int64),
        read_slots=nowhere,
        write_slots=nowhere,
        verify_depths=(num_tokens,),
        page_tables={kind: table.repeat(num_tokens, 0) for kind, table in tables.items()},
        draws=(),
        drafts=(),
    )


def _working_slot(manifest: StateManifest) -> int:
    return 0 if Kind.RECURRENT in manifest.kinds else -1


def _page_tables(manifest: StateManifest, num_pages: int) -> Mapping[Kind, Ints]:
    """All pages in slot 0: a pool may have no other slot, and no real step reads what is written
    there."""
    paged = [kind for kind in manifest.kinds if kind is not Kind.RECURRENT]
    return {kind: _ints([[0] * num_pages]) for kind in paged}


def _ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Ints:
    return np.array(values, dtype=np.int64)
