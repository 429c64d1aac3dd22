"""The SDK: one asynchronous, typed client of a Ferryman cluster.

    async with Client("127.0.0.1:8001") as client:
        async for event in client.generate("The red kite is in", SamplingParams(max_tokens=8)):
            ...

Arguments and results are plain values; every failure is one of `ferryman.errors`.
"""

from __future__ import annotations

from ferryman.client.client import Client
from ferryman.client.retries import ConnectionBroken, NotResumable, Retries
from ferryman.schedule.prompt_scores import PromptLogprob, PromptScores
from ferryman.schedule.request import FinishReason, SamplingParams
from ferryman.security.tls import DoorTls
from ferryman.wire.public import (
    NOT_PARTED,
    ChatPrompt,
    ChatTurn,
    GenerateEvent,
    GenerateFinished,
    GenerateStarted,
    LifecycleEvent,
    ModelCard,
    Parting,
    RouteCandidate,
    RouteExplanation,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
)
from ferryman.wire.values import Usage

__all__ = [
    "NOT_PARTED",
    "ChatPrompt",
    "ChatTurn",
    "Client",
    "ConnectionBroken",
    "DoorTls",
    "FinishReason",
    "GenerateEvent",
    "GenerateFinished",
    "GenerateStarted",
    "LifecycleEvent",
    "ModelCard",
    "NotResumable",
    "Parting",
    "PromptLogprob",
    "PromptScores",
    "Retries",
    "RouteCandidate",
    "RouteExplanation",
    "SamplingParams",
    "TextPrompt",
    "TokenChunk",
    "TokenPrompt",
    "Usage",
]
