"""Rows that each stand for a block of tokens are audited: those that somebody has written.

A request leaves most such rows as they were: a page that is shorter than a block has a row of which
only the last page of a block makes use, and a block that is not full yet has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.engine.audited_engine import AuditedEngine, MixedTraffic
from tests.tiny_models import save_random
from transformers import DeepseekV4Config

from ferryman.schedule.events import AuditResult
from ferryman_kernels.products.packed_product import reads_panels

MEGABYTE = 1 << 20
WINDOW, SHORT, LONG = TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
audits_are_exact = pytest.mark.skipif(
    not reads_panels(torch.bfloat16), reason="this processor's products follow the batch"
)


def save_blocks(folder: Path, types: tuple[str, ...], lengths: tuple[int, int]) -> Path:
    """DeepSeek-V4 with layers of `types`, and `lengths` of the blocks of the second and third."""
    config = DeepseekV4Config(
        vocab_size=131,
        hidden_size=64,
        num_hidden_layers=len(types),
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        moe_intermediate_size=32,
        num_attention_heads=4,
        head_dim=16,
        partial_rotary_factor=0.5,
        q_lora_rank=20,
        o_groups=2,
        o_lora_rank=8,
        sliding_window=32,
        layer_types=list(types),
        compress_rates=dict(zip((SHORT, LONG), lengths, strict=True)),
        index_n_heads=3,
        index_head_dim=8,
        index_topk=5,
        mlp_layer_types=["moe"] * len(types),
        n_routed_experts=4,
        num_experts_per_tok=2,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        tie_word_embeddings=False,
    )
    return save_random(folder, config, 3)


class LongTraffic(MixedTraffic):
    """Prompts in which long blocks close."""

    def _tokens(self, number: int) -> list[int]:
        return super()._tokens(5 * number if number > 20 else number)


@dataclass(frozen=True, slots=True)
class BlockCell:
    """A layout of blocks in pages, and what the engine does."""

    types: tuple[str, ...]
    page_size: int
    lengths: tuple[int, int]
    dtype: str = "float32"
    draft: str = ""


CELLS = {
    "windows alone": BlockCell((WINDOW,), 16, (4, 32)),
    "short blocks": BlockCell((SHORT,), 16, (4, 32)),
    "long blocks": BlockCell((LONG,), 16, (4, 32)),
    "blocks of eight pages, drafts": BlockCell(TYPES, 16, (4, 128), "bfloat16", "ngram"),
    "pages of two tokens, drafts": BlockCell(TYPES, 2, (4, 8), draft="ngram"),
    "pages of several long blocks": BlockCell(TYPES, 128, (4, 32)),
}


@audits_are_exact
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_nothing_differs_where_all_is_sound(cell: BlockCell, tmp_path: Path) -> None:
    folder = save_blocks(tmp_path / "model", cell.types, cell.lengths)
    with AuditedEngine(
        folder,
        dtype=cell.dtype,
        page_size=cell.page_size,
        chunk_tokens=max(cell.page_size, 48),
        max_running=4,
        memory_bytes=64 * MEGABYTE,
        num_threads=1,
        draft=cell.draft,
    ) as engine:
        engine.audit(1.0)
        LongTraffic(engine, seed=2).ask(16)
    assert not engine.audits.differences
    assert engine.audits.results[AuditResult.EQUAL] >= 5
