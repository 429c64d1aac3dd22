"""`/tokenize` and `/detokenize`, as vLLM has them, and Anthropic's `/v1/messages/count_tokens`: a
prompt's token ids, their number, and the text of ids."""

from __future__ import annotations

from functools import partial
from typing import Any

from ferryman.cache.keys import TokenIds
from ferryman.errors import InvalidRequest
from ferryman.wire.public import ChatPrompt, Prompt, TextPrompt
from ferryman_router.bodies.anthropic_requests import counted_prompt
from ferryman_router.bodies.api_fields import DETOKENIZE, TOKENIZE_CHAT, TOKENIZE_TEXT
from ferryman_router.bodies.body_fields import BodyFields
from ferryman_router.bodies.chat_messages import chat_turns
from ferryman_router.bodies.openai_requests import (
    no_special_tokens,
    parses_special,
    token_ids_of,
)
from ferryman_router.bodies.template_fields import template_variables
from ferryman_router.bodies.tool_fields import tool_fields
from ferryman_router.intake.frontend import Frontend


async def tokenized(frontend: Frontend, raw: dict[str, Any], within: float) -> dict[str, Any]:
    """`prompt` or `messages` as the model would get them. Raises InvalidRequest."""
    fields, model = BodyFields(raw), frontend.ctx.model
    fields.check_names(TOKENIZE_CHAT if fields.has("messages") else TOKENIZE_TEXT, {})
    model.check_name(fields.text("model"))
    token_ids = await frontend.tokenize(_prompt(fields), within=within)
    found = {
        "count": len(token_ids),
        "max_model_len": model.max_len,
        "tokens": token_ids.tolist(),
        "token_strs": None,
    }
    if fields.flag("return_token_strs"):
        found["token_strs"] = [_name(frontend, token_id) for token_id in token_ids.tolist()]
    return found


async def detokenized(frontend: Frontend, raw: dict[str, Any], within: float) -> dict[str, Any]:
    """The text of `tokens`, control tokens by their names. Raises InvalidRequest."""
    fields, model = BodyFields(raw), frontend.ctx.model
    fields.check_names(DETOKENIZE, {})
    model.check_name(fields.text("model"))
    ids = token_ids_of(fields.items("tokens"), "tokens")
    if len(ids) and int(ids.max()) >= model.vocab:
        raise InvalidRequest(f"a token id is out of range: there are {model.vocab}", "tokens")
    decode = partial(_text, frontend, ids)
    return {"prompt": await frontend.intake.run(4 * len(ids), decode, within=within)}


async def counted(frontend: Frontend, raw: dict[str, Any], within: float) -> dict[str, Any]:
    """Anthropic's count of the tokens of a conversation. Raises InvalidRequest."""
    fields = BodyFields(raw)
    prompt = counted_prompt(fields)
    frontend.ctx.model.check_name(fields.text("model"))
    return {"input_tokens": len(await frontend.tokenize(prompt, within=within))}


def _text(frontend: Frontend, token_ids: TokenIds) -> str:
    decode = frontend.ctx.model.tokenizer.decode
    return decode(token_ids.tolist(), skip_special_tokens=False)


def _prompt(fields: BodyFields) -> Prompt:
    special = parses_special(fields)
    if fields.has("messages"):
        no_special_tokens(fields)
        variables = template_variables(fields, tool_fields(fields).tools)
        return ChatPrompt(chat_turns(fields), special, variables)
    omits = not fields.flag("add_special_tokens", default=True)
    return TextPrompt(fields.text("prompt"), special, omits)


def _name(frontend: Frontend, token_id: int) -> str:
    return frontend.ctx.model.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
