"""`ferryman up --model <id>`: the weights come from a hub, with progress, and the model answers."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
from tests.harness.cluster import up
from tests.hub.stand_in import hub_stand_in, repository_of

from ferryman_launcher.options import demo_model

NAME = "acme/kites"


@pytest.mark.system
def test_a_model_is_fetched_with_progress_and_served_under_its_id(tmp_path: Path) -> None:
    with hub_stand_in() as hub:
        hub.repositories[NAME] = repository_of(demo_model())
        hub_client = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        derived = ("--memory", "2G", "--memory-bytes", "0", "--max-running", "4", "--threads", "1")
        with up(tmp_path / "state", "--model", NAME, *derived, **hub_client) as cluster:
            answer = httpx.post(
                f"{cluster.doors[0]}/v1/completions",
                json={"model": NAME, "prompt": "The red box is in the", "max_tokens": 3},
                timeout=120,
            )
            ended = cluster.end(signal.SIGTERM)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == NAME
        assert ended.status == 0
        assert f"downloading {NAME} to {tmp_path / 'hf'}" in ended.stderr
        assert "100%" in ended.stderr, "the client shows how far it is"
        whole = [span for span in hub.got("model.safetensors") if not span]
        assert len(whole) == 1, "it is downloaded once for all processes"
