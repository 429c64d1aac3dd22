"""Whole requests: what a round's times mean, and the table of all engines."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console
from tests.harness.cluster import save_served_model

from ferryman.client import Client, GenerateEvent, SamplingParams, TokenChunk
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman_bench.engine_process import BenchModel
from ferryman_bench.request_load import (
    RequestBench,
    RequestBenchOptions,
    ServedLoad,
    ServedRound,
    cluster_names,
    random_prompts,
    served,
    show_loads,
)
from ferryman_bench.subject import ModelFolder

PEER = "another engine"


class ChunkedClient:
    """A client whose every answer comes as chunks of one, then of two tokens."""

    async def generate(
        self, prompt: list[int], sampling: SamplingParams, *, deadline_seconds: float
    ) -> AsyncIterator[GenerateEvent]:
        assert sampling.ignore_eos
        yield TokenChunk(0, (5,), "")
        yield TokenChunk(1, (6, 7), "")


async def test_each_token_of_a_chunk_arrives_with_it() -> None:
    found = await served(cast(Client, ChunkedClient()), [[1], [2]], max_tokens=3)
    assert [len(tokens) for tokens in found.arrivals] == [3, 3]
    assert all(tokens[1] == tokens[2] for tokens in found.arrivals)
    assert len(found.gaps) == 4


def test_clusters_are_named_as_by_up_and_others_are_refused() -> None:
    assert cluster_names("apart,both") == ("apart", "both")
    with pytest.raises(ConfigError, match="--worker here: give apart or both"):
        cluster_names("here")


def test_a_model_of_one_s_own_is_measured_with_ids_that_it_has(tmp_path: Path) -> None:
    model = save_served_model(tmp_path, "granite_nope")
    prepared = ModelFolder(model).prepared("float32", tmp_path)
    assert (prepared.folder, prepared.title) == (model, model.name)
    prompts = random_prompts(3, 200, seed=1, vocab_size=prepared.vocab_size)
    assert max(map(max, prompts)) < prepared.vocab_size == load_config(model).trunk.vocab_size


async def test_a_bench_measures_the_engine_and_each_cluster_that_was_chosen(
    tmp_path: Path,
) -> None:
    """Real processes of a tiny model, a round each."""
    folder = save_served_model(tmp_path, "granite_nope")
    choice = RequestBenchOptions(
        ModelFolder(folder),
        dtype="float32",
        threads=1,
        rounds=1,
        concurrent=(2,),
        prompt_len=20,
        max_tokens=4,
        clusters=("apart", "both"),
        memory_bytes=32 << 20,
        max_running=4,
    )
    room = choice.device, choice.memory_bytes, choice.max_running
    model = BenchModel(folder, choice.dtype, choice.threads, *room)
    assert BenchModel.from_json(model.to_json()) == model
    loads = await RequestBench(choice, model, 100, ()).loads(tmp_path / "scratch")
    assert [load.engine for load in loads] == ["cluster 1+1", "one for both"]
    assert all([len(one) for one in load.rounds[0].arrivals] == [4, 4] for load in loads)


def test_first_tokens_and_gaps_are_those_of_each_request() -> None:
    found = ServedRound(5.0, ((1.0, 1.5, 3.5), (2.0, 5.0)))
    assert found.firsts == [1.0, 2.0]
    assert found.gaps == [0.5, 2.0, 3.0]


def test_a_load_is_compared_round_by_round() -> None:
    ours, theirs = _load("offline", 1.0, 4.0), _load(PEER, 2.0, 4.0)
    assert ours.rate == 8 * 16 / 2.5
    assert ours.ratio(theirs) == pytest.approx((2.0 + 1.0) / 2)


def test_the_table_of_requests_fits_and_leaves_empty_what_was_not_timed() -> None:
    out = io.StringIO()
    loads = [_load("offline", 1.0, 1.0), _load(PEER, 2.0, 2.0, timed=True)]
    show_loads("a shape", loads, PEER, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    offline = next(line for line in lines if "offline, 8" in line)
    assert [cell.strip() for cell in offline.split("│")[1:-1]] == [
        "offline, 8",
        "128",
        "2.00",
        "",
        "",
    ]
    assert any("500 / 500" in line and "250 / 250" in line for line in lines)


def _load(engine: str, *seconds: float, timed: bool = False) -> ServedLoad:
    arrivals = ((0.5, 0.75, 1.0),) if timed else ()
    return ServedLoad(engine, 8, 16, tuple(ServedRound(one, arrivals) for one in seconds))
