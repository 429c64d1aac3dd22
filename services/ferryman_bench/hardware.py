"""The machine of a measurement. Figures of two processors are never compared.

A virtual machine often hides the processor's full name, so family and model stand beside it: they
tell generations apart.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError

INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "asimddp": "dot products",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "sve": "SVE",
}
"""The instruction sets that decide how fast products are, by their flags in /proc/cpuinfo."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the measurements.

    `governor` is that of the first core ("" where the kernel names none); `load` is the mean number
    of processes ready to run.
    """

    processor: str
    instructions: tuple[str, ...]
    cores: int
    governor: str
    load: float

    def __str__(self) -> str:
        governor = f"governor {self.governor}, " if self.governor else ""
        known = ", ".join(self.instructions) or "no known vector instructions"
        return f"{self.processor}, {self.cores} cores ({known}), {governor}load {self.load}"


def machine_now(root: Path = Path("/")) -> Machine:
    """This machine, and how busy it is."""
    fields = _first_processor(root / "proc/cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    governor = root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    return Machine(
        _name(fields),
        tuple(name for flag, name in INSTRUCTIONS.items() if flag in flags),
        os.cpu_count() or 1,
        governor.read_text().strip() if governor.is_file() else "",
        round(os.getloadavg()[0], 1),
    )


def check_same_processor(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises ConfigError if two machines, as in the JSON of two runs, have other processors."""
    for name in ("processor", "instructions", "cores"):
        if old.get(name) != new.get(name):
            raise ConfigError(
                f"the runs are from different processors ({name}: {_said(old.get(name))} and "
                f"{_said(new.get(name))}); figures compare only within one: measure both here"
            )


def machine_json(machine: Machine) -> dict[str, Any]:
    return {**asdict(machine), "instructions": list(machine.instructions)}


def _first_processor(cpuinfo: Path) -> Mapping[str, str]:
    try:
        text = cpuinfo.read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _name(fields: Mapping[str, str]) -> str:
    family, model = fields.get("cpu family"), fields.get("model")
    name = re.sub(r"\s+", " ", fields.get("model name") or platform.machine())
    return f"{name} (family {family}, model {model})" if family and model else name


def _said(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
