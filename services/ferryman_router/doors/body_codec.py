"""Bodies that the client compressed, as the header `content-encoding` says.

gzip and deflate are read, which the standard library knows. A body is bounded by what it becomes:
a small one that would become gigabytes (a bomb) is refused as a large one is.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from ferryman.errors import InvalidRequest, TooLarge, UnsupportedMedia

HEADER = "content-encoding"
OFFERED = "gzip, deflate"
_PLAIN = ("", "identity")
_GZIP = ("gzip", "x-gzip")
# Window bits, as zlib has them: 16 more expect gzip's head, fewer than 0 none at all.
_WITH_GZIP_HEAD, _WITH_ZLIB_HEAD, _WITHOUT_HEAD = 31, 15, -15
_ZLIB_METHOD = 8  # the low half of the first byte of zlib's head


def coding_of(header: str) -> str:
    """The coding that a header names, empty for none. Raises UnsupportedMedia."""
    coding = header.strip().lower()
    if coding in _PLAIN:
        return ""
    if coding in _GZIP:
        return "gzip"
    if coding == "deflate":
        return coding
    message = f"content-encoding {coding[:40]} is not read here; send {OFFERED}, or none"
    raise UnsupportedMedia(message, HEADER)


def decoded(parts: Sequence[bytes], coding: str, max_bytes: int) -> list[bytes]:
    """The bytes that these parts stand for, in parts. Raises TooLarge for more than `max_bytes` of
    them, InvalidRequest for what is not in this coding, or not whole.

    It is work: call it off the event loop.
    """
    first = next((part[0] for part in parts if part), None)
    if first is None:
        return []  # no body at all, which its reader names
    bits = _window_bits(coding, first)
    decoder, pieces, left = zlib.decompressobj(bits), list[bytes](), max_bytes
    try:
        for part in parts:
            while part:
                if decoder.eof and coding == "gzip":
                    decoder = zlib.decompressobj(bits)  # members may follow each other
                elif decoder.eof:
                    raise InvalidRequest(f"bytes follow the end of the body's {coding}", HEADER)
                pieces.append(decoder.decompress(part, left + 1))
                left -= len(pieces[-1])
                if left < 0:
                    raise TooLarge(f"the body has more than {max_bytes} bytes in plain")
                part = decoder.unused_data or decoder.unconsumed_tail
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {coding}: {error}", HEADER) from error
    if not decoder.eof:
        raise InvalidRequest(f"the body's {coding} breaks off before its end", HEADER)
    return pieces


def _window_bits(coding: str, first: int) -> int:
    if coding == "gzip":
        return _WITH_GZIP_HEAD
    # Some clients leave out the head that deflate should have.
    return _WITH_ZLIB_HEAD if first & 15 == _ZLIB_METHOD else _WITHOUT_HEAD
