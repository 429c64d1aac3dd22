"""The console script: `ferryman COMMAND`."""

from __future__ import annotations

from ferryman_cli.app import main

if __name__ == "__main__":
    main()
