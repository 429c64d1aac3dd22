"""A model that computes no numbers behind one token: typed errors that name the worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.harness.cluster import (
    Cluster,
    ClusterShape,
    assert_same,
    generate,
    on_plane,
    one_process,
    running_cluster,
    save_served_model,
)
from tests.tiny_models import VOCAB_SIZE
from tests.waiting import wait_until

from ferryman.client import Client, Retries
from ferryman.errors import FerrymanError
from ferryman.schedule.request import SamplingParams

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

BROKEN = VOCAB_SIZE - 1
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True)
PROMPT = [(7 * i) % 120 + 3 for i in range(40)]


def save_spoilt(folder: Path) -> Path:
    """NaN is what this model makes of the token BROKEN."""
    save_served_model(folder, "bamba")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_spoilt(tmp_path_factory.mktemp("model"))
    retries = {"no_worker_seconds": 2.0}
    shape = ClusterShape(settings={**on_plane("grpc"), "router": retries})
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


async def test_no_numbers_are_no_answer_and_the_second_such_request_takes_the_worker_out(
    cluster: Cluster,
) -> None:
    (prefill,) = cluster.of_role("prefill")
    worker_id = str(prefill.ready["worker_id"])
    with one_process(cluster.model) as llm:
        (expected,) = llm.generate([PROMPT], GREEDY)
    async with Client(cluster.grpc, retries=Retries(max_failures=0)) as client:
        with pytest.raises(FerrymanError, match=f"{worker_id}: the logits behind position 40"):
            await generate(client, [*PROMPT, BROKEN], GREEDY)
        assert "ferryman_prefill_logits_non_finite 1.0" in prefill.metrics()
        assert_same(await generate(client, PROMPT, GREEDY), expected)
        cluster.assert_ledgers_balance()
        with pytest.raises(FerrymanError):
            await generate(client, [*PROMPT[:20], BROKEN], GREEDY)
    wait_until(lambda: prefill.process.poll() is not None, "the worker to end")
    assert prefill.process.poll() == 1
    said = prefill.log.read_text()
    assert "taking this worker out" in said
    assert f"{worker_id}: the logits of 2 requests" in said
