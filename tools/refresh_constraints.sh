#!/usr/bin/env bash
# Writes constraints.txt and constraints-docs.txt anew, with the newest versions that pyproject.toml allows, from new
# environments of Python 3.12. Run tools/test.sh before you commit them. constraints-core.txt holds versions for several
# Pythons and is kept by hand.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
base=$(find_python 3.12)

refresh() { # FILE REQUIREMENT...
  local file=$1
  "$base" -m venv --clear "$work/venv"
  install_into "$work/venv" --upgrade pip
  install_into "$work/venv" "${@:2}"
  grep '^#' "$file" > "$work/new"
  "$work/venv/bin/python" -m pip --disable-pip-version-check freeze --all --exclude megatron-rl-loss >> "$work/new"
  mv "$work/new" "$file"
}

refresh constraints.txt '.[megatron,demo,test]'
mapfile -t docs < <("$base" - <<'END'
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")
END
)
refresh constraints-docs.txt "${docs[@]}"
git diff --stat -- 'constraints*.txt'
