"""llama.cpp as a contender, through the C interface that llama-cpp-python loads.

Its sizes of batches, its flash attention and the float16 of its cache are its own defaults; for
float32 its cache is float32 too.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tools.bench.gguf.conversion import GGUF_FILE

from ferryman.errors import ConfigError
from ferryman.gguf.model_file import is_gguf
from ferryman_bench.engine_process import BenchModel
from ferryman_bench.timer import Job

BATCH_TOKENS = 2048
CELL_TOKENS = 256
F32, F16 = 0, 1
FLASH_ATTENTION_OFF = 0

SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
    lambda level, text, data: None
)
"""Hears llama.cpp's log; it has to live as long as the library."""


class LlamaContender:
    """A model of llama.cpp; each job has a context of its own."""

    def __init__(self, model: BenchModel) -> None:
        self._lib = load_llama_cpp()
        self._lib.llama_backend_init()
        self._threads = model.threads
        self._cache_type = F32 if model.dtype == "float32" else F16
        params = self._lib.llama_model_default_params()
        file = model.folder / GGUF_FILE
        if is_gguf(model.folder):
            file = model.folder
            # Of a published file in Q4_1, llama.cpp's kernels for AMX end the process.
            params.use_extra_bufts = False
        self._model = self._lib.llama_model_load_from_file(bytes(file), params)
        if self._model is None:
            raise ConfigError(f"llama.cpp cannot load {file}")
        vocabulary = self._lib.llama_model_get_vocab(self._model)
        self._vocab_size = int(self._lib.llama_vocab_n_tokens(vocabulary))

    def logits(self, token_ids: Sequence[int]) -> list[float]:
        context = self.context(1, len(token_ids), is_exact=True)
        context.prefill(np.array(token_ids, np.int32))
        found: list[float] = context.logits(1)[0].tolist()
        return found

    def prefill(self, prompt_len: int) -> Job:
        context = self.context(1, prompt_len)
        random = np.random.default_rng(0)

        def run() -> None:
            context.clear()
            context.prefill(random.integers(self._vocab_size, size=prompt_len, dtype=np.int32))

        return run

    def decoder(self, requests: int, context_len: int, steps: int) -> Job:
        context = self.context(requests, context_len + steps)
        context.prefill((np.arange(context_len) % self._vocab_size).astype(np.int32))
        context.copy_to_all()
        return LlamaDecoder(context, context_len)

    def context(self, requests: int, max_len: int, *, is_exact: bool = False) -> LlamaContext:
        """Room for `requests` of `max_len` tokens; with `is_exact` nothing is rounded to float16,
        which flash attention does here whatever the cache's type is."""
        params = self._lib.llama_context_default_params()
        params.n_ctx = requests * (-(-max_len // CELL_TOKENS) * CELL_TOKENS)
        params.n_seq_max = requests
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = self._cache_type
        if is_exact:
            params.flash_attn_type = FLASH_ATTENTION_OFF
        handle = self._lib.llama_init_from_model(self._model, params)
        if handle is None:
            raise ConfigError(f"llama.cpp has no room for {requests} requests of {max_len} tokens")
        return LlamaContext(self._lib, handle, requests, self._vocab_size)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Consecutive tokens of one sequence from `position` on; `draws`: a token is drawn after
    them."""

    sequence: int
    token_ids: NDArray[np.int32]
    position: int
    draws: bool


class LlamaContext:
    """The state of `requests` sequences, and the batch that steps fill."""

    def __init__(self, lib: Any, handle: Any, requests: int, vocab_size: int) -> None:
        self._lib, self._handle, self.requests = lib, handle, requests
        self._vocab_size = vocab_size
        self._memory = lib.llama_get_memory(handle)
        self._batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)
        arrays = (self._batch.token, self._batch.pos, self._batch.logits)
        self._tokens, self._positions, self._wanted = (
            np.ctypeslib.as_array(array, (BATCH_TOKENS,)) for array in arrays
        )
        np.ctypeslib.as_array(self._batch.n_seq_id, (BATCH_TOKENS,))[:] = 1

    def __del__(self) -> None:
        # At the interpreter's end the library may be gone before this object.
        with suppress(AttributeError, TypeError):
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._handle)

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._memory, True)

    def copy_to_all(self) -> None:
        """Gives all sequences the state of the first."""
        for request in range(1, self.requests):
            self._lib.llama_memory_seq_cp(self._memory, 0, request, -1, -1)

    def prefill(self, token_ids: NDArray[np.int32]) -> None:
        """Computes a prompt of the first sequence; logits of its last token."""
        for index in range(BATCH_TOKENS):
            self._batch.seq_id[index][0] = 0
        for start in range(0, len(token_ids), BATCH_TOKENS):
            part = token_ids[start : start + BATCH_TOKENS]
            self._wanted[: len(part)] = 0
            self._wanted[len(part) - 1] = start + len(part) == len(token_ids)
            self._step(part, np.arange(start, start + len(part), dtype=np.int32))

    def ready_to_decode(self) -> None:
        """From now on row i of a step is sequence i."""
        for index in range(self.requests):
            self._batch.seq_id[index][0] = index
        self._wanted[: self.requests] = 1

    def decode(self, token_ids: NDArray[np.int32], position: int) -> NDArray[np.int32]:
        """One greedy step of every sequence at `position`."""
        self._step(token_ids, np.full(self.requests, position, np.int32))
        return self._drawn(self.requests)

    def logits(self, rows: int) -> NDArray[np.float32]:
        """The logits [rows, vocabulary] that the last step was asked for, not to be kept."""
        found = self._lib.llama_get_logits(self._handle)
        return np.ctypeslib.as_array(found, (rows, self._vocab_size))

    def step(self, rows: Sequence[SequenceRows]) -> NDArray[np.int32]:
        """One batch of tokens of several sequences, at most BATCH_TOKENS; the greedy token after
        each of `rows` that asks for one, in their order."""
        at = 0
        for row in rows:
            count = len(row.token_ids)
            for index in range(at, at + count):
                self._batch.seq_id[index][0] = row.sequence
            self._tokens[at : at + count] = row.token_ids
            self._positions[at : at + count] = np.arange(row.position, row.position + count)
            self._wanted[at : at + count] = 0
            self._wanted[at + count - 1] = row.draws
            at += count
        self._run(at)
        return self._drawn(sum(row.draws for row in rows))

    def _drawn(self, rows: int) -> NDArray[np.int32]:
        found: NDArray[np.int32] = self.logits(rows).argmax(-1).astype(np.int32)
        return found

    def _step(self, token_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        count = len(token_ids)
        self._tokens[:count], self._positions[:count] = token_ids, positions
        self._run(count)

    def _run(self, count: int) -> None:
        self._batch.n_tokens = count
        status = self._lib.llama_decode(self._handle, self._batch)
        if status:
            raise ConfigError(f"llama.cpp: llama_decode returned {status}")


class LlamaDecoder:
    """Each call is one greedy step."""

    def __init__(self, context: LlamaContext, position: int) -> None:
        self._context, self._position = context, position
        self._token_ids = np.zeros(context.requests, np.int32)
        context.ready_to_decode()

    def __call__(self) -> None:
        self._token_ids = self._context.decode(self._token_ids, self._position)
        self._position += 1


def check_llama_cpp() -> None:
    """Raises ConfigError if llama-cpp-python is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise ConfigError(
            "llama.cpp is not installed: pip install 'ferryman[peers]' (it is compiled, which "
            "takes some minutes)"
        )


def load_llama_cpp() -> Any:
    """llama-cpp-python, silent. Raises ConfigError if it is not installed."""
    check_llama_cpp()
    import llama_cpp

    llama_cpp.llama_log_set(SILENCE, ctypes.c_void_p(0))
    return llama_cpp
