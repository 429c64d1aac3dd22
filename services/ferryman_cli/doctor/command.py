"""`ferryman doctor`: finds out what there is to examine, and reports what is wrong with it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.runtime.life import EXIT_FAILED
from ferryman.security.credentials import ClusterRole, RoleCredentials
from ferryman.security.credentials_file import read_credentials
from ferryman.settings.cluster import UpOptions
from ferryman.wire.nats.connection import NatsOptions
from ferryman_cli.doctor.examination import Patient, examine
from ferryman_cli.doctor.fault_report import print_report
from ferryman_cli.lifecycle_reader import CLIENT_NAME, authorities_in
from ferryman_launcher.checks.model_places import ModelPlaces
from ferryman_launcher.state_folder import RunningCluster, credentials_path, running_cluster


@dataclass(frozen=True, slots=True)
class DoctorPlace:
    """The flags that say where a cluster is, all empty but the state folder for one that runs
    there; and the model, empty for that of the cluster."""

    nats: str
    redis: str
    cluster: str
    credentials: Path | None
    ca: str
    state_dir: Path
    model: str = ""


def run_doctor(
    options: UpOptions, places: ModelPlaces, place: DoctorPlace, *, as_json: bool
) -> int:
    """Prints the report; returns 1 if something breaks, else 0."""
    patient = patient_of(options, places, place)
    examination = asyncio.run(examine(patient))
    print_report(examination, as_json=as_json)
    return EXIT_FAILED if examination.breaks else 0


def patient_of(options: UpOptions, places: ModelPlaces, place: DoctorPlace) -> Patient:
    """Raises ConfigError for credentials that cannot be read."""
    if place.nats:
        return _named(options, places, place)
    try:
        cluster = running_cluster(place.state_dir)
    except ConfigError:
        return Patient(options, places, options.engine.model, place.state_dir)
    return _running(options, places, place, cluster)


def _named(options: UpOptions, places: ModelPlaces, place: DoctorPlace) -> Patient:
    credentials = _router_credentials(place.credentials) if place.credentials else None
    authorities = authorities_in(place.ca)
    login = credentials.nats if credentials else None
    return Patient(
        options,
        places,
        options.engine.model,
        place.state_dir,
        broker=NatsOptions(place.nats, CLIENT_NAME, login, log=None, authorities=authorities),
        redis_url=place.redis,
        cluster_name=place.cluster or "local",
        credentials=credentials,
        authorities=authorities,
    )


def _running(
    options: UpOptions, places: ModelPlaces, place: DoctorPlace, cluster: RunningCluster
) -> Patient:
    kept = place.credentials or credentials_path(place.state_dir, ClusterRole.ROUTER)
    credentials = None
    try:
        credentials = _router_credentials(kept) if kept.exists() else None
    except ConfigError:
        if place.credentials:
            raise
        # The check of the folder's secrets says what is wrong with them.
    authorities = authorities_in(place.ca or cluster.ca)
    login = credentials.nats if credentials else None
    return Patient(
        options,
        places,
        options.engine.model if place.model else Path(cluster.model_folder),
        place.state_dir,
        cluster,
        broker=NatsOptions(cluster.nats, CLIENT_NAME, login, log=None, authorities=authorities),
        redis_url=cluster.redis,
        cluster_name=cluster.name,
        credentials=credentials,
        authorities=authorities,
    )


def _router_credentials(path: Path) -> RoleCredentials:
    credentials = read_credentials(path)
    if credentials.role is not ClusterRole.ROUTER:
        raise ConfigError(
            f"--credentials {path}: orders need a router's, these are of role {credentials.role}"
        )
    return credentials
