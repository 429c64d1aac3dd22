"""Orders to prefill say where other prompts are likely to part from a request's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.harness.router import SENTENCE, RouterCluster
from tests.router.test_choices import orders_of

from ferryman.client import Client
from ferryman.schedule.request import Request, SamplingParams
from ferryman.wire.public import TokenPrompt
from ferryman_router.intake.body_intake import LARGE_BYTES

SYSTEM = {"role": "system", "content": SENTENCE}


async def ordered(cluster: RouterCluster, *messages: dict[str, str], **more: Any) -> Request:
    response = await cluster.post(
        "/v1/chat/completions", messages=list(messages), max_tokens=2, **more
    )
    assert response.status_code == 200, response.text
    return orders_of(cluster)[-1].request


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
async def test_a_chat_forks_after_its_system_message(one_pair: RouterCluster, size: int) -> None:
    """Also if another process reads the body."""
    padding = {"metadata": {"padding": "x" * size}} if size else {}
    one = await ordered(one_pair, SYSTEM, {"role": "user", "content": "hi"}, **padding)
    other = await ordered(one_pair, SYSTEM, {"role": "user", "content": "who?"}, **padding)
    (fork,) = one.fork_points
    assert other.fork_points == (fork,)
    assert np.array_equal(one.token_ids[:fork], other.token_ids[:fork])
    assert one.token_ids[fork] != other.token_ids[fork]


async def test_a_user_alone_has_no_fork(one_pair: RouterCluster) -> None:
    assert (await ordered(one_pair, {"role": "user", "content": "hi"})).fork_points == ()


async def test_a_truncated_chat_has_no_fork(one_pair: RouterCluster) -> None:
    """The rest begins in the middle, where no other conversation does."""
    asked = await ordered(
        one_pair, SYSTEM, {"role": "user", "content": "hi"}, truncate_prompt_tokens=8
    )
    assert len(asked.token_ids) == 8
    assert asked.fork_points == ()


async def test_a_caller_may_say_where_its_token_ids_fork(one_pair: RouterCluster) -> None:
    prompt = TokenPrompt(np.arange(5, 45, dtype="<u4"), (17, 33))
    async with Client(f"127.0.0.1:{one_pair.router.grpc_port}") as client:
        async for _ in client.generate(prompt, SamplingParams(max_tokens=2)):
            pass
    assert orders_of(one_pair)[-1].request.fork_points == (17, 33)
