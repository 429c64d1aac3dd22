"""The settings that the Helm chart's values may name, from the settings' own declarations.

python tools/chart_settings.py          writes them into values.schema.json
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from ferryman.settings.names import names_of

SCHEMA = Path(__file__).parents[1] / "deploy" / "helm" / "ferryman" / "values.schema.json"
# The schema's definitions, and whose settings they list.
ROLES = {
    "routerSettings": "router",
    "prefillSettings": "prefill",
    "decodeSettings": "decode",
    "hostCacheSettings": "hostcache",
}
# Settings that are values of their own in the chart, or that join its objects to each other.
WIRED = set(
    """advertise api_keys api_keys_file arena_folder cluster cluster_key_file credentials_file
    device drain_seconds dtype grpc_port host host_memory hostcache_address http_port memory_bytes
    model nats_url node observe_port page_size parent_pid port redis_url served_name storage_bytes
    storage_dir tls_dir tp_size workers""".split()
)


def written(schema: str) -> str:
    """The schema with each role's settings as declared. Raises ValueError if one has no place."""
    for definition, role in ROLES.items():
        names = ", ".join(json.dumps(name) for name in sorted(names_of(role) - WIRED))
        lines = textwrap.indent(textwrap.fill(names, 88, break_long_words=False), " " * 10)
        place = re.compile(rf'("{definition}": {{[^\[]*\[)[^\]]*?(\s*\])')
        found = place.search(schema)
        if found is None:
            raise ValueError(f"the schema has no place for {definition}")
        before, after = schema[: found.start()], schema[found.end() :]
        schema = f"{before}{found[1]}\n{lines}{found[2]}{after}"
    return schema


if __name__ == "__main__":
    SCHEMA.write_text(written(SCHEMA.read_text()))
