"""Tenants from a file: whose keys they are, until when, and what a broken file says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest
from tests.cluster_keys import KEY, STRANGERS_KEY
from tests.harness.router import cluster

from ferryman.errors import ConfigError, Unauthenticated
from ferryman_router.doors.auth import ApiKeys
from ferryman_router.routing.quotas import Quotas, TenantLimits

SHOP_KEY, LAB_KEY = "sk-shop-secret", "sk-lab-secret"
DIGEST = hashlib.sha256(LAB_KEY.encode()).hexdigest()
FILE = f"""
[shop]
keys = ["{SHOP_KEY}", "sk-shop-next"]
requests_per_minute = 2
share = 2.0

[lab]
keys = ["sha256:{DIGEST}"]
expires = 2099-01-01T00:00:00Z
"""


def written(folder: Path, text: str = FILE) -> Path:
    path = folder / "keys.toml"
    path.touch(0o600)
    path.write_text(text)
    return path


def known(path: Path, quotas: Quotas | None = None) -> ApiKeys:
    return ApiKeys((), path, KEY, quotas or Quotas())


def test_keys_and_digests_name_their_tenant(tmp_path: Path) -> None:
    quotas = Quotas()
    keys = known(written(tmp_path), quotas)
    assert [keys.tenant_of(key).name for key in (SHOP_KEY, "sk-shop-next", LAB_KEY)] == [
        "shop",
        "shop",
        "lab",
    ]
    assert quotas.limits["shop"] == TenantLimits(requests_per_minute=2, share=2.0)
    for stranger in ("", "sk-shop", DIGEST, f"sha256:{DIGEST}"):
        with pytest.raises(Unauthenticated, match="an API key is needed"):
            keys.tenant_of(stranger)


def test_a_new_key_of_a_tenant_keeps_its_cache_and_another_cluster_has_another(
    tmp_path: Path,
) -> None:
    path = written(tmp_path)
    keys, theirs = known(path), ApiKeys((), path, STRANGERS_KEY, Quotas())
    assert keys.tenant_of(SHOP_KEY).salt == keys.tenant_of("sk-shop-next").salt
    assert keys.tenant_of(SHOP_KEY).salt != keys.tenant_of(LAB_KEY).salt
    assert keys.tenant_of(SHOP_KEY).salt != theirs.tenant_of(SHOP_KEY).salt


def test_an_expired_key_says_so(tmp_path: Path) -> None:
    keys = known(written(tmp_path, FILE.replace("2099", "2020")))
    with pytest.raises(Unauthenticated, match="expired at 2020-01-01"):
        keys.tenant_of(LAB_KEY)
    assert keys.tenant_of(SHOP_KEY).name == "shop"


def test_a_file_read_again_counts_at_once_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, quotas = written(tmp_path), Quotas()
    keys = known(path, quotas)
    path.write_text(f'[lab]\nkeys = ["{LAB_KEY}"]\nmax_in_flight = 3\n')
    keys.reload()
    with pytest.raises(Unauthenticated):
        keys.tenant_of(SHOP_KEY)
    assert quotas.limits == {"lab": TenantLimits(max_in_flight=3)}
    path.write_text("[lab]\nkeys = [")
    keys.reload()
    assert "stay as they were" in caplog.text
    assert keys.tenant_of(LAB_KEY).name == "lab"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no tenant"),
        ("shop = 3", "shop: "),
        ("[shop]", "shop.keys: Field required"),
        ("[shop]\nkeys = []", "shop.keys: "),
        ('[shop]\nkeys = ["short"]', "shop.keys.0: "),
        ('[shop]\nkeys = ["long-enough"]\nlimit = 1', "shop.limit: there is no such field"),
        (
            '[shop]\nkeys = ["long-enough"]\nrequests_per_minut = 1',
            "shop.requests_per_minut: there is no such field; did you mean requests_per_minute?",
        ),
        # Read as a key it would let in whoever has seen the file.
        ('[shop]\nkeys = ["sha256:5e884898"]', "shop.keys.0: behind sha256: come 64 hex digits"),
        (f'[shop]\nkeys = ["SHA256:{64 * "0"}"]', "shop.keys.0: behind sha256: come 64 hex"),
        ('[shop]\nkeys = ["long-enough key"]', "shop.keys.0: a key has no spaces"),
        ('[shop]\nkeys = ["long-enough\\n"]', "shop.keys.0: a key has no spaces"),
        ('[shop]\nkeys = ["long-enough-é"]', "shop.keys.0: a key has no spaces"),
        ('[shop]\nkeys = ["long-enough"]\nrequests_per_minute = -1', "requests_per_minute: "),
        ('[shop]\nkeys = ["long-enough"]\nshare = 0.0', "shop.share: "),
        ('[shop]\nkeys = ["long-enough"]\nexpires = 2027-01-01', "shop.expires: "),
        ('["The Shop"]\nkeys = ["long-enough"]', "The Shop: "),
        ('[a]\nkeys = ["long-enough"]\n[b]\nkeys = ["long-enough"]', "a key of b is there twice"),
        ("[shop", "keys.toml: "),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_field_without_its_keys(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        known(written(tmp_path, text))
    assert complaint in str(refused.value)
    assert "long-enough" not in str(refused.value)


def test_a_file_that_others_may_change_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="others may write"):
        known(path)


async def test_a_tenant_beyond_its_limit_hears_when_to_come_back(
    nats_url: str, folder: Path, tmp_path: Path
) -> None:
    path = written(tmp_path)
    async with cluster(nats_url, folder, api_keys_file=str(path)) as made:
        body = {"model": "tiny", "prompt": "the ferry", "max_tokens": 2}

        async def asked(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await made.http.post("/v1/completions", json=body, headers=headers)

        statuses = [(await asked(SHOP_KEY)).status_code for _ in range(2)]
        refused, other, nobody = [
            await asked(key) for key in ("sk-shop-next", LAB_KEY, "sk-nobody")
        ]
    assert statuses == [200, 200]
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limited"
    assert 0 < int(refused.headers["retry-after"]) <= 31
    assert (other.status_code, nobody.status_code) == (200, 401)
