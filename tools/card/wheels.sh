#!/usr/bin/env bash
# Fills a folder with the wheels that a card's check needs on a bare machine, for that machine's Python:
#   bash tools/card/wheels.sh FOLDER [3.12]
# Then carry the folder: bash tools/card/check.sh --wheels FOLDER
set -euo pipefail
folder=${1:?usage: wheels.sh FOLDER [PYTHON]}; version=${2:-3.12}
cd "$(dirname "$0")/../.."
case $folder in /*) ;; *) folder=$OLDPWD/$folder ;; esac
# pip takes a platform as it is named: it does not look for the wheels of older systems by itself.
python3 -m pip download --quiet --only-binary=:all: --no-deps --constraint constraints.txt \
  --python-version "$version" --implementation cp \
  --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 --platform any \
  --dest "$folder" --requirement tools/card/wheels.txt
