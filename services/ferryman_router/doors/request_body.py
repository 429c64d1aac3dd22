"""The body of a call, from its headers to its parts: JSON alone, decoded, and never too large.

Pages that no operator allowed (`cors`) may send a few kinds of request all the same, without asking
first. None of those is JSON, so what is not JSON is refused here before it costs anything. A body
without any type is JSON for programs, whose libraries may leave the header out; a page can send one
too, and its browser names the page's origin then.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from starlette.requests import Request

from ferryman.errors import TooLarge, UnsupportedMedia
from ferryman_router.doors.body_codec import HEADER, OFFERED, coding_of, decoded
from ferryman_router.doors.cors import CorsPolicy
from ferryman_router.intake.body_intake import QUICK_BYTES, Intake

# A refusal with 415 says by these headers which bodies are read.
ACCEPTED = {"accept": "application/json", "accept-encoding": OFFERED}
_JSON = re.compile(r"application/(?:[a-z0-9!#$&^_.+-]+\+)?json")
# A body of this many bytes may become a thousand times as many, so none is decoded on the loop.
_MORE_THAN_QUICK = QUICK_BYTES + 1


async def body_parts(
    request: Request,
    cors: CorsPolicy,
    intake: Intake,
    *,
    max_bytes: int,
    grow: Callable[[int], None],
    within: float,
) -> list[bytes]:
    """The whole body in parts, decoded within so many seconds; `grow` hears of the memory it takes.
    Raises UnsupportedMedia before it is read, TooLarge, InvalidRequest."""
    check_media_type(request, cors)
    coding = coding_of(",".join(request.headers.getlist(HEADER)))
    parts = await _read_parts(request, max_bytes, grow)
    if not coding:
        return parts
    num_bytes = sum(map(len, parts))
    decode = partial(decoded, parts, coding, max_bytes)
    plain = await intake.run(num_bytes + _MORE_THAN_QUICK, decode, within=within)
    grow(sum(map(len, plain)))
    return plain


def check_media_type(request: Request, cors: CorsPolicy) -> None:
    """Raises UnsupportedMedia for a body that is not said to be JSON; its charset does not matter,
    JSON has one."""
    written = request.headers.get("content-type", "")
    media_type = written.partition(";")[0].strip().lower()
    if _JSON.fullmatch(media_type):
        return
    if not media_type and not cors.is_stranger(request.headers):
        return
    sent = f"content-type {media_type[:80]}" if media_type else "a page's body without content-type"
    raise UnsupportedMedia(f"{sent} is not read here; send application/json", "content-type")


async def _read_parts(request: Request, max_bytes: int, grow: Callable[[int], None]) -> list[bytes]:
    """The whole body in parts; raises TooLarge as soon as that is known, also if a smaller length
    was announced.

    They are not joined here: copying megabytes, for many callers in turn, holds up the loop.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise TooLarge(f"the body has {announced} bytes; at most {max_bytes} are taken")
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise TooLarge(f"the body has more than {max_bytes} bytes")
        grow(len(part))
        parts.append(part)
    return parts
