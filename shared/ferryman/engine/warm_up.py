"""A first step of each sort before anybody waits for one: kernels are compiled, memory is touched.

Runs before the scheduler has given any slot away. What it computes is never read: the slots it uses
are cleared, copied to or overwritten before their first real use, as every slot is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.engine.stream import Engine
from ferryman.schedule.batch import Chunk, DecodeStep, Draw, Ints, PrefillStep, SlotOps
from ferryman.schedule.request import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
# Below every real step, so that the record of executed slot operations stays as it is.
BEFORE_ALL = -1


def warm_up(engine: Engine, manifest: StateManifest) -> None:
    """Prefills one page and a token, then decodes one token, on slot 0 of each pool."""
    prompt_len = manifest.page_size + 1
    engine.launch(_prefill(manifest, prompt_len)).outcome()
    engine.launch(_decode(manifest, prompt_len)).outcome()


def _prefill(manifest: StateManifest, prompt_len: int) -> PrefillStep:
    chunk = Chunk(
        request_id="warm-up",
        row=0,
        start=0,
        end=prompt_len,
        token_ids=np.zeros(prompt_len, dtype="<u4"),
        working_slot=_working_slot(manifest),
        snapshots=(),
        draws=(Draw(0, prompt_len, prompt_len, GREEDY),),
    )
    return PrefillStep(BEFORE_ALL, SlotOps(), (chunk,), _page_tables(manifest, 2))


def _decode(manifest: StateManifest, position: int) -> DecodeStep:
    working = _ints([_working_slot(manifest)])
    return DecodeStep(
        step_id=BEFORE_ALL,
        ops=SlotOps(),
        request_ids=("warm-up",),
        rows=_ints([0]),
        positions=_ints([position]),
        read_slots=working,
        write_slots=working,
        waves=(1,),
        page_tables=_page_tables(manifest, position // manifest.page_size + 1),
        draws=(Draw(0, position + 1, position, GREEDY),),
    )


def _working_slot(manifest: StateManifest) -> int:
    return 0 if Kind.RECURRENT in manifest.kinds else -1


def _page_tables(manifest: StateManifest, num_pages: int) -> Mapping[Kind, Ints]:
    """All pages in slot 0: a pool may have no other, and nobody reads what is written there."""
    paged = [kind for kind in manifest.kinds if kind is not Kind.RECURRENT]
    return {kind: _ints([[0] * num_pages]) for kind in paged}


def _ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Ints:
    return np.array(values, dtype=np.int64)
