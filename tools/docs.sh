#!/usr/bin/env bash
# Builds the pages of this repository, the tour and an API reference as a site in build/site. It is strict: a link or an
# anchor that leads nowhere fails it. Sets up .venv-docs, some 50 MB. Set DOCS_PYTHON to a Python that has the extra
# `docs` to use that instead.
set -euo pipefail
cd "$(dirname "$0")/.."

fill_venv() { install_into "$1" --requirement constraints-docs.txt; }

if [[ -z ${DOCS_PYTHON:-} ]]; then
  source tools/venv.sh
  base=$(find_python 3.12 3.13 3.11 3.10)
  make_venv .venv-docs "$(without_comments constraints-docs.txt | cksum)" "$base" fill_venv
  DOCS_PYTHON=$PWD/.venv-docs/bin/python
fi

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
