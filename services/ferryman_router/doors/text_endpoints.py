"""`/tokenize` and `/detokenize`, as vLLM has them, and Anthropic's `/v1/messages/count_tokens`: a
prompt's token ids, their number, and the text of ids."""

from __future__ import annotations

from functools import partial
from typing import Any

from ferryman.cache.keys import TokenIds
from ferryman.errors import InvalidRequest
from ferryman.wire.public import Prompt, TextPrompt
from ferryman_router.bodies.anthropic_requests import counted_prompt
from ferryman_router.bodies.field_kinds import Values
from ferryman_router.bodies.field_readers import token_ids_of
from ferryman_router.bodies.field_table import BODIES
from ferryman_router.bodies.openai_requests import chat_prompt, parses_special
from ferryman_router.bodies.template_fields import template_variables
from ferryman_router.bodies.tool_fields import tool_fields
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.intake.frontend import Frontend


async def tokenized(frontend: Frontend, raw: dict[str, Any], within: float) -> dict[str, Any]:
    """`prompt` or `messages` as the model would get them. Raises InvalidRequest."""
    is_chat, model = raw.get("messages") is not None, frontend.ctx.model
    values = BODIES[Api.TOKENIZE_CHAT if is_chat else Api.TOKENIZE_TEXT].read(raw)
    model.check_name(values["model"])
    prompt = _chat(values) if is_chat else _text_prompt(values)
    token_ids = await frontend.tokenize(prompt, within=within)
    response = {
        "count": len(token_ids),
        "max_model_len": model.max_len,
        "tokens": token_ids.tolist(),
        "token_strs": None,
    }
    if values["return_token_strs"]:
        response["token_strs"] = [_name(frontend, token_id) for token_id in token_ids.tolist()]
    return response


async def detokenized(frontend: Frontend, raw: dict[str, Any], within: float) -> dict[str, Any]:
    """The text of `tokens`, control tokens by their names. Raises InvalidRequest."""
    values, model = BODIES[Api.DETOKENIZE].read(raw), frontend.ctx.model
    model.check_name(values["model"])
    ids = token_ids_of(values["tokens"], "tokens")
    if len(ids) and int(ids.max()) >= model.vocab:
        raise InvalidRequest(f"a token id is out of range: there are {model.vocab}", "tokens")
    decode = partial(_text, frontend, ids)
    return {"prompt": await frontend.intake.run(4 * len(ids), decode, within=within)}


async def counted(frontend: Frontend, raw: dict[str, Any], within: float) -> dict[str, Any]:
    """Anthropic's count of the tokens of a conversation. Raises InvalidRequest."""
    values = BODIES[Api.COUNT].read(raw)
    prompt = counted_prompt(values)
    frontend.ctx.model.check_name(values["model"])
    return {"input_tokens": len(await frontend.tokenize(prompt, within=within))}


def _text(frontend: Frontend, token_ids: TokenIds) -> str:
    decode = frontend.ctx.model.tokenizer.decode
    return decode(token_ids.tolist(), skip_special_tokens=False)


def _chat(values: Values) -> Prompt:
    return chat_prompt(values, template_variables(values, tool_fields(values).tools))


def _text_prompt(values: Values) -> Prompt:
    omits = not values["add_special_tokens"]
    return TextPrompt(values["prompt"], parses_special(values), omits)


def _name(frontend: Frontend, token_id: int) -> str:
    return frontend.ctx.model.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
