"""How a ragged batch is described to the kernels: host integers, one span for each request."""

from __future__ import annotations

Span = tuple[int, int]
"""Absolute positions [start, end) of one request's tokens; the batch holds them back to back."""

SlotAt = tuple[int, int, int]
"""(request_index, position, dst_slot): where the state at an absolute position is to be written."""
