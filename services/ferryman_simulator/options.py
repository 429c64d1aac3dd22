"""The options of `ferryman simulate`, each a flag. Imports no module that is slow to import."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from ferryman.cache.manifest import Kind
from ferryman.settings.declaration import (
    GROUP,
    PREFETCH_THRESHOLD,
    Called,
    Count,
    Fixed,
    PrefetchThreshold,
    Size,
    WritePolicyName,
)
from ferryman.tiers.layout import SNAPSHOT_SHARE
from ferryman.tiers.prefetch_values import PrefetchOptions, PrefetchPolicy
from ferryman_simulator.modelled_time import GUESSES, CostModel
from ferryman_simulator.mooncake import BLOCK_TOKENS

MAX_RESERVED = 8


class Format(StrEnum):
    """The format of a trace; AUTO decides by its first line."""

    AUTO = "auto"
    MOONCAKE = "mooncake"
    LIFECYCLE = "lifecycle"


def parse_slots(text: object) -> object:
    """`full=512,recurrent=64` as pools; other values stay as they are. Raises ValueError."""
    if not isinstance(text, str):
        return text
    pools: dict[Kind, int] = {}
    for part in filter(None, text.split(",")):
        name, _, count = part.partition("=")
        if name not in Kind.__members__.values() or not count.isdecimal() or not int(count):
            kinds = ", ".join(kind.value for kind in Kind)
            raise ValueError(f"{part} should be KIND=COUNT; kinds are {kinds}")
        pools[Kind(name)] = int(count)
    return pools


Whole = Annotated[int, Field(ge=0)]
Pools = Annotated[Mapping[Kind, int], BeforeValidator(parse_slots)]


class StateOptions(BaseModel):
    """The source of the state's layout: a model, or slots of these sizes (0: no such kind)."""

    model_config = GROUP
    model: str = ""
    """A folder or an id on the hub whose state it is; by default the demo model's."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """`float32`, `bfloat16` or `float64`."""
    page_size: Count = 16
    """Tokens in a page."""
    page_bytes: Whole = 0
    """Of a page of all full layers, in place of a model."""
    snapshot_bytes: Whole = 0
    """Of a recurrent state, in place of a model."""
    window_len: Whole = 0
    """Tokens that a window sees."""
    window_page_bytes: Whole = 0
    """Of a page of all window layers."""

    @property
    def has_bytes(self) -> bool:
        """Whether sizes are given in place of a model."""
        return bool(self.page_bytes or self.snapshot_bytes or self.window_page_bytes)


class WorkerOptions(BaseModel):
    """Both workers."""

    model_config = GROUP
    memory_bytes: Size = 512 << 20
    """Of all state pools of a worker, such as 512M or 2GiB."""
    max_running: Count = 32
    """Requests that a worker runs at once."""
    max_reserved: Fixed[Whole] = MAX_RESERVED
    chunk_tokens: Count = 512
    """Tokens that one prefill step takes."""
    overlap: Fixed[bool] = True
    slots: Whole = 0
    """Recurrent slots of each worker; 0 takes a share."""
    prefill_slots: Pools = {}
    """Its pools outright, as a ledger shows them: `full=80,recurrent=16`."""
    decode_slots: Pools = {}
    """Its pools outright, as a ledger shows them: `full=80,recurrent=16`."""


class CacheOptions(BaseModel):
    """The tiers, and the placing of snapshots. A tier of 0 bytes does not exist."""

    model_config = GROUP
    host_memory: Size = 256 << 20
    """Such as 512M or 2GiB."""
    storage_bytes: Size = 0
    """Such as 512M or 2GiB."""
    snapshot_share: float = SNAPSHOT_SHARE
    """Of the host's memory, for snapshots."""
    grid: Annotated[Whole, Called(flag="--snapshot-grid")] = 0
    """Tokens between coarse snapshots; 0 for none."""
    junctions: bool = True
    """A snapshot where paths part."""
    forks: bool = True
    """A snapshot where the trace says that paths are likely to part."""
    write_policy: WritePolicyName = "write_through"
    """The choice of units that are written to the host, and of the time."""
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    """How long a prompt waits for storage."""
    prefetch_threshold: PrefetchThreshold = PREFETCH_THRESHOLD
    """Tokens below which nothing is prefetched."""

    @property
    def wish(self) -> PrefetchOptions:
        return PrefetchOptions(self.prefetch_policy, self.prefetch_threshold)


class SimulateOptions(BaseModel):
    """A trace's form, and the cluster that it is run through."""

    model_config = GROUP
    form: Annotated[Format, Called("format")] = Format.AUTO
    """The format of the trace."""
    block_tokens: Count = BLOCK_TOKENS
    """Tokens that one id of a Mooncake trace names."""
    concurrency: Whole = 0
    """Run so many at once; 0 goes by the trace's times."""
    state: StateOptions = StateOptions()
    workers: WorkerOptions = WorkerOptions()
    caches: CacheOptions = CacheOptions()
    costs: Fixed[CostModel] = GUESSES
