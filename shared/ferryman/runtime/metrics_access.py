"""Readers of a process's metrics: in a locked cluster those who show an observer's token.

Metrics are numbers, but they show how large a cluster is, how busy, and what fails in it. Tools for
them show a token with every scrape (`authorization: Bearer …`, RFC 6750, 2.1). Health stays open:
container engines ask for it, and it shows no more than whether the process serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferryman.errors import FerrymanError, PermissionDenied, Unauthenticated
from ferryman.runtime.metrics import Metrics
from ferryman.security.credentials import ClusterRole, RoleCredentials

SCHEME = "bearer"
NO_TOKEN = "metrics are for those who show the observer's token; see metrics.token"


@dataclass(frozen=True, slots=True)
class MetricsAccess:
    """The question who may read. Without `credentials` everybody may."""

    credentials: RoleCredentials | None

    def refusal(self, authorizations: Sequence[str]) -> FerrymanError | None:
        """The error for a reader with these `authorization` headers, if it may not read. Two
        headers are as bad as none."""
        if self.credentials is None:
            return None
        scheme, _, token = (authorizations[0] if len(authorizations) == 1 else "").partition(" ")
        role = self.credentials.role_of(token.strip()) if scheme.lower() == SCHEME else None
        if role is None:
            return Unauthenticated(NO_TOKEN)
        if role is not ClusterRole.OBSERVER:
            return PermissionDenied(f"a process of role {role} may not read metrics")
        return None


class MetricsGuard:
    """Asks readers, and counts those that it refuses in `refused_reads_total`."""

    def __init__(self, access: MetricsAccess, metrics: Metrics) -> None:
        self._access = access
        text = "Reads of metrics and ledgers refused."
        self._refused = metrics.counter("refused_reads", text, ["path", "reason"])

    def may_read(self, authorizations: Sequence[str]) -> bool:
        """Whether these headers suffice, for an answer with more details."""
        return self._access.refusal(authorizations) is None

    def check(self, path: str, authorizations: Sequence[str]) -> None:
        """Raises Unauthenticated or PermissionDenied; `path` is one that this process serves."""
        error = self._access.refusal(authorizations)
        if error is not None:
            self._refused.labels(path, error.reason).inc()
            raise error
