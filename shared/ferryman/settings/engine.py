"""The engine options of a worker: one declaration for environment, file, flags and `LLM`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from ferryman.cache.capacity import CapacityPlan, Concurrency, plan_capacity, tracking_slots
from ferryman.cache.manifest import StateManifest
from ferryman.errors import ConfigError
from ferryman.gguf.model_file import model_exists
from ferryman.schedule.drafting import MTP, NGRAM, NO_DRAFTS, Drafting, ModelDrafts, PromptLookup
from ferryman.schedule.step_sizes import TAIL_ROWS, StepSizes
from ferryman.settings.declaration import (
    GROUP,
    Called,
    Count,
    Fixed,
    Seconds,
    Size,
    leaves,
    reason_of,
    suggestion,
)
from ferryman.settings.folders import LoraFolders, ModelFolder, folders_of

AUTO = "auto"
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,2})?)$")]


class EngineOptions(BaseModel):
    """A model, and what the machine gives it: of a worker, and of `LLM`.

    Pools have `max_prealloc` rows beyond the running ones, for prompts that are handed over. A
    worker that prefills for others never `decodes`: it verifies no drafts and tracks no states, but
    keeps a draft model's state. One that does both `takes_turns`: prompts and running requests
    share its steps, or alternate.
    """

    model_config = GROUP
    model: ModelFolder
    """A Hugging Face folder with safetensors, of a family in the README's model card, or a GGUF
    file."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "float32"
    """`float32`, `bfloat16`, `float64`, or `auto` (`ferryman up`): the checkpoint's, but float32
    if the processor has no bfloat16 instructions and float32 fits."""
    quantize: Literal["none", "int8"] = "none"
    """`int8`: the weights of linear layers, a draft model's too, become int8 as they are loaded:
    half of bfloat16's bytes, and other numbers. The same for prefill and decode workers. `none`:
    they stay as they are stored."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """`fp8`: keys and values are kept as e4m3 with a scale for each token and head. The same for
    prefill and decode workers. `auto`: in `dtype`."""
    exactness: Literal["auto", "bits", "values"] = "auto"
    """`bits`: an answer has the same bits whatever was reused or batched, so state of another
    arithmetic is not reused; refused where the model, its dtype or the device cannot hold it.
    `values`: state of any arithmetic is reused, exact but for rounding. `auto`: `bits` on a
    processor that can, else `values`. The same for all workers. See docs/equivalence.md."""
    page_size: Count = 64
    """Tokens in a page, a power of two; the same for all workers (`ferryman up` and compose:
    16)."""
    chunk_tokens: Annotated[int, Field(ge=0)] = 512
    """Tokens of one prefill step, at least a page. 0 (`ferryman up`): 512, or 128 in bfloat16 on a
    processor without instructions for it, or 2,048 on a card. Beside running requests a worker for
    both takes a quarter of it on a processor: fewer make gaps between tokens shorter."""
    max_running: Annotated[int, Field(ge=0)] = 32
    """Requests at once. 0 (`ferryman up`): 32, or fewer if that leaves too little memory for
    long contexts."""
    max_waiting: Count = 256
    """Prompts queued at the worker."""
    memory_bytes: Annotated[Size, Field(ge=0)] = 1 << 30
    """Hard cap on all state pools of all ranks; weights come on top. 0 (`ferryman up`): this
    worker's part of the free memory."""
    recurrent_slots: Annotated[int, Field(ge=0)] = 0
    """Slots for recurrent states; fewer than the running requests need are raised with a
    warning, more than the memory holds refused; 0: what they need and a share of the memory."""
    device: Device = "cpu"
    """`cpu`, `cuda`, `cuda:1`, …, or `auto` (`ferryman up`): a card if torch finds one."""
    replay_steps: bool = True
    """Replay steps of a size that was seen before: on a card as graphs, a prompt's short chunk too;
    on a processor decode steps, as recorded launches."""
    num_threads: Annotated[int, Field(ge=0), Called(flag="--threads")] = 0
    """Threads of compute of each rank; 0: what torch takes, divided among ranks."""
    prefix_cache: bool = True
    """Keep and reuse prefixes on the device."""
    overlap: bool = True
    """Two steps in flight."""
    snapshot_grid: Annotated[int, Field(ge=0)] = 0
    """Tokens between the snapshots kept along a prompt, whole pages; 0: only at ends,
    junctions and fork points."""
    draft: Annotated[str, BeforeValidator(str)] = ""
    """`ngram`, `mtp` (the model's own layer for multi-token prediction), or the folder of a draft
    model: the same for prefill and decode workers. See Drafts in docs/operating.md."""
    draft_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    """Drafts of a request that one step of a decode worker verifies, 1 to 64."""
    tp_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks (processes) that share the model. See docs/operating.md."""
    lora: Annotated[LoraFolders, Called(repeats=True)] = ""
    """`name=DIR`, an adapter in PEFT's format that clients ask for by its name; several times, or
    with commas. The same for all workers. See docs/models.md."""
    # A rank that takes longer over a step is lost, and the worker ends.
    rank_silence_seconds: Fixed[Seconds] = 300.0
    max_prealloc: Fixed[Annotated[int, Field(ge=0)]] = 0
    audit_share: Fixed[Annotated[float, Field(ge=0, le=1)]] = 0.0
    decodes: Fixed[bool] = True
    takes_turns: Fixed[bool] = False

    @field_validator("page_size")
    @classmethod
    def _is_power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("should be a power of two")
        return value

    @field_validator("chunk_tokens")
    @classmethod
    def _chunk_holds_a_page(cls, value: int, info: ValidationInfo) -> int:
        page_size = info.data.get("page_size", 1)
        if 0 < value < page_size:
            raise ValueError(f"is less than a page of {page_size} tokens")
        return value

    @field_validator("snapshot_grid")
    @classmethod
    def _grid_is_pages(cls, value: int, info: ValidationInfo) -> int:
        page_size = info.data.get("page_size", 1)
        if value % page_size:
            raise ValueError(f"should be a multiple of a page of {page_size} tokens")
        return value

    @field_validator("draft")
    @classmethod
    def _is_known_draft(cls, value: str) -> str:
        if value not in ("", NGRAM, MTP) and not model_exists(Path(value)):
            raise ValueError("should be ngram, mtp, or a folder or GGUF file with a draft model")
        return value

    @field_validator("lora")
    @classmethod
    def _suits_adapters(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("tp_size", 1) > 1:
            raise ValueError("adapters are not divided among ranks; leave out lora or tp_size")
        if value and info.data.get("draft", "") not in ("", NGRAM):
            raise ValueError("with adapters only the draft ngram is supported")
        return value

    @property
    def drafting(self) -> Drafting:
        """The way in which sequences propose tokens here."""
        if not self.draft or not self.decodes:
            return NO_DRAFTS
        if self.draft == NGRAM:
            return PromptLookup(self.draft_tokens)
        return ModelDrafts(self.draft_tokens)

    @property
    def draft_model(self) -> str:
        """The folder of the draft model; empty without one."""
        return "" if self.draft in (NGRAM, MTP) else self.draft

    @property
    def drafted_by(self) -> str:
        """The drafter with state of its own: empty for none, MTP, or the folder of a draft
        model."""
        return "" if self.draft == NGRAM else self.draft

    @property
    def lora_folders(self) -> dict[str, Path]:
        """The folders of the adapters by name."""
        return folders_of(self.lora)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be derived from model and machine."""
        sizes = (self.memory_bytes, self.max_running, self.chunk_tokens)
        return AUTO not in (self.dtype, self.device) and all(sizes)

    def capacity(self, sized: StateManifest) -> CapacityPlan:
        """The pools of complete options; `sized` has the slots of all ranks. Raises ConfigError."""
        return plan_capacity(
            sized, self.memory_bytes, self.concurrency, self.chunk_tokens, self.recurrent_slots
        )

    @property
    def replays(self) -> bool:
        """Whether steps are replayed. On a card attention in float64 waits for it, which no graph
        can."""
        return self.replay_steps and not (self.is_on_card and self.dtype == "float64")

    @property
    def is_on_card(self) -> bool:
        return self.device.startswith("cuda")

    def step_sizes(self, max_len: int, *, pads_prompts: bool) -> StepSizes | None:
        """The sizes of steps on a card, for contexts of `max_len` tokens, if there are any; on the
        processor a step is as large as it is. `pads_prompts`: the model takes padded chunks, as
        none with a draft model does."""
        if not self.is_on_card:
            return None
        # Padding alone gains nothing; in a graph it does.
        pads = pads_prompts and self.replays and not self.drafted_by
        longest = min(self.chunk_tokens, max_len)
        shorter = (0, *TAIL_ROWS)
        tails = tuple(rows for before, rows in pairwise(shorter) if pads and before < longest)
        if not (self.decodes or tails):
            return None
        requests, drafts = self.concurrency.rows if self.decodes else 0, self.drafting.num_tokens
        num_pages = (max_len + drafts) // self.page_size + 1
        return StepSizes(requests, num_pages, self.page_size, drafts, tails)

    @property
    def concurrency(self) -> Concurrency:
        tracking = tracking_slots(
            prefix_cache=self.prefix_cache, overlap=self.overlap, decodes=self.decodes
        )
        num_drafts = self.drafting.num_tokens
        return Concurrency(
            self.max_running, self.max_prealloc, tracking, num_drafts, self.prefix_cache
        )


def engine_options(**values: Any) -> EngineOptions:
    """The options that a program gives by name. Raises ConfigError with all that is wrong."""
    names = [leaf.name for leaf in leaves(EngineOptions)]
    mistakes = [
        f"{name} is no option{suggestion(name, names)}" for name in values if name not in names
    ]
    try:
        options = EngineOptions(**{name: value for name, value in values.items() if name in names})
    except ValidationError as error:
        of_values = (
            f"{mistake['loc'][0]}={mistake['input']}: {reason_of(mistake)}"
            for mistake in error.errors()
        )
        raise ConfigError("; ".join([*of_values, *mistakes])) from None
    if mistakes:
        raise ConfigError("; ".join(mistakes))
    return options
