"""What a caller of `ferryman up` may choose, checked before anything is started."""

from __future__ import annotations

import errno
import os
import re
import socket
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.drafted import join_configs
from ferryman.model.manifest import state_manifest
from ferryman.model.shapes import ModelConfig
from ferryman.runtime.logs import LEVELS
from ferryman.schedule.prompt_lookup import NGRAM
from ferryman_cli.tier_choices import TierChoices, check_tiers

DEMO_NAME = "ferryman-demo"
DTYPES = ("float32", "bfloat16", "float64")
PORTS = {"nats": 4222, "tls": 4222, "redis": 6379, "rediss": 6379}
EXAMPLES = {"--nats-url": "nats://127.0.0.1:4222", "--redis-url": "redis://127.0.0.1:6379/0"}
ANSWER_SECONDS = 3.0
_CLUSTER_NAME = re.compile(r"[a-z0-9-]{1,32}")


@dataclass(frozen=True, slots=True)
class EngineChoices:
    """What every worker's engine gets. `threads` 0 shares the cores among the workers.

    `snapshot_grid` is in tokens, 0 without one. `draft` is empty, "ngram" or a folder.
    """

    dtype: str = "float32"
    page_size: int = 16
    chunk_tokens: int = 512
    max_running: int = 32
    memory_bytes: int = 512 << 20
    threads: int = 0
    snapshot_grid: int = 0
    draft: str = ""
    draft_tokens: int = 4

    @property
    def draft_model(self) -> str:
        """The folder of the draft model; empty without one."""
        return "" if self.draft in ("", NGRAM) else str(Path(self.draft).absolute())

    @property
    def drafts_by(self) -> str:
        """As workers are told, wherever they run."""
        return self.draft_model or self.draft


@dataclass(frozen=True, slots=True)
class Doors:
    """Where the router listens; port 0 takes a free one."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001


@dataclass(frozen=True, slots=True)
class Choices:
    """A cluster as asked for. Empty URLs mean servers of our own.

    `prefill_tp` and `decode_tp` are ranks of each worker of that role.
    """

    model: Path
    served_name: str
    engine: EngineChoices = EngineChoices()
    doors: Doors = Doors()
    num_prefill: int = 1
    num_decode: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    nats_url: str = ""
    redis_url: str = ""
    cluster: str = "local"
    tiers: TierChoices = field(default_factory=TierChoices)
    drain_seconds: float = 30.0
    log_level: str = "INFO"

    @property
    def threads(self) -> int:
        """Threads of each rank of each worker."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        num_ranks = self.num_prefill * self.prefill_tp + self.num_decode * self.decode_tp
        return self.engine.threads or max(1, cores // num_ranks)


def demo_model() -> Path:
    """The model that comes with this package."""
    folder = Path(str(files("ferryman_cli"))) / "demo_model"
    if not (folder / "config.json").is_file():
        raise ConfigError("this installation has no demo model; choose one with --model DIR")
    return folder


def check(choices: Choices) -> None:
    """Raises ConfigError for what cannot work, as far as it can be told without a start."""
    config: ModelConfig = check_model(choices.model)
    doors = choices.doors
    if doors.http_port and doors.http_port == doors.grpc_port:
        raise ConfigError(f"--http-port and --grpc-port are both {doors.http_port}")
    for flag, port in (("--http-port", doors.http_port), ("--grpc-port", doors.grpc_port)):
        _check_port(flag, doors.host, port)
    _check_engine(choices.engine)
    _check_words(choices)
    engine = choices.engine
    if engine.draft_model:
        config = join_configs(config, _draft_config(Path(engine.draft_model)))
    manifest = state_manifest(config, engine.dtype, engine.page_size, fingerprint="not yet read")
    for flag, ranks in (("--prefill-tp", choices.prefill_tp), ("--decode-tp", choices.decode_tp)):
        _check_ranks(flag, config, ranks)
    check_tiers(choices.tiers, choices.num_prefill, manifest)
    for flag, url in (("--nats-url", choices.nats_url), ("--redis-url", choices.redis_url)):
        _check_answers(flag, url)


def _check_ranks(flag: str, config: ModelConfig, num_ranks: int) -> None:
    try:
        state_manifest(config, "float32", 1, "not yet read", num_ranks)
    except ConfigError as error:
        raise ConfigError(f"{flag} {num_ranks}: {error}") from None


def check_model(folder: Path) -> ModelConfig:
    """The config of a model of a family that is known here. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"--model {folder}: there is no such folder")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {folder}: there is no config.json in it")
    config = load_config(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"--model {folder}: there is no tokenizer.json in it")
    return config


def _draft_config(folder: Path) -> ModelConfig:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--draft {folder}: it should be ngram, or a folder with a config.json")
    return load_config(folder)


def _check_engine(engine: EngineChoices) -> None:
    if engine.page_size & (engine.page_size - 1):
        raise ConfigError(f"--page-size {engine.page_size} is not a power of two")
    if engine.chunk_tokens < engine.page_size:
        raise ConfigError(
            f"--chunk-tokens {engine.chunk_tokens} is less than a page of {engine.page_size} tokens"
        )
    if engine.snapshot_grid % engine.page_size:
        raise ConfigError(
            f"--snapshot-grid {engine.snapshot_grid} is no multiple of a page of "
            f"{engine.page_size} tokens"
        )


def _check_words(choices: Choices) -> None:
    for flag, word, known in (
        ("--dtype", choices.engine.dtype, DTYPES),
        ("--log-level", choices.log_level, LEVELS),
    ):
        if word not in known:
            raise ConfigError(f"{flag} {word}: it should be one of {', '.join(known)}")
    if not _CLUSTER_NAME.fullmatch(choices.cluster):
        raise ConfigError(f"--cluster {choices.cluster}: 1 to 32 of a-z, 0-9 and - make a name")


def _check_answers(flag: str, url: str) -> None:
    """Whether anybody listens at a URL, or at one of several with commas between them."""
    if not url:
        return
    wheres = [urlsplit(one.strip()) for one in url.split(",")]
    try:
        targets = [(where.hostname or "", where.port or PORTS[where.scheme]) for where in wheres]
    except (KeyError, ValueError):
        raise ConfigError(f"{flag} {url}: it should be a URL such as {EXAMPLES[flag]}") from None
    if not any(_answers(*target) for target in targets):
        raise ConfigError(f"{flag} {url}: nobody answers there")


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def _check_port(flag: str, host: str, port: int) -> None:
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
            raise ConfigError(f"{flag} {port} on {host}: {why}") from None
