"""Tasks that belong to the service, not to the code that started them; they end with the block."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from ferryman.cancellation import CANCEL_AGAIN_SECONDS, end_tasks

log = logging.getLogger(__name__)


class Background:
    """`async with Background() as background: background.start(coroutine)`.

    A task that fails has a bug; the error is logged and the other tasks continue. At the end of the
    block the remaining tasks are cancelled and awaited.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if self._is_ending:
            # Started by a task that was cancelled: no caller is left to end it.
            task.cancel()
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background task failed", exc_info=task.exception())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_ending = True
        while self._tasks:
            await end_tasks(tuple(self._tasks), CANCEL_AGAIN_SECONDS)
