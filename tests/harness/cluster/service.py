"""One process of a service, as its test sees it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.cluster_keys import token_of
from tests.harness.forked_services import ServiceProcess

from ferryman.security.credentials import ClusterRole

AS_OBSERVER = {"authorization": f"Bearer {token_of(ClusterRole.OBSERVER)}"}


@dataclass
class Service:
    """One process: its node, its ready line, and where its log is."""

    role: str
    process: ServiceProcess
    log: Path
    node: int = 0
    ready: Mapping[str, Any] = field(default_factory=dict)

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        events = map(json.loads, self.process.stdout)  # a worker tells first how far it has loaded
        ready = next((event for event in events if event["event"] == "ready"), None)
        assert ready, f"{self.role} ended at once:\n{self.log.read_text()[-3000:]}"
        self.ready = ready

    def ledger(self) -> dict[str, Any]:
        """The holders of the slots, from `/debug/ledger`."""
        ledgers: dict[str, Any] = self.read("/debug/ledger").json()
        return ledgers

    def metrics(self) -> str:
        """As Prometheus reads them."""
        return self.read("/metrics").text

    def shown(self, *names: str) -> int:
        """The sum of such metrics of its role, over the kinds."""
        pattern = rf"^ferryman_{self.role}_(?:{'|'.join(names)}) (\S+)$"
        return sum(int(float(value)) for value in re.findall(pattern, self.metrics(), re.MULTILINE))

    def read(self, path: str) -> httpx.Response:
        """Its answer to an observer."""
        where = self.ready.get("observe") or self.ready["http"]
        return httpx.get(f"http://{where}{path}", headers=AS_OBSERVER, timeout=120)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)
