"""The names in `/metrics` that boards made for vLLM ask for."""

from __future__ import annotations

from dataclasses import replace

from tests.harness.router import RouterCluster

from ferryman_router.request.vllm_metrics import VllmMetrics


def shown(cluster: RouterCluster, num_in_flight: int) -> dict[str, float]:
    """The values of all samples, by name and labels as Prometheus reads them."""
    ctx = cluster.router.components.frontend.ctx
    lines = VllmMetrics(ctx, lambda: num_in_flight).render().decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


async def test_an_answer_is_in_the_numbers_that_vllms_board_asks_for(
    one_pair: RouterCluster,
) -> None:
    asked = {"prompt": "the ferry", "max_tokens": 4, "ignore_eos": True}
    answer = await one_pair.http.post("/v1/completions", json=asked)
    usage = answer.json()["usage"]
    model = one_pair.router.components.frontend.ctx.model.model_id
    labels = f'engine="0",model_name="{model}"'
    values = shown(one_pair, num_in_flight=3)
    assert {name.partition("{")[0] for name in values} >= {
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_success_total",
    }
    assert values[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == 1
    assert values[f"vllm:inter_token_latency_seconds_count{{{labels}}}"] == 3
    assert values[f"vllm:e2e_request_latency_seconds_count{{{labels}}}"] == 1
    assert values[f"vllm:prompt_tokens_total{{{labels}}}"] == usage["prompt_tokens"]
    assert values[f"vllm:generation_tokens_total{{{labels}}}"] == 4
    assert values[f"vllm:prefix_cache_queries_total{{{labels}}}"] == usage["prompt_tokens"]
    assert values[f"vllm:num_requests_running{{{labels}}}"] == 3
    assert values[f"vllm:num_requests_waiting{{{labels}}}"] == 0
    finished = f'engine="0",finished_reason="length",model_name="{model}"'
    assert values[f"vllm:request_success_total{{{finished}}}"] == 1


async def test_the_use_of_the_cache_is_that_of_the_fullest_decode_worker(
    two_pairs: RouterCluster,
) -> None:
    for worker, usage in zip(two_pairs.decodes, (0.25, 0.75), strict=True):
        beat = replace(worker.beat, cache_usage=usage)
        two_pairs.fleet.on_heartbeat(beat, two_pairs.router.components.frontend.ctx.clock())
    (usage,) = (
        value
        for name, value in shown(two_pairs, 0).items()
        if name.startswith("vllm:kv_cache_usage_perc")
    )
    assert usage == 0.75


async def test_a_scrape_asks_for_them_and_has_none_otherwise(one_pair: RouterCluster) -> None:
    plain = await one_pair.http.get("/metrics")
    both = await one_pair.http.get("/metrics?names=vllm")
    assert "vllm:" not in plain.text
    assert "ferryman_router_requests_total" in both.text
    assert "vllm:num_requests_running" in both.text
    refused = await one_pair.http.get("/metrics?names=other")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "names")
