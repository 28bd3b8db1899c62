#!/usr/bin/env bash
# The pages of docs/ as a site, in an environment of its own (.venv-docs): bash scripts/docs.sh [build|serve]
# build writes site/ and fails for a link that leads nowhere; serve shows the pages on 127.0.0.1:8000 while they are edited.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${MRL_DOCS_VENV:-.venv-docs}
pins=(mkdocs==1.6.1 mkdocs-material==9.8.1)
stamp=$venv/.$(sha256sum <<<"${pins[*]}" | cut -c1-16)
if [ ! -e "$stamp" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check -q "${pins[@]}"
    touch "$stamp"
fi
export NO_MKDOCS_2_WARNING=1  # about a successor, on every build
case "${1:-build}" in
    build) "$venv/bin/mkdocs" build --strict --quiet && echo "site/index.html" ;;
    serve) exec "$venv/bin/mkdocs" serve --dev-addr 127.0.0.1:8000 ;;
    *) echo "usage: scripts/docs.sh [build|serve]" >&2; exit 2 ;;
esac
