#!/usr/bin/env bash
# A run on nodes that Slurm gives: a raylet on each, the head on the first, `mrl train` beside it.
#   sbatch launch/slurm.sh PRESET --run-dir /shared/runs/NAME [further arguments of mrl train; --resume goes on where a job ended]
# From a checkout that every node sees, with mrl installed in the environment that is active. Options below are for four nodes of eight GPUs;
# those of the command line win (sbatch --nodes 16 ...). INTERFACE: by which nodes reach each other, where that is not the first address.
#SBATCH --job-name=mrl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@900
#SBATCH --output=mrl-%j.log
# --mem=0: all of a node's. --signal: 15 minutes before the time is over the run is told to end, which finishes a step and saves.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
# shellcheck source=launch/common.sh
source launch/common.sh
[ $# -gt 0 ] || { echo "usage: sbatch launch/slurm.sh PRESET --run-dir DIR [arguments of mrl train]" >&2; exit 2; }
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes[0]} others=${#nodes[@]}
others=$((others - 1))
device=$(mrl_device)
devices=${SLURM_GPUS_ON_NODE:-$(mrl_count "$device")}

# the batch shell runs on the first node; what its name resolves to is often loopback, so the address is asked of the interface.
# Bridges of containers and virtual machines have global addresses too, the same ones on every node
bridges='^(docker|podman|br-|veth|virbr|lxc|cni|flannel|cali)'
address=$(ip -4 -o address show ${INTERFACE:+dev "$INTERFACE"} scope global |
    awk -v bridges="$bridges" -v named="${INTERFACE:-}" 'named || $2 !~ bridges { split($4, part, "/"); print part[1]; exit }')
[ -n "$address" ] || { echo "no address${INTERFACE:+ on $INTERFACE} of $first: set INTERFACE" >&2; exit 4; }
# a port of this job's own: another job of yours may share the network, though not the nodes
port=$((6379 + SLURM_JOB_ID % 1000))
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN DEVICE=$device DEVICES=$devices
export TEMP=${TEMP:-/tmp/ray-mrl-$SLURM_JOB_ID} # short: Ray puts sockets below it

# a step does not take over the job's --cpus-per-task (since 22.05): where tasks are bound, Ray would see one core of a node
cores=${SLURM_CPUS_PER_TASK:-1}
HOST=$address PORT=$port DASHBOARD_PORT=$((port + 2000)) srun --nodes=1 --ntasks=1 --cpus-per-task="$cores" --overlap --nodelist="$first" launch/start_head.sh --block &
if [ "$others" -gt 0 ]; then
    HEAD=$address:$port srun --nodes="$others" --ntasks="$others" --ntasks-per-node=1 --cpus-per-task="$cores" --overlap --exclude="$first" launch/start_worker.sh --block &
fi
mrl_wait_cluster "$address:$port" $(((others + 1) * devices)) "$device"

RAY_ADDRESS=$address:$port mrl train "$@" &
run=$!
trap 'kill -TERM "$run" 2>/dev/null' TERM INT
status=0
wait "$run" || status=$?
# a signal ends the first wait, while the run still saves
if kill -0 "$run" 2>/dev/null; then
    status=0
    wait "$run" || status=$?
fi
mapfile -t left < <(jobs -p)
kill "${left[@]}" 2>/dev/null || true
exit "$status"
