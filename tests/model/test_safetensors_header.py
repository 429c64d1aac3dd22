"""Headers are believed only as far as the file bears them out: strangers write them.

The oracle is the format's own library, which reads the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ferryman.errors import ConfigError
from ferryman.model.weights.safetensors_header import MAX_HEADER_BYTES, StoredTensor, read_header

FILE = Path("model.safetensors")
DTYPES = (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64)

Entries = dict[str, Any]


def stored(content: bytes) -> tuple[StoredTensor, ...]:
    return read_header(FILE, memoryview(content))


def file_of(header: object, num_bytes: int) -> bytes:
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + bytes(num_bytes)


def two() -> Entries:
    """A good header of two tensors, 24 bytes in all."""
    return {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    }


def with_entry(name: str, **changes: object) -> Entries:
    entries = two()
    entries[name].update(changes)
    return entries


def is_refused_by_the_library(content: bytes, folder: Path) -> bool:
    (folder / FILE).write_bytes(content)
    try:
        with safe_open(folder / FILE, framework="pt"):
            return False
    except SafetensorError:
        return True


tensors = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.builds(
        torch.zeros,
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        dtype=st.sampled_from(DTYPES),
    ),
    max_size=6,
)


@given(tensors)
def test_a_good_file_is_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, content: Mapping[str, torch.Tensor]
) -> None:
    written = save(dict(content), metadata={"format": "pt"})
    file = tmp_path_factory.mktemp("file") / FILE
    file.write_bytes(written)
    found = {tensor.name: tensor for tensor in stored(written)}
    with safe_open(file, framework="pt") as opened:
        assert sorted(found) == sorted(opened.keys())
        for name, tensor in found.items():
            theirs = opened.get_slice(name)
            assert (tensor.dtype, tensor.shape) == (theirs.get_dtype(), tuple(theirs.get_shape()))


@pytest.mark.parametrize(
    ("header", "num_bytes", "complaint"),
    [
        pytest.param(b"{", 0, "is not JSON", id="no JSON"),
        pytest.param(b"\xff{}", 0, "is not JSON", id="no UTF-8"),
        pytest.param(b"[" * 100_000, 0, "is not JSON", id="nested without end"),
        pytest.param([1], 0, "is not a JSON object", id="a list"),
        pytest.param(
            b'{"a": %s, "a": %s}' % ((b"{}",) * 2), 0, "'a' stands in it twice", id="twice"
        ),
        pytest.param({"a": 7}, 0, "'a' lacks dtype", id="no entry"),
        pytest.param({"a": {"dtype": "F32", "shape": []}}, 4, "'a' lacks dtype", id="no place"),
        pytest.param(with_entry("b", dtype="F31"), 24, "unknown dtype 'F31'", id="unknown dtype"),
        pytest.param(with_entry("b", dtype=7), 24, "unknown dtype 7", id="a number as dtype"),
        pytest.param(with_entry("b", shape=[-4]), 24, "'b' has an impossible", id="negative"),
        pytest.param(with_entry("b", shape=[4.0]), 24, "'b' has an impossible", id="a fraction"),
        pytest.param(with_entry("b", shape=[True] * 4), 24, "'b' has an impossible", id="true"),
        pytest.param(with_entry("b", shape=[1] * 99), 24, "'b' has an impossible", id="many axes"),
        pytest.param(with_entry("b", shape=[5]), 24, "'b' has 8 bytes, but", id="short"),
        pytest.param(with_entry("b", shape=[2**62, 2**62]), 24, "'b' has 8 bytes", id="huge"),
        pytest.param(
            with_entry("b", data_offsets=[24, 16]), 24, "'b' has an impossible", id="backwards"
        ),
        pytest.param(
            with_entry("b", data_offsets=[8, 16]), 16, "'b' overlaps the one before", id="overlap"
        ),
        pytest.param(
            with_entry("b", data_offsets=[18, 26]), 26, "before tensor 'b' are bytes", id="a hole"
        ),
        pytest.param(two(), 23, "its tensors end at byte", id="cut off"),
        pytest.param(two(), 25, "its tensors end at byte", id="more than all"),
        pytest.param(
            with_entry("b", data_offsets=[2**70, 2**70 + 8]), 24, "before tensor 'b'", id="far out"
        ),
    ],
)
def test_a_hostile_header_is_refused_by_file_and_name(
    header: object, num_bytes: int, complaint: str, tmp_path: Path
) -> None:
    content = file_of(header, num_bytes)
    with pytest.raises(ConfigError, match=complaint) as refusal:
        stored(content)
    assert FILE.name in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\x10" + bytes(7) + b"{}"])
def test_a_file_that_ends_within_its_header_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match="not a complete safetensors file"):
        stored(content)


def test_a_header_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ConfigError, match=f"more than {MAX_HEADER_BYTES}"):
        stored((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))


def _cut(content: bytes, at: int) -> bytes:
    return content[: at % (len(content) + 1)]


def _set(content: bytes, at: int) -> bytes:
    place = at % len(content)
    return content[:place] + bytes([at % 251]) + content[place + 1 :]


def _doubled(content: bytes, at: int) -> bytes:
    return content + content[at % len(content) :]


@given(st.sampled_from([_cut, _set, _doubled]), st.integers(0, 10**6))
def test_a_damaged_file_that_the_library_refuses_is_refused(
    tmp_path_factory: pytest.TempPathFactory, damage: Callable[[bytes, int], bytes], at: int
) -> None:
    content = damage(file_of({"__metadata__": {"format": "pt"}, **two()}, 24), at)
    if is_refused_by_the_library(content, tmp_path_factory.mktemp("file")):
        with pytest.raises(ConfigError):
            stored(content)
    else:
        assert all(tensor.end <= len(content) for tensor in stored(content))
