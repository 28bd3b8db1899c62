#!/usr/bin/env bash
# Joins this machine to the head that launch/start_head.sh started elsewhere.
#   HEAD=10.0.0.1:6379 launch/start_worker.sh [arguments of ray start]
# DEVICE, DEVICES, DEVICE_TIMEOUT_S, CPUS: as in start_head.sh. HEAD_TIMEOUT_S: how long the head is waited for (600).
# The head's token must be here: copy its ~/.ray/auth_token, or set RAY_AUTH_TOKEN.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[[ ${HEAD:-} =~ ^[^:]+:[0-9]+$ ]] || { echo "HEAD=HOST:PORT of the head is needed; it is ${HEAD:-not set}" >&2; exit 2; }
mrl_check_number CPUS "${CPUS:-}" 0 100000
mrl_check_number DEVICES "${DEVICES:-}" 0 100000
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
if [ "$RAY_AUTH_MODE" != token ] && [ "${MRL_ALLOW_OPEN_RAY:-}" != 1 ]; then
    echo "RAY_AUTH_MODE=$RAY_AUTH_MODE: whoever reaches this host could have Ray run anything; unset it, or set MRL_ALLOW_OPEN_RAY=1" >&2
    exit 4
fi
if [ "$RAY_AUTH_MODE" = token ] && [ -z "${RAY_AUTH_TOKEN:-}" ]; then mrl_check_token "$(mrl_token_file)"; fi
if [ "$RAY_AUTH_MODE" = token ] && [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -s "$(mrl_token_file)" ]; then
    echo "no token here: copy ~/.ray/auth_token from the head's node, or set RAY_AUTH_TOKEN" >&2
    exit 4
fi
device=$(mrl_device)
devices=$(mrl_wait_local "$device")
read -ra resources <<<"$(mrl_resources "$device" "$devices")"
end=$((SECONDS + ${HEAD_TIMEOUT_S:-600}))
until (exec 3<>"/dev/tcp/${HEAD%:*}/${HEAD#*:}") 2>/dev/null; do
    [ $SECONDS -lt $end ] || { echo "no head answers at $HEAD after ${HEAD_TIMEOUT_S:-600} s; start it with launch/start_head.sh" >&2; exit 4; }
    sleep "${POLL_S:-2}"
done
exec ray start --address "$HEAD" --num-cpus "${CPUS:-$(mrl_cores)}" --disable-usage-stats "${resources[@]}" "$@"
