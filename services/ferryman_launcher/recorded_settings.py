"""The settings of running processes that `ferryman what-if` simulates, for the cluster's file.

They are read off the environments of the processes: what is recorded is what they were given.
"""

from __future__ import annotations

from collections.abc import Iterable

from ferryman.settings.names import variable
from ferryman_launcher.child import ChildSpec

# Sizes and policies alone: no address, no path, no secret.
RECORDED = (
    *("dtype", "kv_dtype", "page_size", "chunk_tokens", "max_running", "memory_bytes"),
    *("recurrent_slots", "prefix_cache", "overlap", "snapshot_grid", "draft_tokens"),
    *("max_reserved", "audit_share", "snapshot_share", "prefetch_share", "host_memory"),
    *("write_policy", "prefetch_policy", "prefetch_threshold"),
)
ROLES = ("prefill", "decode", "both", "hostcache")
STORAGE_DIR, STORAGE_BYTES = "storage_dir", "storage_bytes"


def recorded_settings(processes: Iterable[ChildSpec]) -> dict[str, str]:
    """Variables with their values, of the first process of each role. A storage tier has its size;
    without one there is none."""
    recorded: dict[str, str] = {}
    for process in processes:
        names = [variable(name, process.role) for name in RECORDED]
        if process.environment.get(variable(STORAGE_DIR, process.role)):
            names.append(variable(STORAGE_BYTES, process.role))
        if process.role in ROLES:
            for name in names:
                if name in process.environment:
                    recorded.setdefault(name, process.environment[name])
    return recorded
