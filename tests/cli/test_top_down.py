"""`ferryman top` names the processes of `ferryman up` that wait for their next start."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from ferryman_cli.top import fleet_view
from ferryman_launcher.state_folder import RunningCluster, StateFolder, down_processes

DOWN = {"hostcache": "was ended by signal 9"}
CLUSTER = RunningCluster(
    "http://h:1", "h:2", "nats", "redis", "local", "demo", os.getpid(), down=DOWN
)


def test_processes_that_are_down_stand_below_the_workers(tmp_path: Path) -> None:
    StateFolder(tmp_path).write(CLUSTER)
    console = Console(record=True, width=120)
    console.print(fleet_view([], down_processes(tmp_path), 0.0, 120))
    assert "hostcache is down: was ended by signal 9" in console.export_text()


def test_where_no_cluster_runs_nothing_is_down(tmp_path: Path) -> None:
    assert down_processes(tmp_path) == {}
