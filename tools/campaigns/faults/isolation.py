"""A place of its own for the campaign: network, mounts and control groups that nobody else has.

Partitions are rules of the kernel's packet filter, and a full disk is a small file system that is
really full; both need a privileged user, and harm nobody outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/unified")
MARK = "CAMPAIGN_OF_FAULTS_IS_ALONE"


def enter() -> None:
    """Runs this program again in namespaces of its own, unless it is there already."""
    if os.environ.get(MARK):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    for tool in ("unshare", "ip", "iptables-restore"):
        if not shutil.which(tool):
            sys.exit(f"the campaign needs {tool} (Debian: util-linux, iproute2, iptables)")
    again = [sys.executable, "-m", "tools.campaigns.faults", *sys.argv[1:]]
    command = ["unshare", "--net", "--mount", *again]
    os.execvpe(command[0], command, {**os.environ, MARK: "1"})


def mount_small_disk(folder: Path, num_bytes: int) -> None:
    """A file system of that size, which ends with this mount namespace."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "tmpfs", str(folder)],
        check=True,
    )


class ControlGroups:
    """A group for each process name: the packet filter tells senders apart by it."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def path(self, name: str) -> str:
        """As the packet filter wants it."""
        return f"{self._prefix}-{name}"

    def join(self, name: str, pid: int) -> None:
        """Sockets that the process opens from now on belong to the group."""
        folder = GROUPS / self.path(name)
        folder.mkdir(exist_ok=True)
        with suppress(ProcessLookupError):
            (folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        for folder in GROUPS.glob(f"{self._prefix}-*"):
            with suppress(OSError):
                folder.rmdir()
