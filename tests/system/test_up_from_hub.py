"""`ferryman up --model <id>`: the weights come from a hub, with progress, and the model answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.hub.stand_in import hub_stand_in, repository_of

from ferryman_launcher.options import demo_model

NAME = "acme/kites"
PORTS = ("--http-port", "0", "--grpc-port", "0")


@pytest.mark.system
def test_a_model_is_fetched_with_progress_and_served_under_its_id(tmp_path: Path) -> None:
    with hub_stand_in() as hub:
        hub.repositories[NAME] = repository_of(demo_model())
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        command = (sys.executable, "-m", "ferryman_cli", "up", "--json", "--model", NAME)
        sizes = ("--memory", "2G", "--host-memory", "32M", "--max-running", "4", "--threads", "1")
        folder = ("--state-dir", str(tmp_path / "state"))
        with (tmp_path / "stderr").open("w") as errors:
            process = subprocess.Popen(
                (*command, *PORTS, *sizes, *folder),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert process.stdout is not None
        with process.stdout:
            try:
                ready = json.loads(process.stdout.readline())
                answer = httpx.post(
                    f"{ready['http']}/v1/completions",
                    json={"model": NAME, "prompt": "The red box is in the", "max_tokens": 3},
                    timeout=120,
                )
            finally:
                process.send_signal(signal.SIGTERM)
                status = process.wait(60)
        said = (tmp_path / "stderr").read_text()
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == NAME
        assert status == 0
        assert f"downloading {NAME} to {tmp_path / 'hf'}" in said
        assert "100%" in said, "the client shows how far it is"
        whole = [span for span in hub.got("model.safetensors") if not span]
        assert len(whole) == 1, "it is downloaded once for all processes"
