"""A pytest plugin that notes which test reaches which line, how long each test takes, and its end.

It is loaded by `tools.mutation.reach`, which says in REACH_NOTES where the notes go. Processes
that tests start note what they reach too: their coverage is begun by coverage's own `.pth` file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

FOLDER = Path(os.environ["REACH_NOTES"])
RULES = """[run]
core = ctrace
parallel = true
data_file = {folder}/data
source = {sources}
concurrency = thread
sigterm = true
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected,module-not-measured,module-not-imported,already-imported
"""


class ReachPlugin:
    """Switches coverage's context with each test, and writes the tests' seconds at the end."""

    def __init__(self, root: Path) -> None:
        rules = FOLDER / "coveragerc"
        sources = ",".join(str(root / name) for name in ("services", "shared", "kernels"))
        rules.write_text(RULES.format(folder=FOLDER, sources=sources))
        self._coverage = coverage.Coverage(config_file=str(rules))
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        os.environ["COVERAGE_PROCESS_START"] = str(rules)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self._seconds.get(report.nodeid, 0.0)
        self._seconds[report.nodeid] = seconds + report.duration
        if report.outcome != "passed":
            self._failed.add(report.nodeid)

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        passed = {name: s for name, s in self._seconds.items() if name not in self._failed}
        (FOLDER / f"seconds-{os.getpid()}.json").write_text(json.dumps(passed))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) is None or hasattr(config, "workerinput"):
        config.pluginmanager.register(ReachPlugin(config.rootpath))
