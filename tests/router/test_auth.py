"""A caller's name and salt tell nothing to a reader who lacks the cluster key."""

from __future__ import annotations

import hashlib

from tests.cluster_keys import KEY, STRANGERS_KEY

from ferryman.security.cluster_key import ClusterKey
from ferryman_router.doors.auth import ApiKeys, Authenticator
from ferryman_router.routing.generate_request import PUBLIC, Tenant
from ferryman_router.routing.quotas import Quotas

API_KEY = "sk-one"


def tenant_of(callers: Authenticator, api_key: str = API_KEY) -> Tenant:
    return callers.authenticate({"authorization": f"Bearer {api_key}"}).tenant


def callers_of(
    key: ClusterKey = KEY, api_keys: frozenset[str] = frozenset({API_KEY, "sk-two"})
) -> Authenticator:
    return Authenticator(ApiKeys(api_keys, None, key, Quotas()), 1.0)


def test_a_tenant_is_the_same_in_every_router_of_a_cluster() -> None:
    assert tenant_of(callers_of()) == tenant_of(callers_of())
    one, other = tenant_of(callers_of()), tenant_of(callers_of(), "sk-two")
    assert one.salt != other.salt
    assert one.name != other.name


def test_nobody_without_the_cluster_key_gets_from_an_api_key_to_its_tenant() -> None:
    """A keyless hash of a guessed API key would be found again in events and in page keys."""
    mine, theirs = tenant_of(callers_of()), tenant_of(callers_of(STRANGERS_KEY))
    assert mine.salt != theirs.salt
    assert mine.name != theirs.name
    guesses = {
        hashlib.blake2b(API_KEY.encode(), digest_size=size).digest()[:4] for size in (4, 16, 32, 64)
    }
    assert mine.salt[:4] not in guesses
    assert bytes.fromhex(mine.name.removeprefix("tenant-"))[:4] not in guesses


def test_the_name_in_events_is_no_piece_of_the_salt() -> None:
    tenant = tenant_of(callers_of())
    shown = bytes.fromhex(tenant.name.removeprefix("tenant-"))
    assert len(shown) >= 4
    assert shown not in tenant.salt


def test_without_api_keys_everybody_is_the_public() -> None:
    assert tenant_of(callers_of(api_keys=frozenset())) is PUBLIC
