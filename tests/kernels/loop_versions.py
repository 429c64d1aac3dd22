"""A compiled loop by one thread and by two: which of its versions ran, and what each answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from ferryman_kernels.cpu import _compiled
from ferryman_kernels.cpu._compiled import Loop

T = TypeVar("T")


def slow_to_compile(dtype: torch.dtype) -> Any:
    """A parameter of `make test-all`: ten seconds for a version that differs in how it reads."""
    return pytest.param(dtype, marks=pytest.mark.slow)


def answers_of_one_thread_and_two(
    monkeypatch: pytest.MonkeyPatch, loop: Loop, answer: Callable[[], T]
) -> tuple[T, T]:
    """Calls `answer`, which runs `loop` once, with one thread of torch, then with two."""
    ran: list[str] = []
    versions = {"alone": loop.alone, "shared": loop.shared}
    monkeypatch.setattr(_compiled, "WORTH_SHARING", 0)
    for name, version in versions.items():
        monkeypatch.setitem(vars(loop), name, _recorded(version, name, ran))
    before = torch.get_num_threads()
    try:
        alone, shared = _answer_with(1, answer), _answer_with(2, answer)
    finally:
        torch.set_num_threads(before)
    assert ran == ["alone", "shared"]
    return alone, shared


def _answer_with(num_threads: int, answer: Callable[[], T]) -> T:
    torch.set_num_threads(num_threads)
    return answer()


def check_that_threads_leave_the_bits_of_a_scan(
    monkeypatch: pytest.MonkeyPatch, loop: Loop, states: Tensor, scan: Callable[[Tensor], Tensor]
) -> None:
    """`scan` advances the states that it is given, and returns y."""

    def answer() -> tuple[Tensor, Tensor]:
        moved = states.clone()
        return scan(moved), moved

    found = answers_of_one_thread_and_two(monkeypatch, loop, answer)
    (alone, after_alone), (shared, after_shared) = found
    assert torch.equal(alone, shared)
    assert torch.equal(after_alone, after_shared)


def _recorded(version: Callable[..., None], name: str, ran: list[str]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        ran.append(name)
        version(*args)

    return run
