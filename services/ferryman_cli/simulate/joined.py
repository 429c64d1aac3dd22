"""Workers joined to a node: each gets the host tier of a real one, over a simulated client."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, cast

from ferryman.tiers.write_policy import write_policy_named
from ferryman.worker.backup import DeviceBackup
from ferryman.worker.host import HostTier
from ferryman_cli.simulate.client import EngineParts, SimulatedClient
from ferryman_cli.simulate.node import SimulatedNode
from ferryman_cli.simulate.setup import Setup
from ferryman_cli.simulate.worker import SimulatedWorker

if TYPE_CHECKING:
    from ferryman.engine.assembly import Engine
    from ferryman.wire.host_client import HostCacheClient

Job = Coroutine[Any, Any, None]


def join_node(
    setup: Setup, node: SimulatedNode, workers: Iterable[SimulatedWorker]
) -> tuple[Job, ...]:
    """Gives workers their host tier; the jobs that are to run as long as they do."""
    return (node.work(), *(_join(setup, node, worker) for worker in workers))


def _join(setup: Setup, node: SimulatedNode, worker: SimulatedWorker) -> Job:
    """An engine and a client are more than a host tier uses of them; here is what it uses."""
    engine = cast("Engine", EngineParts(setup.manifest, worker.scheduler))
    client = cast("HostCacheClient", SimulatedClient(node, worker.life, setup.wish))
    backup = DeviceBackup(engine, client, write_policy_named(setup.write_policy), worker.ring)
    worker.host = HostTier(engine, client, backup, setup.wish)
    return backup.run()
