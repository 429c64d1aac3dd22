"""W3C trace context: the trace that a message belongs to (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b

from ferryman.ids import RandomBits

# version "-" trace-id "-" parent-id "-" trace-flags (§ 3.2.2); later versions may append fields.
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_INVALID_VERSION = "ff"
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace: the span that a message comes from."""

    trace_id: str
    span_id: str
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"

    def child(self, random_bits: RandomBits) -> TraceContext:
        """A span of the same trace."""
        return TraceContext(self.trace_id, _hex(random_bits, 64), self.is_sampled)


def attempt_context(request: TraceContext, attempt: int) -> TraceContext:
    """The span of one attempt of a request: the router sends it to workers, and makes it when the
    attempt has ended."""
    name = f"{request.traceparent} {attempt}".encode()
    span_id = blake2b(name, digest_size=8).hexdigest()
    return TraceContext(request.trace_id, span_id, request.is_sampled)


def attempt_traceparent(traceparent: str, attempt: int) -> str:
    """The header that goes with an attempt; one of a trace that nobody records stays as it is."""
    context = parse_traceparent(traceparent)
    if context is None or not context.is_sampled:
        return traceparent
    return attempt_context(context, attempt).traceparent


def sibling_traceparent(traceparent: str, index: int) -> str:
    """The header of one of several requests of a call: spans of one parent, each with an id of its
    own."""
    return attempt_traceparent(traceparent, -index) if index else traceparent


def new_trace(random_bits: RandomBits, *, is_sampled: bool = False) -> TraceContext:
    return TraceContext(_hex(random_bits, 128), _hex(random_bits, 64), is_sampled)


def parse_traceparent(text: str) -> TraceContext | None:
    """The context that a header names; None when it names none: the caller begins a trace."""
    match = _HEADER.fullmatch(text.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == _INVALID_VERSION or (version == "00" and more):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def _hex(random_bits: RandomBits, num_bits: int) -> str:
    """`num_bits` random bits in hex, never all zeros, which would mean "none" (§ 3.2.2.3)."""
    return f"{random_bits(num_bits) or 1:0{num_bits // 4}x}"
