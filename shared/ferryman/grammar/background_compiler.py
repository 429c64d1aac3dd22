"""Grammars at a door: compiled in a thread, or refused before anything is computed."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ferryman.errors import DeadlineExceeded, QueueFull
from ferryman.grammar.compiler import CompiledGrammar, GrammarCompiler
from ferryman.schedule.output_grammar import OutputGrammar

MAX_WAITING = 64


class BackgroundCompiler:
    """Compiles one grammar at a time in a thread of its own; the loop and the forward stream keep
    the interpreter's lock meanwhile. Used from one event loop."""

    def __init__(self, compiler: GrammarCompiler, max_waiting: int = MAX_WAITING) -> None:
        self._compiler, self._max_waiting = compiler, max_waiting
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._num_waiting = 0

    async def checked(
        self, grammar: OutputGrammar | None, *, within: float
    ) -> CompiledGrammar | None:
        """The grammar compiled, or None for a request without one. A caller that holds it keeps it
        compiled for the engine.

        Raises InvalidRequest for what cannot be served, QueueFull with too many before it, and
        DeadlineExceeded after so many seconds.
        """
        if grammar is None:
            return None
        cached = self._compiler.known(grammar)
        return cached if cached is not None else await self._compiled(grammar, within)

    async def _compiled(self, grammar: OutputGrammar, within: float) -> CompiledGrammar:
        if self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._num_waiting} grammars wait to be compiled here")
        loop, compiled = asyncio.get_running_loop(), self._compiler.compiled
        self._num_waiting += 1
        try:
            async with asyncio.timeout(within):
                return await loop.run_in_executor(self._thread, compiled, grammar)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the grammar was compiled") from None
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Compiles nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
