"""Checks of the options of `ferryman up` that need the model or the machine, and no process.

Reading a model's config imports torch, so only code that starts a cluster imports this module.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ConfigError
from ferryman.gguf.documents import has_document
from ferryman.model.config import load_config, mtp_config
from ferryman.model.drafted import join_configs
from ferryman.model.shapes.manifest import state_manifest
from ferryman.model.shapes.model_shapes import ModelConfig
from ferryman.model.weights.lora import adapter_names
from ferryman.schedule.drafting import MTP
from ferryman.security.shown_urls import without_logins
from ferryman.settings.cluster import (
    PORTS_OF_A_ROUTER,
    SPARE_SHARE,
    DoorOptions,
    TierOptions,
    UpOptions,
    shared_memory_bytes,
)
from ferryman.settings.declaration import size_text
from ferryman.sizing.exactness import arithmetic_of, check_audit
from ferryman.sizing.memory_plan import MemoryPlan
from ferryman.tiers.layout import SNAPSHOT_SHARE, split_arena
from ferryman.wire.hostcache.arena import SHARED_MEMORY
from ferryman_launcher.checks.cluster_memory import plan_memory, worker_groups
from ferryman_launcher.checks.model_places import EVERYTHING_HERE, ModelPlaces
from ferryman_launcher.options import check_model_folder

PORTS = {"nats": 4222, "tls": 4222, "redis": 6379, "rediss": 6379}
EXAMPLES = {"--nats-url": "nats://127.0.0.1:4222", "--redis-url": "redis://127.0.0.1:6379/0"}
ANSWER_SECONDS = 3.0
HIGHEST_PORT = 65535
LEAST_STORAGE_BYTES = 1 << 20
STORAGE_SCHEMES = ("file", "s3")


def check(choices: UpOptions, places: ModelPlaces = EVERYTHING_HERE) -> MemoryPlan:
    """The memory of a cluster that can work, as far as that shows without a start.

    Raises ConfigError for options that cannot work.
    """
    config: ModelConfig = check_model(choices.engine.model)
    check_doors(choices.doors)
    if choices.draft_model:
        config = join_configs(config, _draft_config(Path(choices.draft_model)))
    elif choices.engine.draft == MTP:
        config = mtp_config(choices.engine.model)
    for workers in choices.roles:
        _check_ranks(workers.flag, config, workers.tp_size)
    _check_weights_agree(choices)
    _check_adapters(choices)
    _check_shared_memory(choices.tiers)
    plan = plan_memory(choices, places)
    _check_arithmetics(plan)
    _check_tiers(choices.tiers, choices.num_prefilling, plan.workers[0].manifest)
    for flag, url in (("--nats-url", choices.nats_url), ("--redis-url", choices.redis_url)):
        _check_answers(flag, url)
    return plan


def _check_ranks(flag: str, config: ModelConfig, num_ranks: int) -> None:
    try:
        state_manifest(config, "float32", 1, "not yet read", num_ranks)
    except ConfigError as error:
        raise ConfigError(f"{flag} {num_ranks}: {error}") from None


def _check_weights_agree(choices: UpOptions) -> None:
    """Raises ConfigError for roles whose models or pages would differ: no hand-off would be
    accepted."""
    for name, what in (("quantize", "models"), ("kv_dtype", "pages")):
        chosen = {group.role: getattr(group.options, name) for group in worker_groups(choices)}
        if len(set(chosen.values())) > 1:
            values = " and ".join(f"{value} for {role} workers" for role, value in chosen.items())
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{name} is {values}, whose {what} would differ; set it for both, as with {flag}"
            )


def _check_arithmetics(plan: MemoryPlan) -> None:
    """Raises ConfigError for bits that cannot be promised, for an audit that would compare them all
    the same, and for roles of unlike arithmetics: none would take over the other's state."""
    for worker in plan.workers:
        check_audit(worker.options)
    chosen = {worker.role: arithmetic_of(worker.options) for worker in plan.workers}
    if len(set(chosen.values())) > 1:
        values = " and ".join(f"{name} for {role} workers" for role, name in chosen.items())
        raise ConfigError(
            f"the arithmetic is {values}, so neither takes the other's state: make them alike, in "
            "ranks, device and number formats, or say --exactness values"
        )


def _check_adapters(choices: UpOptions) -> None:
    """Raises ConfigError for adapters that cannot be read, or that roles do not share."""
    texts = {group.options.lora for group in worker_groups(choices)}
    if len(texts) > 1:
        raise ConfigError("prefill and decode workers have other adapters; set --lora for both")
    if choices.engine.lora and max(workers.tp_size for workers in choices.roles) > 1:
        raise ConfigError("--lora: adapters are not divided among ranks; leave out the ranks")
    adapter_names(choices.engine.lora_folders)


def check_model(folder: Path) -> ModelConfig:
    """The config of a model of a known family. Raises ConfigError."""
    check_model_folder(folder)
    config = load_config(folder)
    if not has_document(folder / "tokenizer.json"):
        raise ConfigError(f"--model {folder}: there is no tokenizer.json in it")
    return config


def _draft_config(folder: Path) -> ModelConfig:
    if not has_document(folder / "config.json"):
        raise ConfigError(
            f"--draft {folder}: it should be ngram, mtp, a folder with a config.json or a GGUF file"
        )
    return load_config(folder)


def _check_answers(flag: str, url: str) -> None:
    """Raises ConfigError unless a process listens at a URL, or at one of several separated by
    commas."""
    if not url:
        return
    wheres = [urlsplit(part.strip()) for part in url.split(",")]
    try:
        targets = [(where.hostname or "", where.port or PORTS[where.scheme]) for where in wheres]
    except (KeyError, ValueError):
        raise ConfigError(
            f"{flag} {without_logins(url)}: it should be a URL such as {EXAMPLES[flag]}"
        ) from None
    if not any(_answers(*target) for target in targets):
        raise ConfigError(f"{flag} {without_logins(url)}: nobody answers there")


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def check_doors(doors: DoorOptions) -> None:
    """Raises ConfigError unless each router can listen at two ports of its own."""
    http, grpc = [router.http for router in doors.ports], [router.grpc for router in doors.ports]
    if shared := sorted({*http} & {*grpc} - {0}):
        raise ConfigError(_shared_port(doors, shared[0]))
    for flag, ports in (("--http-port", http), ("--grpc-port", grpc)):
        if ports[-1] > HIGHEST_PORT:
            raise ConfigError(
                f"{flag} {ports[0]} has no ports for {doors.num_routers} routers up to"
                f" {HIGHEST_PORT}; choose a lower {flag}"
            )
        for index, port in enumerate(ports):
            of_router = f" of router {index + 1}" if doors.num_routers > 1 else ""
            _check_port(flag, doors.host, port, of_router)


def _shared_port(doors: DoorOptions, port: int) -> str:
    if doors.http_port == doors.grpc_port:
        return f"--http-port and --grpc-port are both {port}"
    return (
        f"--http-port {doors.http_port} and --grpc-port {doors.grpc_port} of {doors.num_routers}"
        f" routers meet at {port}, because each router has its ports {PORTS_OF_A_ROUTER} above"
        " those of the one before; choose one of them odd and the other even"
    )


def _check_port(flag: str, host: str, port: int, of_router: str) -> None:
    if not port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            why = f"is taken; choose another {flag}" if is_taken else str(error.strerror).lower()
            raise ConfigError(f"{flag} {port}{of_router} on {host}: {why}") from None


def _check_tiers(tiers: TierOptions, num_prefill: int, manifest: StateManifest) -> None:
    """Raises ConfigError for what cannot work; `manifest` says how large units are."""
    if tiers.num_nodes > num_prefill:
        raise ConfigError(
            f"--nodes {tiers.num_nodes}: each needs a prefill worker, and --prefill is "
            f"{num_prefill}"
        )
    if tiers.host_bytes:
        _check_arena(tiers, manifest)
    if tiers.storage_bytes:
        _check_capacity(tiers, manifest)
    if tiers.has_storage_url:
        _check_storage_url(tiers.storage_dir)
    if tiers.storage_dir and not tiers.has_storage:
        raise ConfigError(f"--storage-dir {tiers.storage_dir} has no use with --storage-bytes 0")
    if tiers.storage_dir and not tiers.has_storage_url:
        _check_folder(Path(tiers.storage_dir))


def _check_shared_memory(tiers: TierOptions) -> None:
    """Raises ConfigError if the host tier that was asked for has no room."""
    room, asked = shared_memory_bytes() * SPARE_SHARE, size_text(tiers.host_bytes)
    if tiers.host_bytes > room:
        raise ConfigError(f"--host-memory {asked}: {SHARED_MEMORY} has room for {size_text(room)}")


def _check_arena(tiers: TierOptions, manifest: StateManifest) -> None:
    asked = size_text(tiers.host_bytes)
    try:
        split_arena(manifest, tiers.arena_bytes, SNAPSHOT_SHARE)
    except ConfigError:
        raise ConfigError(
            f"--host-memory {asked}: the share of a node does not hold one {_units(manifest)}"
        ) from None


def _check_capacity(tiers: TierOptions, manifest: StateManifest) -> None:
    least = LEAST_STORAGE_BYTES + sum(layout.slot_bytes for layout in manifest.layouts)
    if tiers.node_storage_bytes < least:
        raise ConfigError(
            f"--storage-bytes {size_text(tiers.storage_bytes)}: a node needs {size_text(least)} at "
            f"least, to hold one {_units(manifest)}; 0 is no storage"
        )


def _units(manifest: StateManifest) -> str:
    """`page (1M) and one snapshot (107.3K)`."""
    words = {Kind.RECURRENT: "snapshot", Kind.FULL: "page", Kind.WINDOW: "window page"}
    sizes = (
        f"{words[layout.kind]} ({size_text(layout.slot_bytes)})" for layout in manifest.layouts
    )
    return " and one ".join(sizes)


def _check_storage_url(url: str) -> None:
    if urlsplit(url).scheme not in STORAGE_SCHEMES:
        kinds = "a folder, file:///folder or s3://bucket/prefix"
        raise ConfigError(f"--storage-dir {url}: storage is {kinds}")


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"--storage-dir {folder}: it is no folder") from None
    except OSError as error:
        raise ConfigError(f"--storage-dir {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--storage-dir {folder}: nothing may be written there")
