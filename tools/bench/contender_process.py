"""The process of a contender: `python -m tools.bench.contender_process NAME MODEL`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tools.bench.contender import Contender, ContenderSite

from ferryman_bench.engine_process import (
    BenchModel,
    BenchSite,
    EngineProcess,
    engine_process,
    prepare_torch,
    serve_orders,
)

OURS, TRANSFORMERS, LLAMA_CPP = "ferryman", "transformers", "llama.cpp"
LLAMA_BATCHES = "llama.cpp's batches"
"""llama.cpp as an engine of whole requests."""


def contender_process(name: str, model: BenchModel) -> AbstractContextManager[EngineProcess]:
    """A contender that has loaded its model."""
    return engine_process("tools.bench.contender_process", name, model)


def open_site(name: str, model: BenchModel) -> BenchSite:
    """The contender, ready for orders; as `open_contender`."""
    if name not in (LLAMA_CPP, LLAMA_BATCHES):
        prepare_torch(model.threads)
    if name == LLAMA_BATCHES:
        from tools.bench.llama_requests import LlamaRequestSite

        return LlamaRequestSite(model)
    return ContenderSite(open_contender(name, model))


def open_contender(name: str, model: BenchModel) -> Contender:
    """The contender, its model loaded. Raises ConfigError if it cannot run here."""
    # Each engine's libraries are imported in its own process alone.
    if name == OURS:
        from tools.bench.ferryman_contender import FerrymanContender

        return FerrymanContender(model)
    if name == TRANSFORMERS:
        from tools.bench.transformers_contender import TransformersContender

        return TransformersContender(model)
    from tools.bench.llama_contender import LlamaContender

    return LlamaContender(model)


if __name__ == "__main__":
    serve_orders(open_site)
