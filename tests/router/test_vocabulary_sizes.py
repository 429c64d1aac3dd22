"""Token ids at the doors around a multiple of 32, for models of fewer rows than the tokenizer has
tokens, and of more: the last id is taken in every field, and the next one is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.harness.router import cluster, model_folder

NUM_TOKENS = 341  # of the tokenizer
SIZES = [319, 320, 321, 383, 384, 385]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "a"}]


def bodies(token_id: int) -> list[tuple[str, dict[str, Any], str]]:
    """Everything that takes a token id, and the field that a refusal names."""
    named = str(token_id)
    text, chat = {"prompt": "a", "max_tokens": 1}, {"messages": HELLO, "max_tokens": 1}
    return [
        (TEXT, {**text, "prompt": [token_id]}, "prompt"),
        (TEXT, {**text, "prompt": [[token_id], [1, token_id]]}, "prompt"),
        ("/v1/responses", {"input": "a", "logit_bias": {named: 1}}, "logit_bias"),
        *(
            (path, {**body, **field}, next(iter(field)))
            for path, body in ((TEXT, text), (CHAT, chat), ("/v1/messages", chat))
            for field in (
                {"logit_bias": {named: 1}},
                {"allowed_token_ids": [token_id]},
                {"stop_token_ids": [token_id]},
            )
        ),
        ("/detokenize", {"tokens": [token_id]}, "tokens"),
    ]


@pytest.mark.parametrize("size", SIZES)
async def test_the_last_token_is_taken_and_the_next_one_is_refused(
    nats_url: str, tmp_path: Path, size: int
) -> None:
    folder = model_folder(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": size}))
    async with cluster(nats_url, folder) as made:
        tokenizer = made.router.components.frontend.ctx.model.tokenizer
        assert tokenizer.vocab_size == NUM_TOKENS
        for endpoint, body, _ in bodies(size - 1):
            response = await made.post(endpoint, **body)
            assert response.status_code == 200, (endpoint, body, response.text)
        for endpoint, body, field in bodies(size):
            response = await made.post(endpoint, **body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, field), (endpoint, body, error)
