"""The endpoints that only turn texts into tokens, or back.

`/tokenize` and `/detokenize` are as vLLM has them, `/v1/messages/count_tokens` is Anthropic's and
`/v1/responses/input_tokens` OpenAI's: a prompt's token ids, their number, and the text of ids.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ferryman.errors import InvalidRequest
from ferryman.wire.public import Prompt
from ferryman_router.answers.logprobs import TokenNames
from ferryman_router.bodies.anthropic_requests import counted_prompt
from ferryman_router.bodies.field_readers import token_ids_of
from ferryman_router.bodies.field_table import BODIES
from ferryman_router.bodies.json_body import parse_object
from ferryman_router.bodies.openai_requests import chat_prompt, text_prompt, tool_fields
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.responses_requests import response_body
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.doors.answer_endpoints import HttpDeps, headers_of, ignored_headers
from ferryman_router.intake.frontend import Frontend

# Takes a body and its place, answers within so many seconds.
TextReply = Callable[[Frontend, dict[str, Any], BodyPlace, float], Awaitable[dict[str, Any]]]


async def text_answer(deps: HttpDeps, reply: TextReply, request: Request) -> Response:
    """Reads a body, and answers it by `reply`."""
    frontend = deps.frontend
    within = deps.callers.authenticate(headers_of(request)).deadline_seconds
    with deps.memory.holding() as grow:
        raw = b"".join(await deps.body_parts(request, grow, within))
        body = await frontend.intake.run(len(raw), partial(parse_object, raw), within=within)
        place = BodyPlace.of_body(deps.rules)
        answered = await reply(frontend, body, place, within)
        return JSONResponse(answered, headers=ignored_headers(frontend, place.ignored.listed))


async def tokenized(
    frontend: Frontend, raw: dict[str, Any], body: BodyPlace, within: float
) -> dict[str, Any]:
    """`prompt` or `messages` as the model would get them. Raises InvalidRequest."""
    is_chat, model = raw.get("messages") is not None, frontend.ctx.model
    values = BODIES[Api.TOKENIZE_CHAT if is_chat else Api.TOKENIZE_TEXT].read(raw, body)
    model.check_name(values["model"])
    if is_chat:
        prompt: Prompt = chat_prompt(values, body, tool_fields(values, body))
    else:
        prompt = text_prompt(values["prompt"], values)
    token_ids = (await frontend.tokenize(prompt, within=within)).token_ids
    response = {
        "count": len(token_ids),
        "max_model_len": model.max_len,
        "tokens": token_ids.tolist(),
        "token_strs": None,
    }
    if values["return_token_strs"]:
        names = TokenNames(model.tokenizer)
        response["token_strs"] = [names.text(token_id) for token_id in token_ids.tolist()]
    return response


async def detokenized(
    frontend: Frontend, raw: dict[str, Any], body: BodyPlace, within: float
) -> dict[str, Any]:
    """The text of `tokens`, control tokens by their names. Raises InvalidRequest."""
    values, model = BODIES[Api.DETOKENIZE].read(raw, body), frontend.ctx.model
    model.check_name(values["model"])
    ids = token_ids_of(values["tokens"], "tokens")
    if len(ids) and int(ids.max()) >= model.vocab:
        raise InvalidRequest(f"a token id is out of range: there are {model.vocab}", "tokens")

    def decode() -> str:
        return model.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    return {"prompt": await frontend.intake.run(4 * len(ids), decode, within=within)}


async def counted(
    frontend: Frontend, raw: dict[str, Any], body: BodyPlace, within: float
) -> dict[str, Any]:
    """Anthropic's count of the tokens of a conversation. Raises InvalidRequest."""
    values = BODIES[Api.COUNT].read(raw, body)
    prompt = counted_prompt(values, body)
    frontend.ctx.model.check_name(values["model"])
    return {"input_tokens": await _num_tokens(frontend, prompt, within)}


async def counted_items(
    frontend: Frontend, raw: dict[str, Any], body: BodyPlace, within: float
) -> dict[str, Any]:
    """OpenAI's count of the tokens in a body of `/v1/responses`. Raises InvalidRequest."""
    asked = response_body(raw, body)
    frontend.ctx.model.check_name(asked.model)
    (prompt,) = asked.prompts
    count = await _num_tokens(frontend, prompt, within)
    return {"object": "response.input_tokens", "input_tokens": count}


async def _num_tokens(frontend: Frontend, prompt: Prompt, within: float) -> int:
    return len((await frontend.tokenize(prompt, within=within)).token_ids)
