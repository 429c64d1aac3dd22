"""deploy/observe and the profile of compose.yaml that uses it."""

from __future__ import annotations

import re
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from tests.cluster_keys import KEY
from tests.deploy.compose_file import ROOT, ROUTERS, SETTINGS, compose, environment, mounts
from tests.deploy.shipped_metrics import OBSERVE, alerts, asked_for, panels, paths, queries

from ferryman.runtime.access import MetricsAccess
from ferryman.runtime.credential_folders import METRICS, ServerUrls, write_credential_folders
from ferryman.security.credentials import ClusterRole, credentials_of


def test_the_profile_mounts_every_file_that_is_shipped() -> None:
    described = compose()["services"]
    mounted = [
        ROOT / place
        for service in ("prometheus", "grafana")
        for place in mounts(service)
        if "/" in place
    ]
    assert all(
        described[service]["profiles"] == ["observe"] for service in ("prometheus", "grafana")
    )
    assert all(path.exists() for path in mounted)
    assert all(any(path.is_relative_to(place) for place in mounted) for path in paths())


def test_prometheus_looks_where_each_service_shows_its_metrics() -> None:
    scraped = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())["scrape_configs"]
    found: dict[str, int] = {}
    for job in scraped:
        (places,) = job["dns_sd_configs"]
        found |= dict.fromkeys(places["names"], places["port"])
    of_router = int(environment("router")["FERRYMAN_HTTP_PORT"])
    shown = {
        name: int(environment(name).get("FERRYMAN_OBSERVE_PORT", of_router)) for name in SETTINGS
    }
    assert found == {**shown, ROUTERS: of_router}


def test_prometheus_shows_the_token_that_it_can_read_and_sees_no_other_secret() -> None:
    scraped = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())["scrape_configs"]
    (shown,) = {job["authorization"]["credentials_file"] for job in scraped}
    secrets = {name: at for name, at in mounts("prometheus").items() if "/" not in name}
    assert secrets == {"metrics-token": (str(Path(shown).parent), False)}
    assert mounts("credentials")["metrics-token"] == (str(Path(shown).parent), True)
    services = compose()["services"]
    assert services["prometheus"]["user"] == services["credentials"]["user"], "its files are 0600"


def test_the_maker_s_token_reads_metrics(tmp_path: Path) -> None:
    write_credential_folders(tmp_path, KEY, ServerUrls("nats://n:1", "redis://r:2/0", "local"))
    (made,) = (tmp_path / METRICS).iterdir()
    header = f"Bearer {made.read_text()}"
    assert MetricsAccess(credentials_of(KEY, ClusterRole.DECODE)).refusal([header]) is None
    assert made.name == "token"
    assert made.stat().st_mode & 0o777 == 0o600


def test_every_alert_says_how_bad_it_is_and_what_it_means() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) > 5
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")


def test_panels_have_places_of_their_own() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels()}) == len(places)


def test_brackets_of_every_query_close() -> None:
    for query in queries():
        assert all(query.count(a) == query.count(b) for a, b in ("()", "[]", "{}"))
    assert len(asked_for()) > 15


def test_no_rate_is_taken_over_several_names_of_one_process() -> None:
    """A rate loses its name: two metrics of one process would be one series twice, an error."""
    expressions = [each["expr"] for each in alerts()]
    assert not [each for each in expressions if re.search(r'__name__=~"[^"]*\|', each)]
