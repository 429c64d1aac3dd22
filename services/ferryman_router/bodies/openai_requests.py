"""The bodies of `/v1/completions` and `/v1/chat/completions`, read and checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.text.marked_turn import MarkedChat
from ferryman.wire.public import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ferryman_router.bodies.chat_messages import chat_turns, continued, template_variables
from ferryman_router.bodies.field_kinds import ANY, TEXT, Record, Values, mapping, record
from ferryman_router.bodies.field_readers import token_ids_of
from ferryman_router.bodies.field_table import BODIES, MAX_CHOICES
from ferryman_router.bodies.parsed_request import (
    AnswerOptions,
    ParsedRequest,
    answer_options,
    sampling_params,
)
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.tool_fields import (
    FUNCTION,
    NO_TOOLS,
    SCHEMA,
    ToolFields,
    check_type,
    chosen_tools,
    tool_breakpoints,
    tool_choice,
    tools_of,
)
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.routing.generate_request import RequestedSampling

MAX_PROMPTS = 64
DEFAULT_COMPLETION_TOKENS = 16


def completion_body(raw: dict[str, Any], body: BodyPlace) -> ParsedRequest:
    """A body of `/v1/completions`: text, token ids, or a list of either."""
    api, values = Api.COMPLETION, BODIES[Api.COMPLETION].read(raw, body)
    num_logprobs, max_tokens = values["logprobs"], values["max_tokens"]
    if max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    # The echo of a prompt may be all that is wanted: then one token is drawn, and not shown.
    has_output = not (values["echo"] and type(max_tokens) is int and max_tokens == 0)
    limit = max_tokens if has_output else 1
    params = sampling_params(api, values, limit, num_logprobs, tools=NO_TOOLS)
    answer = answer_options(api, values, num_logprobs, NO_TOOLS)
    answer = replace(answer, has_output=has_output)
    if answer.is_ranked:
        params = replace(params, logprobs=max(1, params.logprobs))
    sampling = RequestedSampling(params, bad_words=values["bad_words"])
    return _body(api, values, _completion_prompts(values), sampling, answer)


def chat_body(raw: dict[str, Any], body: BodyPlace) -> ParsedRequest:
    """A body of `/v1/chat/completions`; without a limit it may use all the room there is."""
    api, values = Api.CHAT, BODIES[Api.CHAT].read(raw, body)
    tools = tool_fields(values, body)
    wanted, top = values["logprobs"], values["top_logprobs"]
    if top and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    num_logprobs = top if wanted else None
    limit = values["max_completion_tokens"]
    limit = values["max_tokens"] if limit is None else limit
    max_tokens = 1 if limit is None else limit
    params = sampling_params(api, values, max_tokens, num_logprobs, tools=tools)
    prompt = chat_prompt(values, body, tools)
    goes_on = continued(prompt.turns[-1]) if values["continue_final_message"] else None
    answer = replace(answer_options(api, values, num_logprobs, tools), continued=goes_on)
    sampling = RequestedSampling(params, limit is None, values["bad_words"])
    return _body(api, values, (prompt,), sampling, answer)


# The tools of a chat.

# The schema of what a function returns is a field that templates of Hugging Face know.
_FUNCTION = Record({**FUNCTION, "parameters": SCHEMA, "return": ANY})
_TOOL = record("type cache_control", function=replace(_FUNCTION.kind, missing={}))
_CHOICES = {"function": record("type", function=record(name=TEXT).kind)}


def tool_fields(values: Values, body: BodyPlace) -> ToolFields:
    """`tools`, `tool_choice` and `parallel_tool_calls`; InvalidRequest names what is wrong."""
    tools = tools_of(values, body, _tool)
    place = body.field("tool_choice")
    choice, name = tool_choice(values["tool_choice"], place, _CHOICES, _called, "name a function")
    is_parallel = values["parallel_tool_calls"]
    fields = chosen_tools(tools, choice, name, body, is_parallel=is_parallel)
    return replace(fields, breakpoints=tool_breakpoints(values["tools"], tools, body))


def _tool(value: object, place: BodyPlace) -> list[dict[str, Any]]:
    """A tool as it was sent, but for fields that are null or not known. They stay in the sender's
    order, in which a template may write them."""
    tool: dict[str, Any] = mapping(value, place)
    check_type(tool, place, "function")
    read = _TOOL.read(tool, place)["function"]
    function = {name: read[name] for name in tool["function"] if read.get(name) is not None}
    fields = {"type": "function", "function": function}
    return [{name: fields[name] for name in tool if name in fields}]


def _called(choice: Values) -> str | None:
    return str(choice["function"]["name"])


# Prompts.


def chat_prompt(values: Values, body: BodyPlace, tools: ToolFields) -> ChatPrompt:
    """The prompt of a chat, with what the template reads besides."""
    variables = template_variables(values, tools.tools)
    turns = chat_turns(values, body)
    return MarkedChat(turns, parses_special(values), variables, tools.breakpoints)


def text_prompt(text: str, values: Values) -> TextPrompt:
    """A prompt that is no chat."""
    return TextPrompt(text, parses_special(values), not values["add_special_tokens"])


def parses_special(values: Values) -> bool:
    """Whether control tokens in the caller's words count as such. Otherwise they are words."""
    return bool(values["ferryman"]["parse_special"])


def _body(
    api: Api,
    values: Values,
    prompts: tuple[Prompt, ...],
    sampling: RequestedSampling,
    answer: AnswerOptions,
) -> ParsedRequest:
    if len(prompts) * answer.num_candidates > MAX_CHOICES:
        name = "best_of" if answer.is_ranked else "n"
        message = f"{name} times the number of prompts must be at most {MAX_CHOICES}"
        raise InvalidRequest(message, name)
    # The alternatives that each token of the prompt needs, whatever shows them.
    echoed = answer.num_logprobs if answer.echoes else None
    counts = [count for count in (answer.num_prompt_logprobs, echoed) if count is not None]
    params = replace(sampling.params, prompt_logprobs=max(counts, default=None))
    sampling = replace(sampling, params=params)
    return ParsedRequest(api, values["model"], prompts, sampling, values["stream"], answer)


def _completion_prompts(values: Values) -> tuple[Prompt, ...]:
    value = values["prompt"]
    if isinstance(value, str):
        return (_prompt(value, "prompt", values),)
    if not isinstance(value, list) or not value:
        message = "prompt must be a string, a list of token ids, or a list of either"
        raise InvalidRequest(message, "prompt")
    if isinstance(value[0], int):
        return (TokenPrompt(token_ids_of(value, "prompt")),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts are taken at once", "prompt")
    return tuple(_prompt(prompt, f"prompt[{i}]", values) for i, prompt in enumerate(value))


def _prompt(value: object, name: str, values: Values) -> Prompt:
    if isinstance(value, str):
        return text_prompt(value, values)
    if isinstance(value, list):
        return TokenPrompt(token_ids_of(value, name))
    raise InvalidRequest(f"{name} must be a string or a list of token ids", name)
