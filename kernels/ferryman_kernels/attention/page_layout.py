"""The layout of pages that every kernel over keys and values reckons with."""

from __future__ import annotations

from torch import Tensor

PageScales = tuple[Tensor, Tensor]
"""The scales of pages of e4m3 codes, for keys and for values: [slots, kv_heads, page_size]."""


def check_page_layout(key_pages: Tensor, value_pages: Tensor) -> None:
    """Asserts that a page [kv_heads, page_size, head_dim] is contiguous, and that pages of keys and
    of values are equally far apart."""
    _, _, page_size, head_dim = key_pages.shape
    inner = (page_size * head_dim, head_dim, 1)
    assert key_pages.stride()[1:] == value_pages.stride()[1:] == inner, key_pages.stride()
    assert key_pages.stride(0) == value_pages.stride(0), (key_pages.stride(), value_pages.stride())
