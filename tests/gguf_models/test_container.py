"""The head of a GGUF file is read whole; a spoiled one is refused by the name of what is wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gguf_models.files import WrittenTensor, file_bytes, floats, q8_0
from tools.bench.gguf.container import Setting

from ferryman.errors import ConfigError
from ferryman.gguf.container import GgufHead, StoredArray, read_head

FILE = Path("tiny.gguf")
METADATA: dict[str, Setting] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 0.5,
    "has": True,
    "words": ["a", "", "ü"],
    "flags": [True, False],
    "numbers": [-1, 7],
    "scores": [0.5, -2.0],
}
VALUES = np.arange(128, dtype=np.float32).reshape(4, 32)
CONTENT = file_bytes(METADATA, [floats("norm", VALUES[0, :3]), q8_0("weight", VALUES)])


def read(content: bytes) -> GgufHead:
    return read_head(FILE, memoryview(content), len(content))


def test_metadata_of_every_form_is_read() -> None:
    metadata = read(CONTENT).metadata
    values = {
        name: value.elements() if isinstance(value, StoredArray) else value
        for name, value in metadata.items()
    }
    assert values == METADATA


def test_a_tensor_has_the_outermost_axis_first_and_the_place_of_its_bytes() -> None:
    norm, weight = read(CONTENT).tensors
    assert (norm.name, norm.shape, norm.kind.name) == ("norm", (3,), "F32")
    assert np.frombuffer(CONTENT[norm.start : norm.end], "<f4").tolist() == [0.0, 1.0, 2.0]
    assert (weight.name, weight.shape, weight.kind.name) == ("weight", (4, 32), "Q8_0")
    assert weight.start % 32 == 0
    assert weight.end - weight.start == 4 * 34
    assert CONTENT[weight.start + 2 + 31] == 127


def test_contents_begin_at_the_alignment_that_the_file_names() -> None:
    content = file_bytes({"general.alignment": 8}, [floats("normalised", VALUES[0])])
    (norm,) = read(content).tensors
    # The head has 99 bytes: the next multiple of 8 is 104, and that of 32 is 128.
    assert norm.start == 104


@given(st.integers(0, len(CONTENT) - 1))
def test_a_truncated_file_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=r"tiny\.gguf is not a complete GGUF file"):
        # The padding after the last tensor may be missing, so it is cut first.
        read(CONTENT[: min(length, len(CONTENT) - 25)])


@given(st.data())
def test_a_spoiled_byte_never_raises_another_error(data: st.DataObject) -> None:
    spoiled = bytearray(CONTENT)
    for _ in range(data.draw(st.integers(1, 4))):
        spoiled[data.draw(st.integers(0, len(CONTENT) - 1))] = data.draw(st.integers(0, 255))
    try:
        head = read(bytes(spoiled))
    except ConfigError:
        return
    assert all(0 <= tensor.start < tensor.end <= len(CONTENT) for tensor in head.tensors)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_model_are_refused(content: bytes) -> None:
    with pytest.raises(ConfigError):
        read(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + content)


REFUSED = {
    "not_gguf": (b"GGML" + CONTENT[4:], "does not begin with GGUF"),
    "version": (b"GGUF" + struct.pack("<I", 1) + CONTENT[8:], "version 1; little-endian"),
    "big_endian": (b"GGUF" + struct.pack(">I", 3) + CONTENT[8:], "it is big-endian"),
    "many_tensors": (CONTENT[:8] + struct.pack("<Q", 2**40) + CONTENT[16:], "more than 1000000"),
    "many_keys": (CONTENT[:16] + struct.pack("<Q", 2**40) + CONTENT[24:], "more than 100000"),
    "alignment": (file_bytes({"general.alignment": 12}), "12, not a multiple of 8"),
    "twice": (file_bytes({}, [floats("a", VALUES)] * 2), "tensor 'a' stands in it twice"),
    "rows": (file_bytes({}, [WrittenTensor("a", 8, (2, 33), bytes(68))]), "multiples of 32"),
    "axes": (file_bytes({}, [WrittenTensor("a", 0, (1,) * 5, bytes(4))]), "5 axes"),
    "empty": (file_bytes({}, [WrittenTensor("a", 0, (0, 4), b"")]), "impossible shape"),
    "type": (file_bytes({}, [WrittenTensor("a", 16, (1, 256), bytes(66))]), "IQ2_XXS; the nearest"),
    "new_type": (file_bytes({}, [WrittenTensor("a", 99, (1, 256), bytes(66))]), "number 99"),
    "huge": (file_bytes({}, [WrittenTensor("a", 0, (2**40, 2**40), b"")]), "complete the download"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_breaks_the_format_is_named(name: str) -> None:
    content, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        read(content)


def test_two_tensors_over_the_same_bytes_are_refused() -> None:
    content = bytearray(file_bytes({}, [floats("a", VALUES[0]), floats("b", VALUES[0])]))
    at = content.rindex(struct.pack("<Q", 128), 0, 128)
    content[at : at + 8] = struct.pack("<Q", 0)
    with pytest.raises(ConfigError, match="overlaps the one before it"):
        read(bytes(content))


def test_a_key_that_stands_there_twice_is_refused() -> None:
    content = file_bytes({"aa": 1, "ab": 2}).replace(b"ab", b"aa")
    with pytest.raises(ConfigError, match="key 'aa' stands in it twice"):
        read(content)


def test_an_array_of_arrays_is_refused_by_its_key() -> None:
    content = file_bytes({"nested": [1]}).replace(
        struct.pack("<II", 9, 5), struct.pack("<II", 9, 9)
    )
    with pytest.raises(ConfigError, match="'nested' has the unknown type 9"):
        read(content)
