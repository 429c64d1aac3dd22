"""Who is attached: the lives of workers that map the arena, and which of them are over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ferryman.errors import Stale
from ferryman.tiers.values import WorkerLife

# How long a worker may take from the answer to Attach until it holds its lock.
LOCK_GRACE_SECONDS = 30.0

IsAlive = Callable[[int], bool]


@dataclass(slots=True)
class _Attached:
    life: WorkerLife
    index: int
    since: float
    has_locked: bool = False


class Workers:
    """Attached lives by the index of their lock. `is_alive(index)` asks the kernel."""

    def __init__(self, is_alive: IsAlive) -> None:
        self._is_alive = is_alive
        self._attached: list[_Attached] = []
        self._num_indices = 0

    def __len__(self) -> int:
        return len(self._attached)

    def attach(self, life: WorkerLife, now: float) -> int:
        """The index of the byte to lock. One more for a life that attaches again."""
        self._num_indices += 1
        self._attached.append(_Attached(life, self._num_indices, now))
        return self._num_indices

    def living(self, worker_id: str) -> WorkerLife:
        """The life that speaks; Stale unless it has attached and holds its lock."""
        mine = [each for each in self._attached if each.life.worker_id == worker_id]
        for each in reversed(mine):
            if self._is_alive(each.index):
                each.has_locked = True
                return each.life
        raise Stale(f"{worker_id} maps no arena here; attach again and lock the byte given")

    def sweep(self, now: float) -> tuple[WorkerLife, ...]:
        """Lives none of whose mappings is left; they are forgotten."""
        over = [each for each in self._attached if self._is_over(each, now)]
        self._attached = [each for each in self._attached if each not in over]
        left = {each.life for each in self._attached}
        return tuple(dict.fromkeys(each.life for each in over if each.life not in left))

    def _is_over(self, attached: _Attached, now: float) -> bool:
        if self._is_alive(attached.index):
            attached.has_locked = True
            return False
        return attached.has_locked or now - attached.since > LOCK_GRACE_SECONDS
