"""A whole service of a few lines, as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

SERVICE = """
import asyncio, logging
from pydantic import BaseModel
from ferryman.runtime.life import announce_ready
from ferryman.runtime.life import run_main
from ferryman.settings.groups import LifeSettings, ListenSettings

class Settings(BaseModel):
    life: LifeSettings = LifeSettings()
    listen: ListenSettings = ListenSettings()

async def serve(settings, stopping):
    announce_ready("decode", "decode-00000001", settings.listen.host, 1)
    await stopping.wait()
    logging.getLogger("test").info("drained")

run_main(Settings, "decode", serve)
"""


def start(**environment: str) -> subprocess.Popen[str]:
    path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    return subprocess.Popen(
        [sys.executable, "-c", path + SERVICE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_a_service_reads_its_settings_serves_and_drains() -> None:
    parent = str(os.getpid())
    with start(FERRYMAN_HOST="0.0.0.0", FERRYMAN_DECODE_PARENT_PID=parent) as service:
        assert service.stdout is not None
        assert '"address": "0.0.0.0"' in service.stdout.readline()
        service.send_signal(signal.SIGTERM)
        _, stderr = service.communicate()
        assert service.returncode == 0
        assert stderr.endswith(" INFO test drained\n")


def test_two_mistakes_are_two_lines_and_status_2() -> None:
    with start(FERRYMAN_LOG_LEVEL="LOUD", FERRYMAN_DECODE_PRT="1") as service:
        _, stderr = service.communicate()
        assert service.returncode == 2
        first, second = stderr.splitlines()
        assert first.startswith("error: FERRYMAN_LOG_LEVEL='LOUD': it should be one of DEBUG")
        assert second.startswith("error: FERRYMAN_DECODE_PRT is no setting")


def test_a_service_whose_parent_is_another_ends_before_it_serves() -> None:
    with start(FERRYMAN_DECODE_PARENT_PID=str(2**22 + 1)) as service:
        stdout, _ = service.communicate()
        assert (stdout, service.returncode) == ("", -signal.SIGTERM)
