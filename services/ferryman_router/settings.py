"""The router's settings: `FERRYMAN_ROUTER_*`, nested names joined by two underscores."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings

from ferryman.runtime.settings import (
    BusSettings,
    Count,
    IndexSettings,
    LifeSettings,
    ListenSettings,
    Seconds,
    settings_config,
)


class LimitSettings(BaseModel):
    """Bounds on what clients may ask for, and on the router's patience."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    max_queued: Count = 1024
    max_queued_per_tenant: Count = 512
    max_in_flight: Count = 4096
    max_body_bytes: Count = 8 << 20
    deadline_seconds: Seconds = 300.0
    linger_seconds: Seconds = 0.75
    no_worker_seconds: Seconds = 10.0
    beat_timeout_seconds: Seconds = 8.0
    stream_patience_seconds: Seconds = 1.0
    retry_share: float = Field(default=0.1, gt=0, le=1)
    retry_floor: Count = 4


class RouterSettings(BaseSettings):
    """`model` is the folder whose tokenizer, chat template and limits are served.

    `served_name` is what clients call it (default: the folder's name). With `api_keys`, separated
    by commas, every caller needs one of them, and each key is a tenant of its own.
    """

    model_config = settings_config("router")
    model: Path
    served_name: str = ""
    http: ListenSettings = ListenSettings(port=8000)
    grpc: ListenSettings = ListenSettings(port=8001)
    bus: BusSettings = BusSettings()
    index: IndexSettings = IndexSettings()
    life: LifeSettings = LifeSettings()
    limits: LimitSettings = LimitSettings()
    api_keys: SecretStr = SecretStr("")

    @field_validator("model")
    @classmethod
    def _is_folder(cls, value: Path) -> Path:
        if not value.is_dir():
            raise ValueError("should be a folder that exists")
        return value

    @property
    def keys(self) -> frozenset[str]:
        given = self.api_keys.get_secret_value().split(",")
        return frozenset(key.strip() for key in given if key.strip())
