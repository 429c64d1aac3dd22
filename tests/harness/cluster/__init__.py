"""A whole cluster as processes: real broker, real index, real services, a tiny model.

A test saves a model and names the shape of the cluster. It then asks the cluster through the SDK
and compares with the oracle, the same model in this process:

    model = save_served_model(folder / "model", "granite")
    shape = ClusterShape(num_decode=2, settings=on_plane(FAST_PLANE))
    with running_cluster(model, folder, shape) as cluster, one_process(model) as oracle:
        async with Client(cluster.grpc) as client:
            answer = await generate(client, prompt, sampling)
        assert_same(answer, oracle.generate(prompt, sampling)[0])
        cluster.of_role("decode")[0].kill()
        cluster.assert_ledgers_balance()

Processes come and go while it runs: `cluster.start(role)` and `Service.kill`, `stop`, `ledger` and
`metrics`. `cluster.await_…` waits until the cluster has seen something, `events_until` until it has
logged something. Services are forked from a process that has imported what they share
(`tests/harness/forked_services.py`).

`up(state_dir)` is the other way in: the command as people call it, with the demo model. `starting`
yields before it is ready.

service    one process
shape      the numbers and the settings, the model
processes  all processes of a cluster
running    a cluster that is ready, and what its broker and its host-caches say
answers    answers through the SDK, and their oracle
up         `ferryman up`
"""

# The imports below are the one list of the names that tests use.
# mypy: implicit-reexport
# ruff: noqa: F401

from tests.harness.cluster.answers import (
    Generated,
    assert_same,
    generate,
    generate_all,
    one_process,
)
from tests.harness.cluster.running import (
    Cluster,
    events_until,
    running_cluster,
    started_cluster,
)
from tests.harness.cluster.service import Service
from tests.harness.cluster.shape import (
    FAST_PLANE,
    PAGE_SIZE,
    ClusterShape,
    on_plane,
    save_served_model,
    save_words,
)
from tests.harness.cluster.up import API_KEY, SMALL, Up, name_of, starting, up, up_command
