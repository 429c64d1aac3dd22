"""Checks the options of `ferryman up` in a process of its own, which ends with its answer.

The check imports torch, 270 MB that `up` would hold for as long as the cluster runs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from ferryman.errors import ConfigError, FerrymanError
from ferryman.runtime.parent import end_with_parent
from ferryman.settings.cluster import UpOptions
from ferryman_launcher.model_places import ModelPlaces


@dataclass(frozen=True, slots=True)
class CheckedCluster:
    """The memory of a cluster that can work: `derived` are values of settings by role and name;
    `lines` say for people, and `objects` for programs, how the memory of each kind of worker is
    divided."""

    notes: tuple[str, ...]
    derived: Mapping[str, Mapping[str, Any]]
    lines: tuple[str, ...]
    objects: tuple[Mapping[str, Any], ...]

    def completed(self, choices: UpOptions) -> UpOptions:
        """The same cluster, its workers told what was derived."""
        told = {
            role: {**choices.told.get(role, {}), **self.derived.get(role, {})}
            for role in {**choices.told, **self.derived}
        }
        return choices.model_copy(update={"told": told})


def check_apart(choices: UpOptions, places: ModelPlaces) -> CheckedCluster:
    """The memory of a cluster that can work. Raises ConfigError for options that cannot.

    Call it before the process has threads or a loop: it forks.
    """
    said = answer_of_child(lambda: asdict(_checked(choices, places)))
    return CheckedCluster(
        tuple(said["notes"]), said["derived"], tuple(said["lines"]), tuple(said["objects"])
    )


def answer_of_child(work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The JSON object that `work` makes in a forked process. Raises ConfigError if `work` does."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(reader)
        _answer(work, writer, parent)
    os.close(writer)
    with open(reader, "rb") as answer:
        content = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        raise FerrymanError(f"the check of the options ended with status {status}")
    said: Mapping[str, Any] = json.loads(content)
    if "mistake" in said:
        raise ConfigError(said["mistake"])
    return said


def _answer(work: Callable[[], Mapping[str, Any]], writer: int, parent: int) -> NoReturn:
    """Never returns into the code of the parent, whatever happens."""
    status = 1
    try:
        end_with_parent(parent)
        gc.disable()  # imports are nearly all that it does, and its memory goes with it
        with open(writer, "w") as answer:
            answer.write(json.dumps(_said(work)))
        status = 0
    except KeyboardInterrupt:
        pass  # the parent has it, too, and ends
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _said(work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return work()
    except ConfigError as error:
        return {"mistake": str(error)}


def _checked(choices: UpOptions, places: ModelPlaces) -> CheckedCluster:
    from ferryman_launcher.cluster_memory import derived_values, worker_line, worker_object
    from ferryman_launcher.option_checks import check

    plan = check(choices, places)
    return CheckedCluster(
        plan.notes,
        derived_values(plan),
        tuple(map(worker_line, plan.workers)),
        tuple(map(worker_object, plan.workers)),
    )
