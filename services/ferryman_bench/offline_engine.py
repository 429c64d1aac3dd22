"""The offline `LLM` in a process of its own, and its options for a precision of the bench."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams
from ferryman_bench.engine_process import (
    BenchModel,
    EngineProcess,
    engine_process,
    prepare_torch,
    serve_orders,
)

OFFLINE = "offline"


class OfflineRequestSite:
    """`LLM` in this process. It gives all tokens of a request at once, so it has no times."""

    def __init__(self, model: BenchModel) -> None:
        self._llm = LLM(model.folder, **model_fields(model))

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(max_tokens=order["max_tokens"], temperature=0.0, ignore_eos=True)
        began = perf_counter()
        self._llm.generate(order["prompts"], sampling)
        return {"seconds": perf_counter() - began, "arrivals": []}


def engine_fields(dtype: str) -> dict[str, Any]:
    """The engine options for a precision of the bench."""
    if dtype == "int8":
        return {"dtype": "bfloat16", "quantize": "int8"}
    return {"dtype": dtype}


def model_fields(model: BenchModel) -> dict[str, Any]:
    """The engine options of a run, but for the model: of `LLM`, and of a cluster's workers."""
    return {
        "device": model.device,
        "num_threads": model.threads,
        "memory_bytes": model.memory_bytes,
        "max_running": model.max_running,
        **engine_fields(model.dtype),
    }


@contextmanager
def offline_engine(model: BenchModel) -> Iterator[list[EngineProcess]]:
    """The offline engine alone, for the length of a block."""
    with engine_process("ferryman_bench.offline_engine", OFFLINE, model) as engine:
        yield [engine]


def open_site(_name: str, model: BenchModel) -> OfflineRequestSite:
    """The offline engine, ready for orders; this module runs no other."""
    prepare_torch(model.threads)
    return OfflineRequestSite(model)


if __name__ == "__main__":
    serve_orders(open_site)
