"""Ways by which a prompt's beginning is found: on the device, in a tier, and as decode left it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tools.bits.cluster.served_answer import ServedAnswer, Tried
from tools.bits.cluster.serving import ServedCase
from tools.bits.compared_answer import NotTried
from tools.bits.models import Prompt
from tools.bits.ways import deepest

from ferryman.cache.units import Tier

Clear = Callable[[ServedCase], Awaitable[None]]
"""Drops a prompt from all places that are nearer than the one it should be found in."""


async def _nothing(_: ServedCase) -> None:
    pass


async def _devices(served: ServedCase) -> None:
    await served.forget_devices()


async def _arena(served: ServedCase) -> None:
    await served.forget_devices()
    await served.flush_hostcache(0, "host")


async def _node(served: ServedCase) -> None:
    await served.forget_devices()
    await served.flush_hostcache(0, "all")


async def device_hit(served: ServedCase) -> list[Tried]:
    await served.forget()
    await served.ask(served.model.prompts, 1)
    return await _found(served, "device", _nothing)


async def host_hit(served: ServedCase) -> list[Tried]:
    await _leave(served, Tier.HOST)
    return await _found(served, "host", _devices)


async def storage_hit(served: ServedCase) -> list[Tried]:
    await _leave(served, Tier.STORAGE)
    return await _found(served, "storage", _arena)


async def hit_after_restart(served: ServedCase) -> list[Tried]:
    """The host-cache is killed; the next one has its folder."""
    await _leave(served, Tier.STORAGE)
    served.cluster.hostcache().kill()
    served.cluster.start("hostcache").await_ready()
    await served.settle()
    return await _found(served, "storage", _arena)


async def peer_hit(served: ServedCase) -> list[Tried]:
    """Prefill moves to another node, computes there, and comes back."""
    await served.forget()
    await _prefill_on(served, 1)
    await served.ask(served.model.prompts, 1)
    for prompt in served.model.prompts:
        await served.cluster.await_stored(prompt, node=1)
    await _prefill_on(served, 0)
    return await _found(served, "peer", _node)


async def _prefill_on(served: ServedCase, node: int) -> None:
    (there,) = served.cluster.of_role("prefill")
    served.cluster.start("prefill", node).await_ready()
    await served.settle()
    there.stop()
    await served.settle()


async def _leave(served: ServedCase, tier: Tier) -> None:
    """A token for each prompt: what prefill computed is stored."""
    await served.forget()
    await served.ask(served.model.prompts, 1)
    for prompt in served.model.prompts:
        await served.cluster.await_stored(prompt, tier=tier)


async def _found(served: ServedCase, tier: str, clear: Clear) -> list[Tried]:
    async def attempt(prompts: Sequence[Prompt]) -> list[Tried]:
        await clear(served)
        return [brought(answer, tier) for answer in await served.ask(prompts)]

    return await served.until_taken(attempt)


def brought(answer: ServedAnswer, tier: str) -> Tried:
    """The answer, if nothing was computed that the tier has. A prompt beside may have brought what
    both begin with: it is on the device then."""
    position = deepest(len(answer.prompt))
    is_beside = {tier, "device"} >= {name for name, count in answer.cached.items() if count}
    if answer.cached[tier] and is_beside and answer.num_cached == position:
        return answer
    found = ", ".join(f"{count} from {name}" for name, count in answer.cached.items() if count)
    return NotTried(f"{found or 'nothing'}, not {position} tokens from {tier}")


async def next_turn(number: int, served: ServedCase) -> list[Tried]:
    """Conversations go on, on the state that decoding left; prefill loads it from the host."""
    await served.forget()
    histories, asked = list(served.model.prompts), served.model.turns[: number - 1]
    for turn in asked:
        answers = await served.ask(histories)
        computed = [len(history) for history in histories]
        said = [(*answer.prompt, *answer.token_ids) for answer in answers]
        for each in said:
            await served.cluster.await_stored(each[:-1])
        histories = [(*each, *turn) for each in said]
    return [
        answer if answer.num_cached > before else _none_of_decode(answer)
        for answer, before in zip(await served.ask(histories), computed, strict=True)
    ]


def _none_of_decode(answer: ServedAnswer) -> NotTried:
    return NotTried(f"{answer.num_cached} tokens were found: none of decode's state")
