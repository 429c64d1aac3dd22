"""The requests of one call: one for each answer to each of its prompts.

Answers to one prompt share its state. So the first one of each prompt goes ahead, with the number
of siblings it will have. They are opened when its first token has come: the prompt's pages are in
the caches then, and the worker that decodes the first one has kept the prompt's end for them.

Nothing waits for a sibling at a worker. Here they wait for the first one alone, which begins or
ends by the deadline that they all have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ferryman.cache.manifest import Kind
from ferryman.errors import FerrymanError
from ferryman_router.intake.frontend import Frontend
from ferryman_router.request.request_runner import RequestRunner
from ferryman_router.request.response import OutputFailed
from ferryman_router.routing.generate_request import ALONE, GenerateRequest, PromptSharing

MakeAsk = Callable[[int, int, PromptSharing], GenerateRequest]
"""The request for an answer: the indices of the prompt and of the answer to it, and how it shares
the prompt."""


async def open_choices(
    frontend: Frontend, ask: MakeAsk, num_prompts: int, num_each: int
) -> list[RequestRunner]:
    """All requests, prompt by prompt. When one is refused, or the client leaves, none goes on."""
    opened: dict[tuple[int, int], RequestRunner] = {}

    async def open_one(prompt: int, sample: int, sharing: PromptSharing) -> None:
        await asyncio.sleep(0)  # each is quick, or elsewhere; many together are neither
        opened[prompt, sample] = await frontend.open(ask(prompt, sample, sharing))

    try:
        for prompt in range(num_prompts):
            await open_one(prompt, 0, PromptSharing(num_each - 1) if num_each > 1 else ALONE)
        for prompt in range(num_prompts):
            await _open_siblings(frontend, opened[prompt, 0], prompt, num_each, open_one)
    except (FerrymanError, asyncio.CancelledError):
        for runner in opened.values():
            frontend.cancel(runner, "another choice failed")
        raise
    return [opened[place] for place in sorted(opened)]


async def _open_siblings(
    frontend: Frontend,
    first: RequestRunner,
    prompt: int,
    num_each: int,
    open_one: Callable[[int, int, PromptSharing], Awaitable[None]],
) -> None:
    if num_each == 1:
        return
    if _has_state_to_share(frontend, first):
        await _until_begun(first)
    sharing = PromptSharing(decode=first.decode_worker)
    for sample in range(1, num_each):
        await open_one(prompt, sample, sharing)


def _has_state_to_share(frontend: Frontend, first: RequestRunner) -> bool:
    """Whether it is worth a wait: a page of the prompt, a recurrent state, or its scores, which
    the later answers show too."""
    if first.asked.params.prompt_logprobs is not None:
        return True
    state = frontend.ctx.fleet.state()
    if state is None or Kind.RECURRENT in state.kinds:
        return True
    return first.asked.prompt_len >= state.page_size


async def _until_begun(runner: RequestRunner) -> None:
    """Waits for its first token. Raises the error of a request that fails before."""
    log, changed = runner.output_log, asyncio.Event()
    log.listen(changed)
    try:
        while not log.chunks and log.end is None:
            await changed.wait()
            changed.clear()
    finally:
        log.leave(changed)
    if isinstance(log.end, OutputFailed) and not log.chunks:
        raise log.end.error
