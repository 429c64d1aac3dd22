"""The bodies of `/v1/completions` and `/v1/chat/completions`, read field by field and checked."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ferryman.cache.keys import TokenIds, as_token_ids
from ferryman.errors import InvalidRequest
from ferryman.schedule.request import MAX_LOGPROBS, SamplingParams
from ferryman.wire.public import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ferryman_router.bodies.answer_fields import (
    MAX_CHOICES,
    AnswerOptions,
    answer_options,
    bad_words,
    token_rules,
)
from ferryman_router.bodies.api_fields import CHAT, COMPLETION, NOT_OFFERED, OURS
from ferryman_router.bodies.body_fields import BodyFields
from ferryman_router.bodies.chat_messages import chat_turns
from ferryman_router.bodies.structured_outputs import GrammarField, output_grammar
from ferryman_router.bodies.template_fields import template_variables
from ferryman_router.bodies.tool_fields import ToolChoice, ToolFields, forced_grammar, tool_fields
from ferryman_router.routing.generate_request import RequestedSampling

MAX_PROMPTS = 64
DEFAULT_COMPLETION_TOKENS = 16
MAX_TOKENS = 2**31 - 1
ANY_SEED = -1


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked body. `echo` is the JSON text of an object, or empty: the fields of the answer that
    repeat the body."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: RequestedSampling
    is_stream: bool
    answer: AnswerOptions
    echo: str = ""


def completion_body(raw: dict[str, Any]) -> ParsedRequest:
    """A body of `/v1/completions`: text, token ids, or a list of either."""
    fields = BodyFields(raw)
    fields.check_names(COMPLETION, NOT_OFFERED)
    fields.only("suffix", "", why="no format for the middle of a text is known here")
    num_logprobs = (
        fields.whole("logprobs", -1, low=0, high=MAX_LOGPROBS)
        if raw.get("logprobs") is not None
        else None
    )
    max_tokens, echoes = fields.value("max_tokens", DEFAULT_COMPLETION_TOKENS), fields.flag("echo")
    # The echo of a prompt may be all that is wanted: then one token is drawn, and not shown.
    has_output = not (echoes and type(max_tokens) is int and max_tokens == 0)
    params = sampling_params(fields, max_tokens if has_output else 1, num_logprobs)
    answer = answer_options(fields, num_logprobs, ToolChoice())
    answer = replace(answer, echoes=echoes, has_output=has_output)
    if answer.is_ranked:
        params = replace(params, logprobs=max(1, params.logprobs))
    params = replace(params, prompt_logprobs=_of_prompt(answer))
    sampling = RequestedSampling(params, bad_words=bad_words(fields))
    prompts = _completion_prompts(
        fields.value("prompt"),
        parse_special=parses_special(fields),
        omit_special=not fields.flag("add_special_tokens", default=True),
    )
    return _body(fields, prompts, sampling, answer)


def chat_body(raw: dict[str, Any]) -> ParsedRequest:
    """A body of `/v1/chat/completions`; without a limit it may use all the room there is."""
    fields = BodyFields(raw)
    fields.check_names(CHAT, NOT_OFFERED)
    no_special_tokens(fields)
    tools = tool_fields(fields)
    wanted = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, low=0, high=MAX_LOGPROBS)
    if top and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    num_logprobs = top if wanted else None
    fields.whole("max_completion_tokens", 1, low=1, high=MAX_TOKENS)
    limit = fields.value("max_completion_tokens", fields.value("max_tokens"))
    params = sampling_params(fields, 1 if limit is None else limit, num_logprobs)
    params = with_forced_call(params, tools)
    sampling = RequestedSampling(params, limit is None, bad_words(fields))
    variables = template_variables(fields, tools.tools)
    prompt = ChatPrompt(chat_turns(fields), parses_special(fields), variables)
    answer = answer_options(fields, num_logprobs, ToolChoice.of(tools))
    sampling = replace(sampling, params=replace(params, prompt_logprobs=_of_prompt(answer)))
    return _body(fields, (prompt,), sampling, answer)


def _of_prompt(answer: AnswerOptions) -> int | None:
    """The alternatives that each token of the prompt needs, whatever shows them."""
    echoed = answer.num_logprobs if answer.echoes else None
    wanted = [count for count in (answer.num_prompt_logprobs, echoed) if count is not None]
    return max(wanted, default=None)


def with_forced_call(params: SamplingParams, tools: ToolFields) -> SamplingParams:
    """The parameters with the grammar of a call where one is demanded; InvalidRequest where the
    answer has another form already."""
    if (forced := forced_grammar(tools)) is None:
        return params
    if params.grammar is not None:
        message = "tool_choice demands a call, so the answer has no other form"
        raise InvalidRequest(message, "tool_choice")
    return replace(params, grammar=forced)


def _body(
    fields: BodyFields,
    prompts: tuple[Prompt, ...],
    sampling: RequestedSampling,
    answer: AnswerOptions,
) -> ParsedRequest:
    if len(prompts) * answer.num_candidates > MAX_CHOICES:
        name = "best_of" if answer.is_ranked else "n"
        message = f"{name} times the number of prompts must be at most {MAX_CHOICES}"
        raise InvalidRequest(message, name)
    return ParsedRequest(fields.text("model"), prompts, sampling, fields.flag("stream"), answer)


def sampling_params(
    fields: BodyFields,
    max_tokens: Any,
    num_logprobs: int | None,
    *,
    stop: str = "stop",
    prescribed: Sequence[GrammarField] = (),
) -> SamplingParams:
    """The values check themselves; here only their places and shapes are known. `stop` is the name
    of that field; `prescribed` are forms of the output that have fields of their own."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.value("temperature", 1.0),
        top_p=fields.value("top_p", 1.0),
        top_k=max(0, _top_k(fields)),
        min_p=fields.value("min_p", 0.0),
        repetition_penalty=fields.value("repetition_penalty", 1.0),
        presence_penalty=fields.value("presence_penalty", 0.0),
        frequency_penalty=fields.value("frequency_penalty", 0.0),
        seed=_seed(fields),
        stop=_stop(fields, stop),
        stop_token_ids=tuple(fields.items("stop_token_ids")),
        logprobs=0 if num_logprobs is None else max(1, num_logprobs),
        ignore_eos=fields.flag("ignore_eos"),
        grammar=output_grammar(fields.all, prescribed),
        rules=token_rules(fields),
    )


def _seed(fields: BodyFields) -> Any:
    """-1 is another spelling of "any", as with vLLM and llama.cpp."""
    seed = fields.value("seed", ANY_SEED)
    return secrets.randbits(63) if type(seed) is int and seed == ANY_SEED else seed


def _top_k(fields: BodyFields) -> int:
    """-1 is another spelling of "off"."""
    return fields.whole("top_k", 0, low=-1, high=2**31 - 1)


def _stop(fields: BodyFields, name: str) -> tuple[str, ...]:
    value = fields.value(name, [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise InvalidRequest(f"{name} must be a string or a list of strings", name)
    return tuple(stops)


def no_special_tokens(fields: BodyFields) -> None:
    """Of a chat: raises InvalidRequest for the wish that the tokenizer adds some."""
    fields.only("add_special_tokens", False, why="the chat template adds those tokens")


def parses_special(fields: BodyFields) -> bool:
    """Whether control tokens in the caller's words count as such. Otherwise they are words."""
    ours = fields.inner("ferryman")
    ours.check_names(OURS, {})
    return ours.flag("parse_special")


def _completion_prompts(
    value: object, *, parse_special: bool, omit_special: bool
) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (TextPrompt(value, parse_special, omit_special),)
    if not isinstance(value, list) or not value:
        message = "prompt must be a string, a list of token ids, or a list of either"
        raise InvalidRequest(message, "prompt")
    if isinstance(value[0], int):
        return (TokenPrompt(token_ids_of(value, "prompt")),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts are taken at once", "prompt")
    return tuple(
        _one_prompt(one, f"prompt[{index}]", parse_special=parse_special, omit_special=omit_special)
        for index, one in enumerate(value)
    )


def _one_prompt(value: object, name: str, *, parse_special: bool, omit_special: bool) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(value, parse_special, omit_special)
    if isinstance(value, list):
        return TokenPrompt(token_ids_of(value, name))
    raise InvalidRequest(f"{name} must be a string or a list of token ids", name)


def token_ids_of(values: Sequence[object], name: str) -> TokenIds:
    """Token ids [tokens]; InvalidRequest names the field that has others."""
    for value in values:
        if type(value) is not int or not 0 <= value < 2**32:
            raise InvalidRequest(f"{name} must hold token ids: whole numbers from 0 on", name)
    return as_token_ids(np.array(values, dtype="<u4"))
