#!/usr/bin/env bash
# Builds the documentation as a site in build/site: the pages of this repository, and a reference made from docstrings.
# It is strict: a link, an anchor or a name that leads nowhere fails it. Sets up .venv-docs, some 100 MB, without torch:
# docstrings are read, nothing is imported. Set DOCS_PYTHON to a Python that has the extra `docs` to use that instead.
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
mkdir -p "$pages/reference"
cp -r ./*.md LICENSE docs examples tools tests "$pages"
find "$pages" -name __pycache__ -prune -exec rm -rf {} +
{
  echo "# Reference"
  echo "What \`import megatron_rl_loss\` gives. Other modules:"
  echo
  while read -r file; do
    module=${file#./}
    module=${module%.py}
    module=${module%/__init__}
    module=${module//\//.}
    printf '# %s\n\n::: %s\n    options:\n      show_root_heading: false\n' "$module" "$module" > "$pages/reference/$module.md"
    echo "- [$module]($module.md)"
  done < <(find ./megatron_rl_loss -name '*.py' ! -name '_*' ! -path '*/examples/*' | sort)
  printf '\n::: megatron_rl_loss\n    options:\n      show_root_heading: false\n      show_submodules: false\n'
} > "$pages/reference/index.md"
NO_MKDOCS_2_WARNING=1 "$DOCS_PYTHON" -m mkdocs build --strict
echo "build/site/index.html"
