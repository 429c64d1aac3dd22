"""The cells of the ways through a cluster: each cluster is started once for a column."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from tests.harness.cluster import Cluster, ClusterShape, running_cluster, save_words
from tools.bits.cluster.served_answer import ColdCompletions, ServedAnswer, Tried
from tools.bits.cluster.serving import ServedCase
from tools.bits.cluster.shapes import cluster_shape
from tools.bits.cluster.ways import ServedWay
from tools.bits.compared_answer import NotTried
from tools.bits.measured_engine import COLD, DTYPES
from tools.bits.models import BitsModel, saved_model
from tools.bits.table import BitsCell

from ferryman.cache.manifest import Exactness
from ferryman.client import Client
from ferryman.errors import ConfigError, FerrymanError
from ferryman.llm import LLM
from ferryman.model.config import load_config


def served_cells(
    models: Sequence[str],
    dtypes: Sequence[str],
    ways: Sequence[ServedWay],
    *,
    num_prompts: int,
    num_tokens: int,
) -> Iterator[BitsCell]:
    """All cells, column by column."""
    for name in models:
        with saved_model(name, num_prompts) as model:
            if not (model.folder / "tokenizer.json").exists():
                save_words(model.folder, load_config(model.folder).trunk.vocab_size)
            for dtype in dtypes:
                yield from _column(model, dtype, ways, num_tokens)


def _column(
    model: BitsModel, dtype: str, ways: Sequence[ServedWay], num_tokens: int
) -> Iterator[BitsCell]:
    if model.served.options or model.served.adapter:
        yield from (_not_served(BitsCell(way.name, model.name, dtype)) for way in ways)
        return
    with LLM(model.folder, **{**COLD, **DTYPES[dtype]}) as llm:
        cold = ColdCompletions(llm, num_tokens)
        for prompt in model.prompts:
            cold.answer(prompt)  # loops are compiled here, once, before workers would
        for shape, group in groupby(ways, key=lambda way: way.shape):
            with _running(model, cluster_shape(shape, model, dtype)) as cluster:
                for way in group:
                    cell = BitsCell(way.name, model.name, dtype)
                    for tried in asyncio.run(_taken(way, model, num_tokens, cluster)):
                        cell.count(tried, cold)
                    yield cell


def _not_served(cell: BitsCell) -> BitsCell:
    cell.refuse(ConfigError("a cluster has no form with options of its own here"))
    return cell


@contextmanager
def _running(model: BitsModel, shape: ClusterShape) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="ferryman-bits-") as folder,
        running_cluster(model.folder, Path(folder), shape) as cluster,
    ):
        yield cluster


async def _taken(
    way: ServedWay, model: BitsModel, num_tokens: int, cluster: Cluster
) -> list[Tried]:
    async with Client(cluster.grpc) as client:
        served = ServedCase(model, num_tokens, cluster, client)
        try:
            await served.staff_as_started()
            return [as_promised(tried) for tried in await way.take(served)]
        except (FerrymanError, TimeoutError, AssertionError) as error:
            return [NotTried(f"{type(error).__name__}: {str(error)[:200]}")]


def as_promised(tried: Tried) -> Tried:
    """Bits are compared where the cluster promises them."""
    if isinstance(tried, ServedAnswer) and tried.exactness is not Exactness.BITS:
        return NotTried(f"it promises {tried.exactness.value}")
    return tried
