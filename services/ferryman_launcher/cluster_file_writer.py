"""Writes the file of a running cluster when processes change; a full disk delays it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ferryman.errors import ConfigError
from ferryman_launcher.state_folder import RunningCluster, StateFolder
from ferryman_launcher.write_failures import WriteFailures

RETRY_SECONDS = 5.0


class ClusterFileWriter:
    """Keeps `cluster.json` up to date. Until it is written, commands read the older one."""

    def __init__(
        self,
        folder: StateFolder,
        cluster: Callable[[], RunningCluster],
        failures: WriteFailures,
    ) -> None:
        self._folder, self._cluster, self._failures = folder, cluster, failures
        self._is_due = asyncio.Event()

    def write_first(self) -> None:
        """Writes it before the cluster is announced. Raises ConfigError: a cluster that no command
        can find is of little use, and no client depends on it yet."""
        try:
            self._folder.write(self._cluster())
        except OSError as error:
            raise ConfigError(f"--state-dir {self._folder.path}: {error.strerror}") from None

    def changed(self) -> None:
        """Something in the file is no longer true."""
        self._is_due.set()

    async def run(self) -> None:
        """Writes after each change, for ever."""
        while True:
            await self._is_due.wait()
            # Cleared before the write, which has all that changed until then.
            self._is_due.clear()
            if not self._is_written():
                await asyncio.sleep(RETRY_SECONDS)
                self._is_due.set()

    def _is_written(self) -> bool:
        try:
            self._folder.write(self._cluster())
        except OSError as error:
            self._failures.failed(self._folder.cluster_file, error)
            return False
        self._failures.written(self._folder.cluster_file)
        return True
