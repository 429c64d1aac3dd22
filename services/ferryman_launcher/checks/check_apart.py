"""Checks the options of `ferryman up` in a process of its own, which ends with its answer.

`python -m ferryman_launcher.checks.check_apart` reads the options in CHECK_REQUEST. The check
imports torch, 270 MB that `up` would hold for as long as the cluster runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError, FerrymanError
from ferryman.hub.client import HubModel
from ferryman.runtime.parent import end_with_parent
from ferryman.settings.cluster import UpOptions
from ferryman.settings.sources import without_settings
from ferryman_launcher.checks.model_places import ModelPlaces
from ferryman_launcher.child import Launch

ARGV = (sys.executable, "-m", "ferryman_launcher.checks.check_apart")
REQUEST = "CHECK_REQUEST"
# Not the file of `sys.stderr`, which may have been replaced by one without a descriptor.
STANDARD_ERROR = 2


@dataclass(frozen=True, slots=True)
class CheckedCluster:
    """The memory of a cluster that can work: `derived` are values of settings by role and name;
    `lines` for people and `objects` for programs show how the memory of each kind of worker is
    divided."""

    notes: tuple[str, ...]
    derived: Mapping[str, Mapping[str, Any]]
    lines: tuple[str, ...]
    objects: tuple[Mapping[str, Any], ...]

    @property
    def is_on_cpu(self) -> bool:
        """Whether no worker has a card."""
        return all(worker["device"] == "cpu" for worker in self.objects)

    def completed(self, choices: UpOptions) -> UpOptions:
        """The same cluster, with the derived values for its workers."""
        settings = {
            role: {**choices.told.get(role, {}), **self.derived.get(role, {})}
            for role in {**choices.told, **self.derived}
        }
        return choices.model_copy(update={"told": settings})


def check_apart(choices: UpOptions, places: ModelPlaces, launch: Launch) -> CheckedCluster:
    """The memory of a cluster that can work. Raises ConfigError for options that cannot."""
    request = {REQUEST: request_text(choices, places, os.getpid())}
    answer = asyncio.run(answer_of(ARGV, {**without_settings(os.environ), **request}, launch))
    return CheckedCluster(
        tuple(answer["notes"]), answer["derived"], tuple(answer["lines"]), tuple(answer["objects"])
    )


async def answer_of(
    argv: tuple[str, ...], environment: Mapping[str, str], launch: Launch
) -> Mapping[str, Any]:
    """The JSON object that a program writes. Raises ConfigError if it names a mistake in it."""
    collected = _Collected()
    try:
        await launch(collected, argv, environment, STANDARD_ERROR)
        status = await collected.ended
    finally:
        collected.close()
    if status:
        raise FerrymanError(f"the check of the options ended with status {status}")
    answer: Mapping[str, Any] = json.loads(collected.output)
    if "mistake" in answer:
        raise ConfigError(answer["mistake"])
    return answer


class _Collected(asyncio.SubprocessProtocol):
    """The output of a process, until it and its output have ended."""

    def __init__(self) -> None:
        self.output = b""
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.SubprocessTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport), "it is made for a process"
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output += data

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None and not self.ended.done():
            self.ended.set_result(self._transport.get_returncode())

    def close(self) -> None:
        """Kills a process that still runs."""
        if self._transport is not None:
            self._transport.close()


def request_text(choices: UpOptions, places: ModelPlaces, parent_pid: int) -> str:
    """The options as text that `main` reads. The router's secrets are nothing to check."""
    settings = {role: values for role, values in choices.told.items() if role != "router"}
    snapshots = {str(folder): asdict(model) for folder, model in places.snapshots.items()}
    content = {
        # A default may be a value that no caller may set.
        "choices": choices.model_copy(update={"told": settings}).model_dump(
            mode="json", exclude_unset=True
        ),
        "snapshots": snapshots,
        "parent_pid": parent_pid,
    }
    return json.dumps(content)


def options_in(content: Mapping[str, Any]) -> tuple[UpOptions, ModelPlaces]:
    """The options of a request."""
    snapshots = {Path(folder): HubModel(**of) for folder, of in content["snapshots"].items()}
    return UpOptions.model_validate(content["choices"]), ModelPlaces(snapshots)


def answer_to(work: Callable[[], CheckedCluster]) -> str:
    """The answer as text, with the mistake if `work` raises ConfigError."""
    try:
        return json.dumps(asdict(work()))
    except ConfigError as error:
        return json.dumps({"mistake": str(error)})


def main() -> None:
    content = json.loads(os.environ[REQUEST])
    end_with_parent(content["parent_pid"])
    print(answer_to(lambda: _checked(*options_in(content))))


def _checked(choices: UpOptions, places: ModelPlaces) -> CheckedCluster:
    from ferryman_launcher.checks.cluster_memory import (
        derived_values,
        worker_lines,
        worker_objects,
    )
    from ferryman_launcher.checks.option_checks import check

    plan = check(choices, places)
    return CheckedCluster(
        plan.notes,
        derived_values(plan),
        worker_lines(plan),
        worker_objects(plan),
    )


if __name__ == "__main__":
    main()
