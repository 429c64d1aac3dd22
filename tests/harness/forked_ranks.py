"""Ranks forked from one process that has imported what they need, for engines in a test's process.

Importing torch and the engine takes a rank 2.6 s of a core, and a test of two ranks little more
than that. Ranks of workers that are processes are started by those as ever, and so is the rank of
`tests/engine/test_tp_group.py::test_a_rank_ends_when_rank_0_does`.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock

from tests.harness.forked_services import ForkedService

from ferryman.engine.tensor_parallel import group, rank
from ferryman.runtime.parent import adopting, end_with_parent
from ferryman_launcher.fork_server import ANSWER_SECONDS, MESSAGE_BYTES, can_fork
from ferryman_launcher.fork_server_process import ForkRequest, serve_forks, take_name

ROOT = Path(__file__).parents[2]
start_process = group.start_rank


class RankForkServer:
    """The test's end of the server. Must be made on the main thread, or it ends with the thread."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "tests.harness.forked_ranks", str(os.getpid())),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
            )

    def start(self, orders: rank.RankOrders) -> tuple[ForkedService, Connection]:
        """As `group.start_rank`."""
        ours, theirs = Pipe()
        with theirs, self._turn, adopting():
            files = (group.STDERR, group.STDERR, theirs.fileno())
            socket.send_fds(self._control, [json.dumps({"module": rank.__name__}).encode()], files)
            answer = json.loads(self._control.recv(MESSAGE_BYTES))
        assert "pid" in answer, f"no rank was forked: {answer}"
        ours.send_bytes(orders.to_json())
        return ForkedService(answer["pid"], None), ours

    def close(self) -> None:
        """Ends the server; it has no state."""
        self._control.close()
        self._process.kill()
        self._process.wait()


@cache
def _server() -> RankForkServer:
    server = RankForkServer()
    atexit.register(server.close)
    return server


def start_rank(orders: rank.RankOrders) -> tuple[object, Connection]:
    """Forks a rank; where that cannot be, starts it as a process of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    if not can_fork() or not is_main or orders.device != "cpu":
        return start_process(orders)
    return _server().start(orders)


def main() -> None:
    """The server."""
    tests = socket.socket(fileno=os.dup(0))
    end_with_parent(int(sys.argv[1]))
    serve_forks(tests, become_rank)


def become_rank(request: ForkRequest) -> None:
    take_name("ferryman_rank")
    rank.main(request.gate)


if __name__ == "__main__":
    main()
