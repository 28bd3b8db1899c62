#!/usr/bin/env bash
# Submits `mrl train` as a Ray job and waits for it; exits 0 exactly when the run succeeded.
#   launch/submit.sh CONFIG [arguments of mrl train]
# RAY_API: address of the cluster's dashboard (default http://127.0.0.1:8265). RUNTIME_ENV: default launch/runtime_env.cpu.yaml.
# The run directory must be a path that outlives the job's working directory: give --run-dir an absolute path.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { echo "usage: launch/submit.sh CONFIG [arguments of mrl train]" >&2; exit 2; }
# the token that guards a head is made on its first start (~/.ray/auth_token); RAY_AUTH_TOKEN names one from elsewhere
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
api=${RAY_API:-http://127.0.0.1:8265} job=mrl-$(date +%s)-$$
# a head that has just started takes the request before it has an agent that can run it
until said=$(ray job submit --no-wait --address "$api" --submission-id "$job" --runtime-env "${RUNTIME_ENV:-launch/runtime_env.cpu.yaml}" -- \
    mrl train "$@" 2>&1); do
    [[ $said == *"No available agent"* && $SECONDS -lt ${AGENT_TIMEOUT_S:-120} ]] || { echo "$said" >&2; exit 4; }
    sleep 1
done
echo "$said"
ray job logs --follow --address "$api" "$job" || true # also ends well when the head is lost while the job runs: the status says
ray job status --address "$api" "$job" 2>&1 | grep -q succeeded
