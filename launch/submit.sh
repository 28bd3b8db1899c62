#!/usr/bin/env bash
# Submits `mrl train` as a Ray job and waits for it; exits 0 exactly when the run succeeded. A thin call of `mrl submit` from the checkout.
#   launch/submit.sh CONFIG [arguments of mrl train]
# RAY_API: address of the cluster's dashboard (default http://127.0.0.1:8265). RUNTIME_ENV: default launch/runtime_env.<cluster.device>.yaml.
# AGENT_TIMEOUT_S: how long to try while a head that has just started cannot run jobs yet (120).
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { echo "usage: launch/submit.sh CONFIG [arguments of mrl train]" >&2; exit 2; }
exec mrl submit --address "${RAY_API:-http://127.0.0.1:8265}" --agent-timeout-s "${AGENT_TIMEOUT_S:-120}" \
    ${RUNTIME_ENV:+--runtime-env "$RUNTIME_ENV"} "$@"
