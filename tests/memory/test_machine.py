"""The memory that is free here: the least of what the kernel and the control groups leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ferryman.sizing.machine import free_memory, this_machine
from ferryman_kernels.cpu.processor import has_bfloat16

GIB = 1 << 30
MEMINFO = f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB >> 10} kB\n"
V1 = "sys/fs/cgroup/memory"


def root_of(folder: Path, files: Mapping[str, str]) -> Path:
    """A root folder with these files in it."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def v2(group: str, limit: str, used: int, idle: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{group}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {idle}\n",
    }


def v1(group: str, limit: int, used: int, idle: int = 0) -> dict[str, str]:
    folder = f"{V1}{group}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"total_inactive_file {idle}\n",
    }


def test_without_groups_the_kernel_says_what_is_free(tmp_path: Path) -> None:
    found = free_memory(root_of(tmp_path, {}))
    assert (found.num_bytes, found.limited_by) == (8 * GIB, "MemAvailable")


@pytest.mark.parametrize(
    ("files", "expected", "limited_by"),
    [
        pytest.param(
            {"proc/self/cgroup": "0::/a/b\n", **v2("/a/b", str(4 * GIB), GIB)},
            3 * GIB,
            "/a/b",
            id="v2",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                **v2("/a/b", "max", GIB),
                **v2("/a", str(2 * GIB), GIB, GIB // 2),
            },
            GIB + GIB // 2,
            "/a",
            id="v2, a group above, with file pages that nobody reads",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/of/the/host\n", **v2("", str(2 * GIB), GIB)},
            GIB,
            "control group /",
            id="v2 in a container, which sees its group as the root",
        ),
        pytest.param(
            {"proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n", **v1("/x", 3 * GIB, GIB, GIB)},
            3 * GIB,
            "/x",
            id="v1",
        ),
        pytest.param(
            {"proc/self/cgroup": "4:memory:/x\n", **v1("/x", 9223372036854771712, GIB)},
            8 * GIB,
            "MemAvailable",
            id="v1 without a limit",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/a\n", **v2("/a", str(GIB), 2 * GIB)},
            0,
            "/a",
            id="a limit that was lowered below what is used",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/../../b\n", **v2("", str(GIB), 0)},
            GIB,
            "control group /",
            id="a path out of this namespace",
        ),
        pytest.param(
            {"proc/self/cgroup": "what\n\n:::\n", **v2("", str(GIB), 0)},
            8 * GIB,
            "MemAvailable",
            id="lines that say nothing",
        ),
    ],
)
def test_the_smallest_limit_wins(
    files: dict[str, str], expected: int, limited_by: str, tmp_path: Path
) -> None:
    found = free_memory(root_of(tmp_path, files))
    assert found.num_bytes == expected
    assert found.limited_by.endswith(limited_by)


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags : fpu amx_bf16\n", True),
        ("flags : fpu avx512f avx512bw\n", False),
        ("flags : fpu my_bf16_too\n", False),
        ("Features : fp asimd bf16\n", True),
        ("Features : fp asimd\n", False),
        ("", False),
    ],
)
def test_bfloat16_is_an_instruction_of_the_processor(cpuinfo: str, expected: bool) -> None:
    assert has_bfloat16(cpuinfo) is expected


def test_this_machine_has_memory() -> None:
    assert this_machine(with_cards=False).free_bytes > 0
