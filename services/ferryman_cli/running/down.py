"""`ferryman down`: ends the cluster of a state folder, and waits for its end."""

from __future__ import annotations

import json
import os
import select
import signal
from pathlib import Path

from ferryman.errors import DeadlineExceeded, NotFound
from ferryman_launcher.folder_lock import holder_of

AGAIN_SECONDS = 1.5
"""The same signal sooner would count as an echo of the first."""
WAIT_SECONDS = 600.0


def run_down(state_dir: Path, *, now: bool, as_json: bool) -> int:
    """Has its `ferryman up` drain, or with `now` kill. Raises NotFound where none runs, and
    DeadlineExceeded for one that goes on."""
    pid = holder_of(state_dir)
    try:
        process = os.pidfd_open(pid) if pid else -1
        if pid:
            signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        pid = 0
    if not pid:
        raise NotFound(f"no cluster runs in {state_dir}")
    try:
        has_ended = _ends(process, AGAIN_SECONDS if now else WAIT_SECONDS)
        if now and not has_ended:
            signal.pidfd_send_signal(process, signal.SIGTERM)
            has_ended = _ends(process, WAIT_SECONDS)
    finally:
        os.close(process)
    if not has_ended:
        raise DeadlineExceeded(
            f"process {pid} has not ended within {WAIT_SECONDS:.0f} s; `ferryman logs up` may say"
            " why, `ferryman down --now` kills its processes"
        )
    print(json.dumps({"ended": pid}) if as_json else f"the cluster in {state_dir} has ended")
    return 0


def _ends(process: int, seconds: float) -> bool:
    """Whether the process of a pidfd ends in this time."""
    readable, _, _ = select.select([process], [], [], seconds)
    return bool(readable)
