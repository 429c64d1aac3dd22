"""Three ways to have a cold answer, and the trial that finds the one that works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any, Protocol

from ferryman.errors import ConfigError
from ferryman_bench.endpoint.client import AskedEngine, EndpointRefusal, ServedCard
from ferryman_bench.endpoint.inquiry import Inquiry
from ferryman_bench.verify.ways import Material

_SALT_BITS = 64


class ColdKind(StrEnum):
    """The way to ask a question so that no state is reused; `auto` tries them in this order."""

    AUTO = "auto"
    SALT = "salt"
    UNCACHED = "no-cache"
    FLUSH = "flush"


class ColdSource(Protocol):
    """Makes questions cold. `warm_fields` are new for each probe."""

    @property
    def meaning(self) -> str:
        """A sentence for people."""
        ...

    @property
    def has_flush(self) -> bool:
        """Whether `flush` costs requests, so that many questions should share one."""
        ...

    def warm_fields(self) -> Mapping[str, Any]: ...

    def cold_fields(self) -> Mapping[str, Any]: ...

    async def flush(self, asker: AskedEngine) -> None:
        """Asks what is needed before a question is cold."""
        ...


@dataclass(frozen=True, slots=True)
class SaltedSource:
    """State of another `cache_salt` is not reused."""

    random: Random
    has_flush: bool = False
    meaning: str = "a new cache_salt"

    def warm_fields(self) -> Mapping[str, Any]:
        return {"cache_salt": f"verify-{self.random.getrandbits(_SALT_BITS):x}"}

    cold_fields = warm_fields

    async def flush(self, asker: AskedEngine) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class UncachedSource:
    """llama-server computes a prompt with `cache_prompt: false` from its first token."""

    has_flush: bool = False
    meaning: str = "cache_prompt: false"

    def warm_fields(self) -> Mapping[str, Any]:
        return {}

    def cold_fields(self) -> Mapping[str, Any]:
        return {"cache_prompt": False}

    async def flush(self, asker: AskedEngine) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class FlushedSource:
    """Other prompts push a question's state out; on a large cache they may not."""

    material: Material
    has_flush: bool = True
    meaning: str = "other prompts between, which push state out"

    def warm_fields(self) -> Mapping[str, Any]:
        return {}

    cold_fields = warm_fields

    async def flush(self, asker: AskedEngine) -> None:
        for _ in range(self.material.num_fillers):
            await asker.ask(self.material.filler())


async def cold_source(
    kind: ColdKind, asker: AskedEngine, material: Material, card: ServedCard
) -> ColdSource:
    """The source of `kind`; for AUTO the first that works here by the cached tokens that answers
    report, or by the name of the software. Raises ConfigError if `kind` is refused."""
    salted, uncached = SaltedSource(material.random), UncachedSource()
    match kind:
        case ColdKind.SALT:
            return await _accepted(salted, asker, material)
        case ColdKind.UNCACHED:
            return await _accepted(uncached, asker, material)
        case ColdKind.FLUSH:
            return FlushedSource(material)
    if card.owner in ("vllm", "sglang"):
        return salted
    if card.owner == "llamacpp":
        return uncached
    for source in (salted, uncached):
        if await _works(source, asker, material.new_question()):
            return source
    return FlushedSource(material)


async def _accepted(source: ColdSource, asker: AskedEngine, material: Material) -> ColdSource:
    try:
        await asker.ask(material.filler().with_fields(source.cold_fields()))
    except EndpointRefusal as error:
        raise ConfigError(f"the server does not take {source.meaning}: {error}") from None
    return source


async def _works(source: ColdSource, asker: AskedEngine, question: Inquiry) -> bool:
    """Whether a question that was just asked is reported as reused warm, and as new cold."""
    warm = question.with_fields(source.warm_fields())
    try:
        await asker.ask(warm)
        reused = (await asker.ask(warm)).usage.cached_tokens
        computed = (await asker.ask(question.with_fields(source.cold_fields()))).usage.cached_tokens
    except EndpointRefusal:
        return False
    return bool(reused) and not computed
