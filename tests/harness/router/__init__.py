"""A router with unruly fake workers: real broker, real gRPC, real HTTP, in one loop.

    async with cluster(nats_url, folder, num_decodes=2) as made:
        death = made.decodes[0].suffers(Die(FaultStage.TOKEN, offset=4))
        response = await made.complete("the ferry", max_tokens=12)
        assert death.happened == 1
        assert response.json()["choices"][0]["text"] == made.expected(12)

The i-th token of every request is `SCRIPT[i % len(SCRIPT)]`, whichever attempt and worker it comes
from, as with a real model and one seed; so `made.expected` knows every answer.

A fault is a value of `faults`: `Refuse`, `Die` and `Pause` at any stage of a request's way, and a
few that spoil what is sent. A worker `suffers` it; it says itself how often it `happened`, and
`await hold.reached(n)` waits for that. `until_…` of the cluster waits for what the router knows.

The fixtures `one_pair` and `two_pairs` (`tests/router/conftest.py`) are clusters with defaults.
`QueueCluster` is another thing: the real dispatcher in virtual time, with arrivals and no workers.

cluster       the router, its settings, its clients
fake_worker   the base of workers; fake_prefill, fake_decode
faults        the faults
ledger        what a router and its workers hold, which is nothing when a test has ended
queueing      a queueing model under the dispatcher
"""

# The imports below are the one list of the names that tests use.
# mypy: implicit-reexport
# ruff: noqa: F401

from tests.harness.router.cluster import (
    QUICK,
    SENTENCE,
    RouterCluster,
    another_router,
    cluster,
    collect,
    events,
    frames,
    model_folder,
)
from tests.harness.router.fake_decode import FakeDecode
from tests.harness.router.fake_prefill import FakePrefill
from tests.harness.router.fake_worker import PAGE_SIZE, STATE, FakeRouterWorker, living
from tests.harness.router.faults import (
    Die,
    Fault,
    FaultStage,
    GiveUp,
    LateScores,
    LoseTokens,
    Moment,
    Pause,
    Refuse,
    RepeatTokens,
    SpoilScores,
    in_use,
    no_room,
    no_slots,
)
from tests.harness.router.ledger import RouterLedger, left_behind
from tests.harness.router.queueing import PROMPT, QueueCaller, QueueCluster
