#!/usr/bin/env bash
# The ladder out of the archive of pack.sh, on a machine with torch and without a network: installs beside it, into deps/, the wheels
# that this Python does not have, and climbs. Arguments as those of run.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
"$python" -c 'import torch' || { echo "$python has no torch; PYTHON=... names one that has" >&2; exit 1; }
mapfile -t missing < <("$python" - "$here/wheels" <<'PY'
import importlib.metadata, pathlib, sys
have = {entry.metadata["Name"].lower().replace("_", "-") for entry in importlib.metadata.distributions()}
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    if wheel.name.split("-")[0].lower().replace("_", "-") not in have:
        print(wheel)
PY
)
if [ "${#missing[@]}" -gt 0 ]; then
    "$python" -m pip --disable-pip-version-check -q install --no-index --no-deps --target "$here/deps" --upgrade "${missing[@]}"
fi
mkdir -p "$here/bin" "$here/deps"
# Transformer Engine's part for torch is compiled against the torch that is here
for source in "$here"/sources/*.tar.gz; do
    [ -e "$source" ] || continue
    PYTHONPATH="$here/deps" MAX_JOBS="${MAX_JOBS:-$(nproc)}" NVTE_FRAMEWORK=pytorch "$python" -m pip --disable-pip-version-check -q \
        install --no-index --no-deps --no-build-isolation --target "$here/deps" --upgrade "$source"
done
# no link: Python would not find the environment that it belongs to
printf '#!/bin/sh\nexec "%s" "$@"\n' "$(command -v "$python")" >"$here/bin/python"
chmod +x "$here/bin/python"
PATH="$here/bin:$PATH" PYTHONPATH="$here/deps${PYTHONPATH:+:$PYTHONPATH}" exec bash "$here/scripts/hardware/run.sh" "$@"
