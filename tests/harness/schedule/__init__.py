"""A scheduler with its pools, driven step by step, without processes, clocks and tensors.

    worker = WatchedWorker(HYBRID, {Kind.FULL: 9, Kind.RECURRENT: 12}, overlap=False)
    worker.submit(request(HYBRID, "r0", [1] * 6, max_tokens=9))
    worker.plan()        # submits one more step
    worker.run_oldest()  # runs and commits the one that has waited longest
    worker.drain()
    assert worker.tokens["r0"] == worker.expected("r0")

A slot holds a stamp, a hash of the prefix whose state it is, and each read of the fake engine
asserts the one that it expects: a wrong slot fails the test, not an answer later. `worker.events`
has all events, and `worker.seen(Retracted)` those of one type.

A `ScheduledWorker` checks no more than that. A `WatchedWorker` recounts its books, its tree and its
initialisers after every step. `Host` is a host tier to resume from, and `worker_for` a watched
worker with room to spare. `RandomDrafts` drafts for a worker, mostly right.

`play_many(kind, first, count)` plays random schedules on a prefill and a decode worker with a few
slots; a `ScheduleKind` says which models and events they have.

worker            ScheduledWorker, requests, models, options
watch             WatchedWorker and what it checks
hosts, drafts     what a worker loads, and what it is proposed
random_schedule   random schedules; schedule_kind, counts: their stuff, what happened in them
"""

# The imports below are the one list of the names that tests use.
# mypy: implicit-reexport
# ruff: noqa: F401

from tests.harness.schedule.drafts import VOCAB, RandomDrafts
from tests.harness.schedule.hosts import STEMS, Host, host_for, host_of, worker_for
from tests.harness.schedule.random_schedule import play_many
from tests.harness.schedule.schedule_kind import ScheduleKind
from tests.harness.schedule.watch import (
    CountingPool,
    WatchedWorker,
    books,
    check_books,
    current,
    is_all_cached,
)
from tests.harness.schedule.worker import (
    ALL_KINDS,
    ATTENTION,
    HYBRID,
    MANIFESTS,
    MAX_LEN,
    PAGE,
    SIZES,
    ScheduledWorker,
    ScheduleOptions,
    request,
)
