"""`ferryman bench serve` against a real router and a real worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness.cluster import ClusterShape, running_cluster

from ferryman_bench.endpoint.client import open_endpoint
from ferryman_bench.serve.load_run import FullLoop, LoadRun, ignoring_ends
from ferryman_bench.serve.run import ServeOptions, loaded_endpoint
from ferryman_bench.serve.workload import LoadShape, made_sessions
from ferryman_launcher.options import demo_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

END_ALONE = {"logit_bias": {"0": 100}}
"""The demo model's end of text is then likelier than all else."""
NUM_TOKENS = 12


async def test_no_end_of_text_takes_the_place_of_a_piece(tmp_path: Path) -> None:
    """An end has no text: the gap after it would be that of two tokens. With `ignore_eos` alone it
    is drawn, and here nothing else."""
    shape = LoadShape(2, 2, 8, 8, NUM_TOKENS)
    sessions = [replace(made, fields=END_ALONE) for made in made_sessions("chat", shape)]
    cluster_shape = ClusterShape(num_prefill=0, num_decode=0, num_both=1)
    with running_cluster(demo_model(), tmp_path, cluster_shape) as cluster:
        async with open_endpoint(cluster.http) as (client, _):
            ended = await LoadRun(client, ignoring_ends).run(sessions, FullLoop(1))
        result = await loaded_endpoint(ServeOptions(cluster.http, "chat", sessions))
    assert [len(record.arrivals) for record in ended] == [0] * 4
    assert {record.completion_tokens for record in (*ended, *result.records)} == {NUM_TOKENS}
    assert all(record.arrivals for record in result.records)
    assert not any(record.error for record in result.records)
