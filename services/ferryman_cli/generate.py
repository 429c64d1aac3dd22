"""`ferryman generate`: the offline engine on prompts given here, without any server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ferryman.schedule.request import SamplingParams
from ferryman.settings.engine import EngineOptions
from ferryman.text.tokenizer import Tokenizer
from ferryman_launcher.checks.option_checks import check_model

if TYPE_CHECKING:
    from ferryman.llm import Completion, Prompt


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Prompts for one model; with `is_chat` each is a user's turn."""

    model: Path
    prompts: tuple[str, ...]
    sampling: SamplingParams
    is_chat: bool = False


def run_generate(asked: BatchRequest, engine: EngineOptions, *, as_json: bool) -> int:
    check_model(asked.model)
    for completion in _completed(asked, engine):
        print(json.dumps(_as_object(completion)) if as_json else completion.text)
    return 0


def _completed(asked: BatchRequest, engine: EngineOptions) -> Sequence[Completion]:
    from ferryman.llm import LLM  # imports torch: a second that other commands should not pay

    with LLM(
        asked.model,
        dtype=engine.dtype,
        quantize=engine.quantize,
        page_size=engine.page_size,
        chunk_tokens=engine.chunk_tokens,
        max_running=engine.max_running,
        memory_bytes=engine.memory_bytes,
        num_threads=engine.num_threads,
    ) as llm:
        prompts = _as_chats(asked) if asked.is_chat else asked.prompts
        return llm.generate(prompts, asked.sampling)


def _as_chats(asked: BatchRequest) -> list[Prompt]:
    tokenizer = Tokenizer.load(asked.model)
    chats = ([{"role": "user", "content": prompt}] for prompt in asked.prompts)
    return [tokenizer.encode_chat(chat).tolist() for chat in chats]


def _as_object(completion: Completion) -> dict[str, object]:
    """The completion's fields; JSON turns the token ids in `logprobs` into strings."""
    return asdict(completion)
