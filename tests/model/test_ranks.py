"""Models divided among ranks give the logits, and keep the state, of the undivided model.

The ranks run as threads in lockstep: a collective that not all of them make at the same place
fails. Sums are added in another order than in one model; nothing else differs.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.lockstep import Lockstep, LockstepGroup, OutOfStep
from tests.model.comparison import FAMILIES, random_config, swept
from tests.model.cuttable import cuttable
from tests.model.differences import difference
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import NUM_SLOTS, PagedRun
from tests.model.ragged import ragged_logits, random_prompt
from tests.native import native_config, save_native
from tests.tiny_models import VARIANTS, save_random
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.shards import reshard
from ferryman.errors import ConfigError
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.ranks import SINGLE_RANK, Group

NUM_CONFIGS = int(os.environ.get("FERRYMAN_TEST_CUT_CONFIGS", "1"))
TOLERANCE = 1e-11
PAGE_SIZE = 8
SMALL: Mapping[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "intermediate_size": 40,
}


@dataclass(frozen=True, slots=True)
class RankRun:
    """The results of a model, or of one rank, on the prompts: logits, and the slots' content."""

    logits: list[Tensor]
    manifest: StateManifest
    slabs: Mapping[Kind, Tensor]


def ran(folder: Path, seed: int, group: Group = SINGLE_RANK) -> RankRun:
    model = load_model(folder, LoadOptions("float64", page_size=PAGE_SIZE, group=group))
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.randint(*span), VOCAB_SIZE) for span in ((1, 20), (21, 70))]
    run = PagedRun(model, seed)
    return RankRun(ragged_logits(run, prompts, rng), model.manifest, run.slabs.tensors)


def assert_the_same_when_cut(folder: Path, seed: int, num_ranks: int) -> None:
    whole = ran(folder, seed)
    lockstep = Lockstep(num_ranks)
    ranks = lockstep.run(lambda group: ran(folder, seed, group))
    for found, right in zip(ranks[0].logits, whole.logits, strict=True):
        assert difference(found, right) < TOLERANCE
    for rank in ranks[1:]:
        for found, first in zip(rank.logits, ranks[0].logits, strict=True):
            assert torch.equal(found, first), "no rank may come to another decision"
    assert lockstep.calls, "ranks that never met were not cut"
    for kind in whole.manifest.kinds:
        assert_the_same_slots(kind, whole, ranks)


def assert_the_same_slots(kind: Kind, whole: RankRun, ranks: Sequence[RankRun]) -> None:
    layout = whole.manifest.layout(kind)
    cut = reshard(layout, ranks[0].manifest.layout(kind), len(ranks))
    joined = torch.zeros(NUM_SLOTS[kind], layout.slot_bytes, dtype=torch.uint8)
    for run in cut.gathered:
        source = ranks[run.rank].slabs[kind]
        joined[:, run.offset : run.end] = source[:, run.rank_offset :][:, : run.num_bytes]
    for section in layout.sections:
        end = section.offset + section.num_bytes
        found, right = (
            slab[:, section.offset : end].contiguous().view(torch.float64).numpy()
            for slab in (joined, whole.slabs[kind])
        )
        assert not np.isnan(right).all(), f"nothing was written to {section}"
        np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-12, err_msg=str(section))


@pytest.mark.parametrize("family", swept(FAMILIES))
def test_two_ranks_compute_what_one_does(family: str, tmp_path: Path) -> None:
    configs = itertools.islice(cuttable(family, 2, tmp_path), NUM_CONFIGS)
    for seed, config in enumerate(configs):
        folder = save_random(tmp_path / str(seed), config, seed)
        assert_the_same_when_cut(folder, seed, 2)


def test_two_ranks_compute_what_one_does_with_all_kinds_of_state_at_once(tmp_path: Path) -> None:
    assert_the_same_when_cut(save_native(tmp_path, native_config()), 5, 2)


@pytest.mark.parametrize("variant", ["granite_moe", "granite_rope", "bamba_groups"])
def test_four_ranks_compute_what_one_does(variant: str, tmp_path: Path) -> None:
    """Two key heads for four ranks; one, two or four groups of states and of their norm."""
    assert_the_same_when_cut(save_random(tmp_path, VARIANTS[variant], 3), 3, 4)


@pytest.mark.parametrize(("num_ranks", "groups"), [(2, 1), (4, 2)])
def test_ranks_share_the_norm_of_a_sigmoids_gate(
    num_ranks: int, groups: int, tmp_path: Path
) -> None:
    """Lightning attention of Ling 2.5, whose norms extend over the heads of two ranks."""
    config = random_config("ling_25", 1)
    config.group_norm_size = groups
    assert config.num_attention_heads == 8
    assert config.layer_group_size > 1
    assert_the_same_when_cut(save_random(tmp_path, config, 3), 3, num_ranks)


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        (LlamaConfig(**SMALL, num_attention_heads=4), "tp_size=3 does not divide q_heads 4"),
        (
            LlamaConfig(**SMALL, num_attention_heads=6, num_key_value_heads=2, head_dim=8),
            "tp_size=3 does not divide kv_heads 2",
        ),
        (VARIANTS["bamba"], "tp_size=3 does not divide ssm_heads 8"),
    ],
    ids=["q heads", "kv heads", "heads of states"],
)
def test_what_so_many_ranks_cannot_share_is_refused_by_name(
    config: PretrainedConfig, refusal: str, tmp_path: Path
) -> None:
    folder = save_random(tmp_path, config, 0)
    with pytest.raises(ConfigError, match=refusal):
        Lockstep(3).run(lambda group: load_model(folder, LoadOptions("float64", group=group)))


def test_a_rank_that_calls_something_else_is_found() -> None:
    """The test of the tests: data that only one rank has must not decide about a collective."""

    def one_sums_where_the_other_tells(group: LockstepGroup) -> None:
        if group.rank == 0:
            group.summed(torch.zeros(2))
        else:
            group.from_first(torch.zeros(2))

    def one_ends_early(group: LockstepGroup) -> None:
        for _ in range(1 + group.rank):
            group.summed(torch.zeros(2))

    def one_brings_more(group: LockstepGroup) -> None:
        group.summed(torch.zeros(2 + group.rank))

    for work in (one_sums_where_the_other_tells, one_ends_early, one_brings_more):
        with pytest.raises(OutOfStep, match=r"rank 0: .*rank 1: "):
            Lockstep(2).run(work)
