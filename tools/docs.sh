#!/usr/bin/env bash
# Builds the pages of this repository, the tour and an API reference as a site in build/site. It is strict: a link or an
# anchor that leads nowhere fails it. Sets up .venv-docs, some 50 MB. Set DOCS_PYTHON to a Python that has the extra
# `docs` to use that instead.
set -euo pipefail
cd "$(dirname "$0")/.."

set_up() {
  local base version wanted
  source tools/find_python.sh
  for version in 3.12 3.13 3.11 3.10; do
    base=$(python_of "$version")
    if [[ -n $base ]]; then break; fi
  done
  [[ -n $base ]] || { echo "No Python 3.10 to 3.13 with venv and ensurepip found; set DOCS_PYTHON." >&2; exit 1; }
  wanted=$(cat constraints-docs.txt | cksum)
  if [[ $(cat .venv-docs/ready 2>/dev/null) != "$wanted" ]]; then
    echo "Setting up .venv-docs ..."
    "$base" -m venv --clear .venv-docs
    .venv-docs/bin/python -m pip --disable-pip-version-check install -qq --requirement constraints-docs.txt
    echo "$wanted" > .venv-docs/ready
  fi
  DOCS_PYTHON=$PWD/.venv-docs/bin/python
}
if [[ -z ${DOCS_PYTHON:-} ]]; then set_up; fi

# Everything that a page links to, where the link looks for it.
pages=build/pages
rm -rf "$pages"
mkdir -p "$pages"
cp -r ./*.md LICENSE docs examples tools tests "$pages"
find "$pages" -name __pycache__ -prune -exec rm -rf {} +
"$DOCS_PYTHON" tools/api_reference.py "$pages/docs/api"
"$DOCS_PYTHON" tools/tour.py --page "$pages/docs/tour.md"
NO_MKDOCS_2_WARNING=1 "$DOCS_PYTHON" -m mkdocs build --strict
echo "build/site/index.html"
