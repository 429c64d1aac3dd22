"""A prefill and a decode worker in this process: the real services, without broker and router.

They speak real gRPC on loopback (or NIXL), and the test calls them as a router does:

    async with pair_of_workers() as pair:
        asked = request("r1", prompt, max_tokens=9)
        await pair.run_prefill(pair.order(asked))
        tokens, last = await pair.read_tokens("r1")
        assert tokens == expected(asked)
        await until(lambda: not pair.decode.leased())

The ways to build it:

pair_of_workers     on fake engines: a step writes stamps, and a token is known beforehand; with
                    `hold` and `go_on` a test decides when a worker's steps run
pair_on, pair_with  on tiny models, both with the same options or each with its own (`check`
                    compares an answer with that of one process)
pair_of_engines     on engines that run already
one_worker          a worker that does both, as a pair; `one_worker_on` an engine that runs
worker, worker_on   one worker alone; `paired` makes pairs of any two
lone_worker         one as a process of its own, to be killed
stepped_pair        without sockets and loops: each step of both workers is the test's

Services that a test changes go in as `make_prefill` and `make_decode`. Each worker ends with a look
at what it still holds (`ledger`).
"""

# The imports below are the one list of the names that tests use.
# mypy: implicit-reexport
# ruff: noqa: F401

from tests.harness.pair.calls import (
    PairAnswer,
    WorkerPair,
    check,
    expected,
    hand_off,
    paired,
    read_to_the_end,
    request_of,
    stream_of,
)
from tests.harness.pair.fake_engine import (
    MANIFEST,
    PAGE_SIZE,
    VOCAB,
    engine_of,
    fake_engine,
    request,
)
from tests.harness.pair.pairs import (
    one_worker,
    one_worker_on,
    pair_of_engines,
    pair_of_workers,
    pair_on,
    pair_with,
    worker_options,
)
from tests.harness.pair.stepped import StampedPair, stepped_pair, unwrapped, write_unit
from tests.harness.pair.worker import PATIENT_SECONDS, PairWorker, parts_of, worker, worker_on
