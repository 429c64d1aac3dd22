"""The form of the answer to each kind of body."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

from ferryman.text.tool_calls.formats import OutputSyntax
from ferryman_router.answers.answer_grammar import tool_use
from ferryman_router.answers.anthropic_output import CacheWrites, MessageFields, MessagesFormat
from ferryman_router.answers.cache_diagnostics import Compare, cache_diagnostics
from ferryman_router.answers.chat_output import OutputReading, ParsedChatFormat
from ferryman_router.answers.completion_output import CompletionFormat
from ferryman_router.answers.logprobs import TokenNames
from ferryman_router.answers.openai_responses import ChatFormat
from ferryman_router.answers.response_format import ResponseFormat
from ferryman_router.answers.response_header import ResponseHeader
from ferryman_router.answers.responses_output import ResponsesFormat
from ferryman_router.bodies.parsed_request import ParsedRequest
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.request.request_runner import RequestRunner
from ferryman_router.served_model import ServedModel

TAIL_TOKENS = 64  # of a prompt: enough to hold a mark that it ends with
# The name of an answer says what it is.
_ANSWER_IDS = {
    Api.CHAT: "chatcmpl-{}",
    Api.COMPLETION: "cmpl-{}",
    Api.RESPONSES: "resp_{}",
    Api.MESSAGES: "msg_{}",
}


def answer_format(
    body: ParsedRequest,
    requests: Sequence[RequestRunner],
    model: ServedModel,
    syntax: OutputSyntax,
    *,
    request_id: str,
    created: int,
    echoes: Sequence[str],
    compare: Compare,
    page_size: Callable[[], int],
) -> ResponseFormat:
    """The form of the answer to the call of this id, begun at `created` (seconds since 1970).
    `echoes` are the texts of the prompts if they come back. `compare` tells how the prompt differs
    from an earlier one, and `page_size` is asked when the answer ends."""
    answer = body.answer
    heading = ResponseHeader(
        _ANSWER_IDS[body.api].format(request_id),
        model.check_name(body.model),
        created,
        answer.num_logprobs,
        TokenNames(model.tokenizer, answer.names_by_id),
        [runner.asked.token_ids for runner in requests] if answer.returns_token_ids else (),
        answer.includes_usage or answer.includes_usage_always,
        echoes,
        answer.num_prompt_logprobs,
        _named_stops(body, model),
    )
    if body.api is Api.COMPLETION:
        return _completion_format(heading, requests, model)
    if body.api is Api.CHAT and not syntax.reads(answer.tools.use):
        return ChatFormat(heading)
    reading = _reading(body, requests, model, syntax)
    if body.api is Api.CHAT:
        return ParsedChatFormat(heading, reading)
    asked = requests[0].asked
    diagnostics = cache_diagnostics(body, asked, compare)
    if body.api is Api.MESSAGES:
        writes = CacheWrites(asked.located.breakpoints, page_size)
        fields = MessageFields(json.loads(body.echo), diagnostics, writes)
        return MessagesFormat(heading, asked.prompt_len, fields, reading)
    return ResponsesFormat(heading, json.loads(body.echo) | diagnostics, reading)


def _completion_format(
    heading: ResponseHeader, requests: Sequence[RequestRunner], model: ServedModel
) -> CompletionFormat:
    """The form of texts, whose characters are counted by detokenizers like those of the answers."""
    visible = requests[0].asked.request.text.shown
    detokenizer = partial(model.tokenizer.detokenizer, visible=visible)
    return CompletionFormat(heading, _prompt_tails(requests), detokenizer)


def _prompt_tails(requests: Sequence[RequestRunner]) -> list[list[int]]:
    """The last tokens of each prompt."""
    return [runner.asked.token_ids[-TAIL_TOKENS:].tolist() for runner in requests]


def _named_stops(body: ParsedRequest, model: ServedModel) -> frozenset[int]:
    """The caller's stop tokens. As with vLLM, the model's own are not named as the reason of an
    end, unless `ignore_eos` is set and the caller lists them."""
    params = body.sampling.params
    ends = frozenset() if params.ignore_eos else model.tokenizer.eos_token_ids
    return frozenset(params.stop_token_ids) - ends


def _reading(
    body: ParsedRequest, requests: Sequence[RequestRunner], model: ServedModel, syntax: OutputSyntax
) -> OutputReading:
    """The reading, with the ends of the prompts: one may have begun a thought."""
    decode = partial(model.tokenizer.decode, skip_special_tokens=False)
    tails = [decode(tail) for tail in _prompt_tails(requests)]
    first_number = model.next_call_number(body.prompts[0])
    return OutputReading(syntax, tool_use(body), body.answer, tails, first_number)
