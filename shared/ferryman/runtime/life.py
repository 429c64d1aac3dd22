"""The life of a service process: read settings, start, announce it, serve until a stop is ordered,
drain, end.

The first SIGTERM or SIGINT sets the stopping event, and the service drains; while it is still
loading it ends there and then. A later signal of the same kind ends the process at once. It must
be the same kind, because Ctrl-C in a terminal and the supervisor's SIGTERM may both arrive for one
stop. It must come later, because the death of a parent may send the same signal twice. Exit
status: 0 stopped, 1 failed, 2 wrong configuration.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar, cast

import uvloop
from pydantic import BaseModel

from ferryman.errors import ConfigError
from ferryman.runtime.collection import keep_start
from ferryman.runtime.logs import configure_logs
from ferryman.runtime.parent import end_with_parent
from ferryman.settings.groups import LifeSettings
from ferryman.settings.sources import Sources, read_settings

log = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S", bound=BaseModel)
Serve = Callable[[asyncio.Event], Awaitable[None]]

# A killed parent dies thread by thread, and the kernel may signal its children for several threads.
ONE_WISH_SECONDS = 0.3
EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2
# Seconds before a drain is cut off at which the log names what it waits for.
NAMED_SECONDS = 0.5


class _HasLife(Protocol):
    @property
    def life(self) -> LifeSettings: ...


def run_main(
    kind: type[S], role: str, serve: Callable[[S, asyncio.Event], Awaitable[None]]
) -> NoReturn:
    """Runs `serve(settings, stopping)` as a process; settings of `kind` have a group `life`."""
    with exit_on_config_errors():
        settings = read_settings(kind, role, Sources.of(os.environ))
    life = cast("_HasLife", settings).life
    configure_logs(life.log_level)
    if life.parent_pid:
        end_with_parent(life.parent_pid)
    run_service(partial(serve, settings), drain_seconds=life.drain_seconds)


def run_service(serve: Serve, *, drain_seconds: float = 30.0) -> NoReturn:
    """Runs `serve(stopping)` and exits with its status.

    Once stopping is set, `serve` has `drain_seconds` to return. Then it is cancelled, and the exit
    status shows that the drain was incomplete.
    """
    with exit_on_config_errors(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        drained = runner.run(_serve_until_stopped(serve, drain_seconds))
    end_process(0 if drained else EXIT_FAILED)


@contextmanager
def exit_on_config_errors() -> Iterator[None]:
    """Turns a ConfigError, alone or in a group, into a line on stderr and exit status 2."""
    try:
        yield
    except ConfigError as error:
        _exit_misconfigured([error])
    except BaseExceptionGroup as group:
        mistakes, rest = group.split(ConfigError)
        if mistakes is None or rest is not None:
            raise
        _exit_misconfigured(list(_leaves(mistakes)))


@asynccontextmanager
async def alongside(*jobs: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Runs jobs during the body: a failed job cancels the body, and the body's end cancels the
    jobs.

    Errors are raised as an ExceptionGroup, which includes the body's own.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job) for job in jobs]
        yield
        for task in tasks:
            task.cancel()


async def run_unless_stopped(work: Callable[[], T], stopping: asyncio.Event) -> T:
    """The result of `work`, which runs in a thread while the loop handles signals.

    If `stopping` is set first, the process ends at once with status 0. Raises what `work` raises.
    """
    result: Future[T] = Future()
    threading.Thread(target=_fill, args=(result, work), name="start", daemon=True).start()
    done, stop = asyncio.wrap_future(result), asyncio.ensure_future(stopping.wait())
    await asyncio.wait((done, stop), return_when=asyncio.FIRST_COMPLETED)
    if not done.done():
        log.info("stopped before it was ready")
        # No thread can be interrupted, and one in native code outlives no orderly end: but nothing
        # is served yet, so nothing is drained.
        end_process(0)
    stop.cancel()
    return await done


def end_process(status: int) -> NoReturn:
    """Ends without taking apart what was imported: torch takes a third of a second for that, and
    nothing in it outlives the process."""
    logging.shutdown()
    with suppress(OSError):  # the reader may have gone first
        sys.stdout.flush()
    os._exit(status)


def _fill(result: Future[T], work: Callable[[], T]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)


def announce_ready(role: str, worker_id: str, address: str, epoch: int, **more: object) -> None:
    """Writes one line of JSON to stdout for the parent process; `more` are fields of the role. All
    that the start made is kept."""
    keep_start()
    _announce("ready", role, worker_id=worker_id, address=address, epoch=epoch, **more)


def announce_loading(role: str, **progress: object) -> None:
    """Writes one line of JSON to stdout for the parent process, which waits while lines come."""
    _announce("loading", role, **progress)


def announce_compiling(role: str, loop: str) -> None:
    """Writes one line of JSON to stdout for the parent process: this loop is compiled now."""
    _announce("compiling", role, loop=loop)


def _announce(event: str, role: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": event, "role": role, **fields}) + "\n")
    sys.stdout.flush()


async def _serve_until_stopped(serve: Serve, drain_seconds: float) -> bool:
    """Whether `serve` returned before it was cancelled."""
    stopping = asyncio.Event()
    _stop_on_signals(stopping)
    limit = asyncio.timeout(None)
    try:
        async with limit, alongside(_limit_drain(limit, stopping, drain_seconds)):
            await serve(stopping)
    except TimeoutError:
        if not limit.expired():
            raise
        log.error("drain took too long drain_seconds=%s", drain_seconds)
        return False
    return True


async def _limit_drain(limit: asyncio.Timeout, stopping: asyncio.Event, seconds: float) -> None:
    await stopping.wait()
    log.info("stopping drain_seconds=%s", seconds)
    limit.reschedule(asyncio.get_running_loop().time() + seconds)
    await asyncio.sleep(seconds - NAMED_SECONDS)
    log.warning("the drain is about to be cut off; it waits for: %s", "; ".join(_unfinished()))


def _unfinished() -> list[str]:
    """The tasks of this loop, each by the lines at which it waits, outermost first."""
    waits = (" > ".join(_lines_of(task.get_coro())) for task in asyncio.all_tasks())
    return sorted(filter(None, waits))


def _lines_of(awaited: object) -> Iterator[str]:
    """The lines of a coroutine and of those that it waits for."""
    while awaited is not None:
        if inspect.iscoroutine(awaited):
            code, frame, inner = awaited.cr_code, awaited.cr_frame, awaited.cr_await
        elif inspect.isasyncgen(awaited):
            code, frame, inner = awaited.ag_code, awaited.ag_frame, awaited.ag_await
        else:
            # A step of an asynchronous generator does not name its generator; the collector knows.
            awaited = next(filter(inspect.isasyncgen, gc.get_referents(awaited)), None)
            continue
        yield f"{code.co_qualname}:{frame.f_lineno if frame is not None else '?'}"
        awaited = inner


def _stop_on_signals(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    first_seen: dict[signal.Signals, float] = {}

    def on_signal(number: signal.Signals) -> None:
        now = loop.time()
        if now - first_seen.setdefault(number, now) >= ONE_WISH_SECONDS:
            os._exit(EXIT_FAILED)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _exit_misconfigured(mistakes: list[BaseException]) -> NoReturn:
    for mistake in mistakes:
        sys.stderr.write(f"error: {mistake}\n")
    sys.exit(EXIT_MISCONFIGURED)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
