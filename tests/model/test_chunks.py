"""Chunks of attention become sequences of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.model.comparison import random_config
from tests.tiny_models import save_random

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.chunks import ChunkOfPages, chunks_of_positions, chunks_of_spans

CHUNK = ChunkOfPages(length=8, page_size=4)
TABLE = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, -1]])


def test_a_span_is_cut_where_a_chunk_ends() -> None:
    table, spans = chunks_of_spans(TABLE, [(6, 18), (8, 11)], CHUNK)
    assert spans == [(6, 8), (0, 8), (0, 2), (0, 3)]
    assert table.tolist() == [[10, 11], [12, 13], [14, -1], [22, 23]]


def test_a_token_sees_the_pages_of_its_chunk() -> None:
    table, positions = chunks_of_positions(TABLE, torch.tensor([17, 15]), CHUNK)
    assert positions.tolist() == [1, 7]
    assert (table[0, 0].item(), table[1].tolist()) == (14, [22, 23])


def test_a_page_in_two_chunks_is_refused_by_name(tmp_path: Path) -> None:
    config = random_config("llama4", 0)
    config.attention_chunk_size, config.layer_types[-1] = 24, "chunked_attention"
    folder = save_random(tmp_path, config, 0)
    with pytest.raises(ConfigError, match="attention_chunk_size 24"):
        load_model(folder, LoadOptions("float64", page_size=16))


def test_a_chunk_keeps_the_pages_of_a_window_as_long(tmp_path: Path) -> None:
    config = random_config("llama4", 0)
    config.layer_types[-1] = "chunked_attention"
    folder = save_random(tmp_path, config, 0)
    manifest = load_model(folder, LoadOptions("float64", page_size=16)).manifest
    assert manifest.window_len == 64
    assert Kind.WINDOW in manifest.kinds
