"""What the bodies of `/v1/completions` and `/v1/chat/completions` ask for."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferryman.cache.keys import TokenIds, as_token_ids
from ferryman.errors import InvalidRequest
from ferryman.schedule.request import MAX_LOGPROBS, SamplingParams
from ferryman.wire.public import ChatPrompt, ChatTurn, Prompt, TextPrompt, TokenPrompt
from ferryman_router.api.fields import Fields
from ferryman_router.asked import Sampling

MAX_PROMPTS = 64
DEFAULT_COMPLETION_TOKENS = 16
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Body:
    """A checked body. `num_logprobs` is None when none shall be shown."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    is_stream: bool
    includes_usage: bool
    num_logprobs: int | None


def completion_body(raw: dict[str, Any]) -> Body:
    """A body of `/v1/completions`: text, token ids, or a list of either."""
    fields = Fields(raw)
    for name, allowed in (("n", 1), ("best_of", 1), ("echo", False), ("suffix", "")):
        fields.only(name, allowed)
    num_logprobs = (
        fields.whole("logprobs", -1, low=0, high=MAX_LOGPROBS)
        if raw.get("logprobs") is not None
        else None
    )
    max_tokens = fields.value("max_tokens", DEFAULT_COMPLETION_TOKENS)
    sampling = Sampling(_params(fields, max_tokens, num_logprobs))
    return _body(fields, _completion_prompts(fields), sampling, num_logprobs)


def chat_body(raw: dict[str, Any]) -> Body:
    """A body of `/v1/chat/completions`; without a limit it may use all the room there is."""
    fields = Fields(raw)
    fields.only("n", 1)
    for name in ("tools", "functions"):
        fields.only(name, [])
    if fields.has("response_format") and fields.inner("response_format").text("type") != "text":
        raise InvalidRequest("response_format is not supported here", "response_format")
    wanted = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, low=0, high=MAX_LOGPROBS)
    if top and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    num_logprobs = top if wanted else None
    limit = fields.value("max_completion_tokens", fields.value("max_tokens"))
    params = _params(fields, 1 if limit is None else limit, num_logprobs)
    sampling = Sampling(params, is_open_ended=limit is None)
    return _body(fields, (_messages(fields),), sampling, num_logprobs)


def _body(
    fields: Fields, prompts: tuple[Prompt, ...], sampling: Sampling, num_logprobs: int | None
) -> Body:
    is_stream = fields.flag("stream")
    if fields.has("stream_options") and not is_stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    return Body(
        fields.text("model"),
        prompts,
        sampling,
        is_stream,
        fields.inner("stream_options").flag("include_usage"),
        num_logprobs,
    )


def _params(fields: Fields, max_tokens: Any, num_logprobs: int | None) -> SamplingParams:
    """The values check themselves; here only their places and shapes are known."""
    fields.only("logit_bias", {})
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.value("temperature", 1.0),
        top_p=fields.value("top_p", 1.0),
        top_k=max(0, _top_k(fields)),
        min_p=fields.value("min_p", 0.0),
        repetition_penalty=fields.value("repetition_penalty", 1.0),
        presence_penalty=fields.value("presence_penalty", 0.0),
        frequency_penalty=fields.value("frequency_penalty", 0.0),
        seed=fields.value("seed", secrets.randbits(63)),
        stop=_stop(fields),
        stop_token_ids=tuple(fields.items("stop_token_ids")),
        logprobs=0 if num_logprobs is None else max(1, num_logprobs),
        ignore_eos=fields.flag("ignore_eos"),
    )


def _top_k(fields: Fields) -> int:
    """-1 is another spelling of "off"."""
    return fields.whole("top_k", 0, low=-1, high=2**31 - 1)


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise InvalidRequest("stop must be a string or a list of strings", "stop")
    return tuple(stops)


def _completion_prompts(fields: Fields) -> tuple[Prompt, ...]:
    value = fields.value("prompt")
    if isinstance(value, str):
        return (TextPrompt(value),)
    if not isinstance(value, list) or not value:
        message = "prompt must be a string, a list of token ids, or a list of either"
        raise InvalidRequest(message, "prompt")
    if isinstance(value[0], int):
        return (TokenPrompt(_token_ids(value, "prompt")),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts are taken at once", "prompt")
    return tuple(_one_prompt(one, f"prompt[{index}]") for index, one in enumerate(value))


def _one_prompt(value: object, name: str) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list):
        return TokenPrompt(_token_ids(value, name))
    raise InvalidRequest(f"{name} must be a string or a list of token ids", name)


def _token_ids(values: Sequence[object], name: str) -> TokenIds:
    for value in values:
        if type(value) is not int or not 0 <= value < 2**32:
            raise InvalidRequest(f"{name} must hold token ids: whole numbers from 0 on", name)
    return as_token_ids(np.array(values, dtype="<u4"))


def _messages(fields: Fields) -> ChatPrompt:
    found = fields.items("messages")
    if not found:
        raise InvalidRequest("messages must hold at least one message", "messages")
    return ChatPrompt(tuple(_message(one, f"messages[{i}]") for i, one in enumerate(found)))


def _message(value: object, name: str) -> ChatTurn:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", name)
    fields = Fields(value, name)
    role = fields.text("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{name}.role must be one of {', '.join(_ROLES)}", f"{name}.role")
    return ChatTurn(role, _content(fields))


def _content(fields: Fields) -> str:
    """A string, or a list of text parts, which are joined."""
    value = fields.value("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        name = fields.name("content")
        raise InvalidRequest(f"{name} must be a string or a list of text parts", name)
    return "".join(_part(one, f"{fields.name('content')}[{i}]") for i, one in enumerate(value))


def _part(value: object, name: str) -> str:
    if not isinstance(value, dict) or value.get("type") != "text":
        raise InvalidRequest(f"{name} must be a part of type text", name)
    return Fields(value, name).text("text")
