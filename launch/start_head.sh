#!/usr/bin/env bash
# Starts a Ray head on this machine for jobs. The dashboard answers on HOST only (default loopback), but Ray's own ports listen everywhere,
# and a Ray cluster runs whatever it is sent: leave Ray's token authentication on.
#   HOST=10.0.0.1 PORT=6379 DASHBOARD_PORT=8265 CPUS=2 TEMP=/tmp/ray-mrl launch/start_head.sh [arguments of ray start]
# DEVICE: cpu, cuda or npu (default: what this node shows). DEVICES: how many it must show, waited for DEVICE_TIMEOUT_S (300).
# launch/stop_head.sh stops it, with the same TEMP.
# NNODES: with it the script returns once so many nodes of DEVICES devices have joined (start_worker.sh), waited for CLUSTER_TIMEOUT_S (900).
# Between nodes TCP is open from 1024 to 65535, or at least: PORT, Ray's (--node-manager-port, --object-manager-port, --min-worker-port and
# --max-worker-port name them), 20000 to 29999, where ranks meet, and the kernel's own (ip_local_port_range): gloo and NCCL listen there.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
host=${HOST:-127.0.0.1} port=${PORT:-6379} dashboard=${DASHBOARD_PORT:-8265} temp=${TEMP:-/tmp/ray-mrl}
mrl_check_number PORT "$port" 1 65535
mrl_check_number DASHBOARD_PORT "$dashboard" 1 65535
mrl_check_number CPUS "${CPUS:-}" 0 100000
mrl_check_number DEVICES "${DEVICES:-}" 0 100000
[ "$port" != "$dashboard" ] || { echo "PORT and DASHBOARD_PORT are both $port: two are wanted" >&2; exit 4; }
for name in PORT DASHBOARD_PORT; do
    p=$port
    [ $name = PORT ] || p=$dashboard
    if (exec 3<>"/dev/tcp/$host/$p") 2>/dev/null; then
        echo "port $p on $host is in use, by a head of yours (launch/stop_head.sh), of another user, or another program: set $name to a free one" >&2
        exit 4
    fi
    mrl_check_port $name "$p" "$@"
done
device=$(mrl_device)
devices=$(mrl_wait_local "$device")
read -ra resources <<<"$(mrl_resources "$device" "$devices")"
# AGENT_PORT: where the agent that starts jobs listens; 0: a free one, since with Ray's default a second Ray on the host has a head without agent
# the token that guards a head is made on its first start (~/.ray/auth_token); RAY_AUTH_TOKEN names one from elsewhere
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
if [ "$RAY_AUTH_MODE" != token ] && [ "${MRL_ALLOW_OPEN_RAY:-}" != 1 ]; then
    echo "RAY_AUTH_MODE=$RAY_AUTH_MODE: whoever reaches this host could have Ray run anything; unset it, or set MRL_ALLOW_OPEN_RAY=1" >&2
    exit 4
fi
mrl_make_token
mrl_make_temp "$temp"
# a node that is gone is missed after four looks without an answer, a second each and a second apart: within 9 s. A node that lost its power
# refuses nothing, and by Ray's own values each of five looks then takes 10 s
export RAY_health_check_period_ms=${RAY_health_check_period_ms:-1000} RAY_health_check_timeout_ms=${RAY_health_check_timeout_ms:-1000}
export RAY_health_check_failure_threshold=${RAY_health_check_failure_threshold:-4}
start=(ray start --head --node-ip-address "$host" --port "$port" --dashboard-host "$host" --dashboard-port "$dashboard"
    --dashboard-agent-listen-port "${AGENT_PORT:-0}" --num-cpus "${CPUS:-$(mrl_cores)}" --temp-dir "$temp" --disable-usage-stats
    "${resources[@]}" "$@")
[ -n "${NNODES:-}" ] || exec "${start[@]}"
"${start[@]}"
mrl_wait_cluster "$host:$port" $((NNODES * devices)) "$device"
