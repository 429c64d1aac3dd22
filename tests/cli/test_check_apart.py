"""The check of `up` runs in a process of its own; its answer and its refusal come back."""

from __future__ import annotations

import json
import subprocess
import sys

from ferryman_launcher.check_apart import CheckedCluster
from ferryman_launcher.options import up_options, up_sources

# In a fresh process: one that has run other tests has threads, and must not fork.
SCRIPT = """
import json, os, sys
from ferryman.errors import ConfigError, FerrymanError
from ferryman_launcher.check_apart import answer_of_child

def refuse():
    raise ConfigError("--http-port 1: is taken")

def die():
    os.kill(os.getpid(), 9)

def tried(work):
    try:
        return answer_of_child(work)
    except (ConfigError, FerrymanError) as error:
        return type(error).__name__, str(error)

told = tried(lambda: {"pid": os.getpid(), "has_torch": bool(__import__("torch"))})
print(json.dumps({
    "is_apart": told["pid"] != os.getpid(),
    "was_imported": [told["has_torch"], "torch" in sys.modules],
    "refused": tried(refuse),
    "killed": tried(die),
}))
"""


def test_answer_refusal_and_death_of_the_check_come_back() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert json.loads(done.stdout) == {
        "is_apart": True,
        "was_imported": [True, False],
        "refused": ["ConfigError", "--http-port 1: is taken"],
        "killed": ["FerrymanError", "the check of the options ended with status -9"],
    }, done.stderr


def test_what_was_derived_stands_beside_what_one_role_was_told() -> None:
    choices = up_options(up_sources({}, {"FERRYMAN_DECODE_MAX_RESERVED": "3"}))
    derived = {"decode": {"dtype": "float64"}, "prefill": {"dtype": "float32"}}
    told = CheckedCluster((), derived, (), ()).completed(choices).told
    assert told["decode"]["max_reserved"] == "3"
    assert [told[role]["dtype"] for role in ("decode", "prefill")] == ["float64", "float32"]
