"""The viewers of the web page, by the keys that their page sends.

    observer's token     `authorization: Bearer …`     the fleet, and requests of all tenants
    API key              as for the API                the tenant's own requests
    nothing              where the API needs no key    the public's requests

The fleet's numbers show how busy a cluster is: only a reader of `/metrics` sees them
(docs/decisions/0095), in an open cluster everybody who may call. A page sends both keys if it has
both: the API key as `x-api-key` then.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from ferryman.runtime.access import MetricsGuard
from ferryman_router.routing.generate_request import Tenant


@dataclass(frozen=True, slots=True)
class Viewer:
    """A reader of the page. `tenant` owns the requests that it sees; None: those of all."""

    tenant: Tenant | None
    sees_fleet: bool

    @property
    def tenant_name(self) -> str | None:
        return self.tenant.name if self.tenant is not None else None


def observer_of(readers: MetricsGuard, request: Request) -> Viewer | None:
    """The observer, if this call shows its token."""
    is_observer = readers.is_observer(request.headers.getlist("authorization"))
    return Viewer(None, sees_fleet=True) if is_observer else None


def tenant_viewer(readers: MetricsGuard, request: Request, tenant: Tenant) -> Viewer:
    """The viewer that calls as this tenant."""
    return Viewer(tenant, readers.may_read(request.headers.getlist("authorization")))
