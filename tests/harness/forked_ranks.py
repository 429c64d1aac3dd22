"""Ranks forked from one process that has imported what they need, for engines in a test's process.

Importing torch and the engine takes a rank 2.6 s of a core, and a test of two ranks little more
than that. Ranks of workers that are processes are started by those as ever, and so is the rank of
`tests/engine/test_tp_group.py::test_a_rank_ends_when_rank_0_does`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from tests.harness.forked_services import ForkedService, fork_server
from tests.processes import FORKED

from ferryman.engine.tensor_parallel import group, rank
from ferryman.runtime.parent import end_with_parent
from ferryman_launcher.fork_server import can_fork
from ferryman_launcher.fork_server_process import ForkRequest, serve_forks, take_name

start_process = group.start_rank


def start_rank(orders: rank.RankOrders) -> tuple[object, Connection]:
    """Forks a rank; where that cannot be, starts it as a process of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    if not can_fork() or not is_main or orders.device != "cpu":
        return start_process(orders)
    ours, theirs = Pipe()
    with theirs:
        files = (group.STDERR, group.STDERR, theirs.fileno())
        pid = fork_server("tests.harness.forked_ranks").fork(rank.__name__, files)
    ours.send_bytes(orders.to_json())
    return ForkedService(pid, None), ours


def main() -> None:
    """The server."""
    tests = socket.socket(fileno=os.dup(0))
    end_with_parent(int(sys.argv[1]))
    serve_forks(tests, become_rank)


def become_rank(request: ForkRequest) -> None:
    take_name(FORKED)
    rank.main(request.gate)


if __name__ == "__main__":
    main()
