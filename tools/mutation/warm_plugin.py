"""A pytest plugin: collects once, then forks a process for each defect and runs its tests there.

Importing and collecting takes most of a short test run. Here it is done once: a defect is planted
in a fork, by new code for the functions that are already there, a finder for the module if nobody
has imported it yet, and a folder of links on PYTHONPATH for the processes that tests start.
It is loaded by `tools.mutation.drawn`, which says in DRAWN_ORDERS where the jobs are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tools.mutation.forks import ForkQueue
from tools.mutation.planting import function_index


class WarmPlugin:
    """Instead of running the collected tests, works off the jobs."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        orders = json.loads(Path(os.environ["DRAWN_ORDERS"]).read_text())
        index = function_index(session.config.rootpath)
        os.set_inheritable(orders["pipe"], False)
        queue = ForkQueue(session, index, orders["jobs"])
        for result in queue.results(orders["defects"]):
            os.write(orders["pipe"], json.dumps(result).encode() + b"\n")
        return True


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(WarmPlugin())
