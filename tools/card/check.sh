#!/usr/bin/env bash
# Everything that is asked of a card, in one go of six minutes:
#   bash tools/card/check.sh [--wheels FOLDER] [arguments of python -m tools.card.check]
# The machine has torch, Triton, transformers and pytest; FOLDER has the rest (tools/card/wheels.txt). --device cpu
# asks the same of a processor, with a tiny model.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ "${1:-}" = --wheels ]; then
  python3 -m pip install --quiet --no-deps --no-index --find-links "$2" "$2"/*.whl
  shift 2
fi
export PYTHONPATH="$PWD/services:$PWD/shared:$PWD/kernels:$PWD${PYTHONPATH:+:$PYTHONPATH}"
[ -d shared/ferryman/wire/v1 ] || python3 proto/build.py
exec python3 -m tools.card.check "$@"
