"""The router's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, SecretStr

from ferryman.settings.declaration import GROUP, Called, Count, Fixed, Seconds, Share
from ferryman.settings.folders import LoraFolders, ModelFolder
from ferryman.settings.groups import (
    AccessSettings,
    BusSettings,
    IndexSettings,
    LifeSettings,
    ListenSettings,
    TracingSettings,
)


class LimitSettings(BaseModel):
    """Bounds on what clients may ask for, and on the router's patience."""

    model_config = GROUP
    max_queued: Count = 1024
    """Requests that wait for a worker (512 of one tenant); beyond: 429."""
    max_queued_per_tenant: Fixed[Count] = 512
    max_in_flight: Count = 4096
    """Requests under way."""
    max_body_bytes: Count = 8 << 20
    """The size of an HTTP body; beyond: 413, as for more than 524,288 values or 65,536 fields."""
    max_connections: Count = 8192
    """HTTP, and again gRPC, or fewer if the process may not open so many files; beyond: 503
    (gRPC: closed)"""
    max_connections_per_address: Count = 1024
    """HTTP; raise it behind a proxy, which is one address. Where all are taken, a connection
    without a request gives way"""
    # For the head, and for the whole body, of an HTTP request to come; then 408, and closed.
    header_seconds: Fixed[Seconds] = 10.0
    body_seconds: Fixed[Seconds] = 60.0
    default_max_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of an answer to a request that names no limit; 0: as many as there is room for."""
    # Prompts of each tenant that are kept in memory to say where the next one parts from them.
    compared_prompts: Fixed[Count] = 8
    deadline_seconds: Seconds = 300.0
    """For callers that name none (`x-ferryman-deadline-ms`, or gRPC's)"""
    # The time before a request without a client is cancelled.
    linger_seconds: Fixed[Seconds] = 0.75
    no_worker_seconds: Seconds = 10.0
    """So long, and as long again as its last start took (30 s before the first), a role may be
    without a worker that is ready or advances in its start; then all who wait for one, streams
    under way too, end with `NoWorker` (503)"""
    # Silence after which a worker counts as lost.
    beat_timeout_seconds: Fixed[Seconds] = 8.0
    stream_patience_seconds: Seconds = 2.0
    """The time in which a worker has to answer again after its token stream or a call broke; then
    it is lost."""
    # The share of requests in flight that may be tried again because their own attempt failed, and
    # a number that may be in any case. Deaths of workers are not counted.
    retry_share: Fixed[Share] = 0.1
    retry_floor: Fixed[Count] = 4


class RouterSettings(BaseModel):
    """The model that is served, where, and within which limits."""

    model_config = GROUP
    model: ModelFolder
    """A Hugging Face folder with safetensors, of a family in the README's model card, or a GGUF
    file; the router reads tokenizer, chat template and config."""
    cluster_key_file: Path
    """The cluster's secret. See docs/operating.md."""
    served_name: str = ""
    """The model's name for clients; empty: the folder's name."""
    lora: LoraFolders = ""
    """`name=DIR`, as the workers have them: names that clients may ask for."""
    tool_parser: str = "auto"
    """The format in which the model writes calls of tools, by vLLM's name; `auto`: by its chat
    template. `none`: they stay text."""
    reasoning_parser: str = "auto"
    """The format in which the model writes its thoughts, by vLLM's name; `auto`: by its chat
    template. `none`: they stay text."""
    http: Annotated[ListenSettings, Called(port="http_port")] = ListenSettings(port=8000)
    """OpenAI's API, `/health`, `/ready`, `/metrics`."""
    grpc: Annotated[ListenSettings, Called(port="grpc_port")] = ListenSettings(port=8001)
    """`InferenceService`."""
    bus: Annotated[BusSettings, Called(url="nats_url")] = BusSettings()
    index: Annotated[IndexSettings, Called(url="redis_url")] = IndexSettings()
    life: LifeSettings = LifeSettings()
    access: AccessSettings = AccessSettings()
    traced: TracingSettings = TracingSettings()
    limits: LimitSettings = LimitSettings()
    cors_origin: str = ""
    """Origins, separated by commas, whose pages may call the HTTP API from a browser; `*`: all;
    empty: none."""
    strict_fields: bool = False
    """Refuses a body with a field that is not known (400), instead of naming it with the answer."""
    verbatim_prompts: bool = False
    """Keeps a line in the prompt that changes with every request and means nothing to a model:
    Claude Code's `x-anthropic-billing-header`."""
    web_page: bool = True
    """The page at `/`: the fleet, requests as they run, why tokens were reused or computed, a chat.
    See docs/page.md."""
    state_signers: str = ""
    """Public keys, separated by commas, of other clusters whose state files may be loaded; this
    cluster's own always may. See docs/state-files.md."""
    api_keys: SecretStr = SecretStr("")
    """Keys, separated by commas; with any, callers need one, and each is a tenant with a cache
    of its own."""
    api_keys_file: str = ""
    """Tenants with names, keys, limits and expiry, in TOML; read again at SIGHUP. See
    docs/operating.md."""

    @property
    def origins(self) -> frozenset[str]:
        return frozenset(origin.strip() for origin in self.cors_origin.split(",") if origin.strip())

    @property
    def believed_signers(self) -> frozenset[str]:
        return frozenset(key.strip() for key in self.state_signers.split(",") if key.strip())

    @property
    def keys_path(self) -> Path | None:
        return Path(self.api_keys_file) if self.api_keys_file else None

    @property
    def keys(self) -> frozenset[str]:
        entries = self.api_keys.get_secret_value().split(",")
        return frozenset(key.strip() for key in entries if key.strip())
