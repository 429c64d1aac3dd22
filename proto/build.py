"""Compiles proto/ferryman/wire/v1/*.proto into shared/ferryman/wire/v1.

A hatch build hook (editable installs and wheels run it) and a script: `python proto/build.py`.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

PACKAGE = Path("ferryman/wire/v1")


def compile_protos(root: Path) -> None:
    """Writes the modules and their stubs; raises RuntimeError when protoc refuses a file."""
    from grpc_tools import protoc

    source, target = root / "proto", root / "shared"
    (target / PACKAGE).mkdir(parents=True, exist_ok=True)
    (target / PACKAGE / "__init__.py").write_text('"""Generated from proto/; not committed."""\n')
    google = resources.files("grpc_tools") / "_proto"
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    files = sorted(str(path) for path in (source / PACKAGE).glob("*.proto"))
    if protoc.main(["protoc", f"-I{source}", f"-I{google}", *outputs, *files]) != 0:
        raise RuntimeError("protoc failed; its message is above")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, outside a build
    pass
else:

    class ProtoBuildHook(BuildHookInterface):  # type: ignore[misc, unused-ignore]
        """Hatch calls this before it packs or links anything."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            compile_protos(Path(self.root))


if __name__ == "__main__":
    compile_protos(Path(__file__).resolve().parents[1])
